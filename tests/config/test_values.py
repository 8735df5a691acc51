from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.config.settings import SETTINGS
from meshd.config.values import from_file, from_text, to_toml
from meshd.config.workers import WorkerSpec

_BY_NAME = {each.name: each for each in SETTINGS}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_payload_size", "1_000_000", 1000000),
        ("max_concurrent_requests", "-1", -1),
        ("queue_timeout_secs", ".5", 0.5),
        ("queue_timeout_secs", "1e2", 100.0),
        ("log_level", "warning", "warn"),
        ("log_level", "critical", "error"),
        ("prometheus_duration_buckets", "0.1 1 10", (0.1, 1.0, 10.0)),
        ("request_id_headers", "X-A x-b", ("x-a", "x-b")),
        ("selector", "app=engine spare=", (("app", "engine"), ("spare", ""))),
    ],
)
def test_text_is_read(name: str, text: str, value: object) -> None:
    assert from_text(_BY_NAME[name], text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("max_payload_size", "1__0"),
        ("max_payload_size", " 1"),
        ("max_payload_size", "0x10"),
        ("max_payload_size", "١"),
        ("max_payload_size", "0"),
        ("max_payload_size", str(2**60)),
        ("request_timeout_secs", "0"),
        ("request_timeout_secs", "inf"),
        ("request_timeout_secs", "1e12"),
        ("request_timeout_secs", ""),
        ("max_header_bytes", "1023"),
        ("max_headers", "15"),
        ("prepare_group_size", "65"),
        ("prefix_hash_load_factor", "0.99"),
        ("health_failure_threshold", "0"),
        ("prometheus_duration_buckets", "1 0.5"),
        ("prometheus_duration_buckets", "0 1"),
        ("tokenizer_engine", "sentencepiece"),
        ("selector", "app"),
        ("selector", "app=a=b"),
    ],
)
def test_text_out_of_syntax_or_bounds_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError):
        from_text(_BY_NAME[name], text)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("worker_urls", "http://a:1,http://b:2", "separate URLs by spaces, not commas"),
        ("worker_urls", "http://a, http://b", "separate URLs by spaces, not commas"),
        ("worker_urls", "http://a/x,http://b", "separate URLs by spaces, not commas"),
        ("request_id_headers", "x-a,x-b", "separate names by spaces, not commas"),
        ("prometheus_duration_buckets", "1,2", "separate numbers by spaces, not commas"),
        ("selector", "a=b,c=d", "separate key=values by spaces, not commas"),
        ("worker_urls", "http://a,ftp://b", "'http://a,ftp://b' has no host|is not a host name"),
    ],
)
def test_a_list_with_commas_is_told_how_to_be_written(name: str, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_text(_BY_NAME[name], text)


def test_a_comma_within_an_item_is_kept() -> None:
    assert from_text(_BY_NAME["worker_urls"], "http://a/x,y http://b") == ("http://a/x,y", "http://b")


def test_another_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'foo' is not one of random, .*, dp_sticky$"):
        from_text(_BY_NAME["policy"], "foo")


@pytest.mark.parametrize("name", ["manual", "sticky_least_loaded"])
def test_a_policy_of_another_router_is_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"'{name}' is not one of random, .*; the nearest to it is dp_sticky"
    ):
        from_text(_BY_NAME["policy"], name)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_written_as_toml_is_read_back(text: str) -> None:
    assert tomllib.loads(f"x = {to_toml(text)}") == {"x": text}


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_number_written_as_toml_is_read_back(number: float) -> None:
    assert tomllib.loads(f"x = {to_toml(number)}") == {"x": number}


def test_a_table_of_strings_is_a_table_in_the_file() -> None:
    selector = _BY_NAME["selector"]
    assert from_file(selector, {"app": "engine", "a/b": ""}) == (("app", "engine"), ("a/b", ""))
    for wrong in (["app=engine"], {"app": 1}, "app=engine"):
        with pytest.raises(ValueError, match="must be a table of strings"):
            from_file(selector, wrong)


def test_a_table_is_written_inline_and_without_its_key() -> None:
    spec = WorkerSpec(url="http://a", api_key="hunter2", labels={"mesh.apis": "/x", "a": ""})
    back = tomllib.loads(f"x = {to_toml((spec,))}")["x"][0]
    given = {name: member for name, member in spec.to_dict().items() if member is not None}
    assert back == {**given, "api_key": "***"}
