"""Facts from /v1/models and how they settle with what was configured."""

from __future__ import annotations

import orjson
import pytest

from meshd.controller.registration import (
    MAX_MODELS,
    Discovered,
    read_models,
    settled_labels,
    settled_models,
)


def test_all_ids_are_read_once_in_order_and_the_first_root_is_the_model_path() -> None:
    body = {"data": [{"id": "b", "root": "/m/b"}, {"id": "a", "root": "/m/a"}, {"id": "b"}, {"id": 7}, "x"]}
    assert read_models(orjson.dumps(body)) == Discovered(("b", "a"), {"model_path": "/m/b"})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"data":{}}', b"\xff"])
def test_answer_that_is_no_model_list_is_a_problem(body: bytes) -> None:
    found = read_models(body)
    assert found.models == ()
    assert found.problem


def test_list_of_models_is_bounded() -> None:
    body = orjson.dumps({"data": [{"id": f"m{n}"} for n in range(1000)] + [{"id": "x" * 10_000}]})
    assert len(read_models(body).models) == MAX_MODELS


def test_configured_labels_win_over_discovered_ones() -> None:
    found = Discovered(("a",), {"model_path": "/found", "extra": "1"})
    assert settled_labels(found, {"model_path": "/mine"}) == {"model_path": "/mine", "extra": "1"}


@pytest.mark.parametrize(
    ("configured", "listed", "labels", "models"),
    [
        (("mine",), ("a", "b"), {"served_model_name": "s"}, ("mine", "a", "b")),
        ((), ("a", "b"), {"served_model_name": "s"}, ("s", "a", "b")),
        ((), ("a", "b"), {"served_model_name": "b"}, ("b", "a")),
        ((), ("a", "b"), {"model_path": "/m"}, ("a", "b")),
        ((), (), {"model_path": "/m"}, ("/m",)),
        ((), (), {}, ("unknown",)),
    ],
)
def test_model_id_comes_from_the_first_source_that_has_one(
    configured: tuple[str, ...], listed: tuple[str, ...], labels: dict[str, str], models: tuple[str, ...]
) -> None:
    assert settled_models(Discovered(listed), configured, labels) == models
