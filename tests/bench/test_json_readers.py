from __future__ import annotations

import pytest

from meshd.api.request_json import parse_body

json_readers = pytest.importorskip("bench.json_readers", exc_type=ImportError)


def member(found, name, place):
    if isinstance(found, tuple):
        return found[place]
    return found[name] if isinstance(found, dict) else getattr(found, name)


@pytest.mark.parametrize("name", json_readers.READERS)
def test_each_reader_finds_the_members_that_routing_looks_at(name):
    facts, text = json_readers.READERS[name]()
    body = json_readers.body_of(16 << 10)
    whole = parse_body(body)
    for place, each in enumerate(("model", "stream")):
        assert member(facts(body), each, place) == member(text(body), each, place) == whole[each]
    assert member(text(body), "messages", 2) == whole["messages"]
    body = json_readers.string_of(16 << 10)
    assert member(facts(body), "model", 0) == "m1"
    assert member(text(body), "prompt", 2) == parse_body(body)["prompt"]


def test_ours_are_the_readers_without_a_fault():
    faultless = [name for name, make in json_readers.READERS.items() if not json_readers.faults(make()[0])]
    assert faultless == ["orjson + checks: the strict reader", "meshd"]


@pytest.mark.parametrize("size", json_readers.SIZES.values())
def test_bodies_are_about_as_long_as_asked(size):
    for make in json_readers.SHAPES.values():
        assert size * 0.9 <= len(make(size)) <= size * 1.1
