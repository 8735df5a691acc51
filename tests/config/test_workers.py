from __future__ import annotations

from typing import Any

import pytest

from meshd.config.workers import WorkerSpec, read_worker


def test_a_table_needs_only_a_url() -> None:
    assert read_worker({"url": "HTTP://A/"}) == WorkerSpec(url="http://a")


def test_members_may_be_written_with_hyphens() -> None:
    assert read_worker({"url": "http://a", "model-id": "m"}).model_id == "m"


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"url": "grpc://a"}, "url: "),
        ({"url": 1}, "url: must be a string"),
        ({"priority": 1.5}, "priority: must be a whole number"),
        ({"priority": True}, "priority: must be a whole number"),
        ({"cost": -1}, "cost: must be a number"),
        ({"cost": float("nan")}, "cost: must be a number"),
        ({"labels": {"a": 1}}, "labels: must be a table of strings"),
        ({"api_key": "a\nb"}, "api_key: not a legal header value"),
        ({"lables": {}}, "unknown member lables: did you mean labels?"),
    ],
)
def test_a_fault_names_its_member(members: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_worker({"url": "http://a", **members})
    assert str(caught.value).startswith(words)


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a table"):
        read_worker("http://a")
