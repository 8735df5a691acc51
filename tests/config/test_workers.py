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
        ({"colour": 1}, "unknown member colour: it is none of url, api_key, model_id, "),
        ({"worker_type": "encode"}, "worker_type: must be one of regular, prefill, decode"),
        ({"runtime": "sglangg"}, "runtime: must be one of sglang, vllm, trtllm, atom"),
        ({"bootstrap_port": 8998}, "bootstrap_port: only a prefill server has one"),
        ({"worker_type": "prefill", "bootstrap_port": 0}, "bootstrap_port: must be a number from 1"),
        ({"health_check_interval_secs": 0}, "health_check_interval_secs: must be above 0"),
        ({"health_failure_threshold": 0}, "health_failure_threshold: must be at least 1"),
        ({"disable_health_check": 1}, "disable_health_check: must be true or false"),
        (
            {"health_check_interval_secs": 1, "health_check_timeout_secs": 2},
            "health_check_timeout_secs: is above health_check_interval_secs",
        ),
    ],
)
def test_a_fault_names_its_member(members: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_worker({"url": "http://a", **members})
    assert str(caught.value).startswith(words)


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a table"):
        read_worker("http://a")


def test_every_member_of_post_workers_is_taken() -> None:
    spec = read_worker(
        {
            "url": "http://p:1",
            "api_key": "k",
            "model_id": "m1",
            "priority": 7,
            "cost": 2,
            "worker_type": "prefill",
            "bootstrap_port": 8998,
            "runtime": "tensorrt-llm",
            "labels": {"a": "b"},
            "tokenizer_path": "/t",
            "chat_template": "/c",
            "health_check_interval_secs": 2,
            "health_check_timeout_secs": 0.5,
            "health_success_threshold": 1,
            "health_failure_threshold": 4,
            "disable_health_check": False,
            "reasoning_parser": "x",
            "tool_parser": None,
            "dp_aware": True,
            "max_connection_attempts": 3,
        }
    )
    assert (spec.runtime, spec.cost, spec.bootstrap_port) == ("trtllm", 2.0, 8998)
    assert spec.probing == {
        "health_check_interval_secs": 2.0,
        "health_check_timeout_secs": 0.5,
        "health_success_threshold": 1,
        "health_failure_threshold": 4,
        "disable_health_check": False,
    }
    assert WorkerSpec.from_dict(spec.to_dict()) == spec
    assert WorkerSpec("http://a").probing == {}
