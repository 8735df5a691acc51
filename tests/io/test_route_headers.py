from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshd.config import Settings
from meshd.io.account import Record
from meshd.io.route_headers import RouteHeaders, policy_version
from meshd.routing.placement import FAN_OUT, Placement
from meshd.routing.upstream import Upstream

SETTINGS = Settings()


def upstream(**facts: Any) -> Upstream:
    return Upstream(1, "id", "http://10.0.0.2:8000", **{"models": ("m1", "m2"), **facts})


def told(placement: Placement | None, attempts: int = 1) -> dict[str, str]:
    record = Record(0.0)
    record.placement, record.attempts = placement, attempts
    fields = RouteHeaders(SETTINGS).fields(record)
    assert len({name for name, _ in fields}) == len(fields)
    return {name.decode(): value.decode() for name, value in fields}


def test_placed_request_tells_its_upstream_policy_and_reason() -> None:
    placement = Placement(upstream(), "cache_aware", "cache_hit")
    assert told(placement, attempts=2) == {
        "x-mesh-upstream": "http://10.0.0.2:8000",
        "x-mesh-attempts": "2",
        "x-mesh-model-version": "m1",
        "x-mesh-policy-version": policy_version("cache_aware", SETTINGS),
        "x-mesh-route-reason": "capability_match,healthy,circuit_closed,cache_hit",
    }


def test_trial_of_a_half_open_breaker_is_told() -> None:
    placement = Placement(upstream(), "least_load", "policy:least_load", is_trial=True)
    reason = told(placement)["x-mesh-route-reason"]
    assert reason == "capability_match,healthy,half_open_trial,policy:least_load"


def test_label_names_the_version_of_the_model_and_bytes_of_others_stay_in_one_value() -> None:
    labels = {"mesh.model_version": "2026-01\r\nx-forged: ü"}
    placement = Placement(upstream(labels=labels), "random", "policy:random")
    assert told(placement)["x-mesh-model-version"] == "2026-01??x-forged: ?"
    placement = Placement(upstream(models=()), "random", "policy:random")
    assert told(placement)["x-mesh-model-version"] == "unknown"


def test_request_that_was_never_placed_tells_nothing_and_an_operation_on_all_has_no_policy() -> None:
    assert told(None) == {}
    fields = told(Placement(upstream(), FAN_OUT, FAN_OUT), attempts=3)
    assert fields["x-mesh-route-reason"] == FAN_OUT and fields["x-mesh-attempts"] == "3"
    assert "x-mesh-policy-version" not in fields


@pytest.mark.parametrize(
    ("policy", "change"),
    [
        ("cache_aware", {"cache_threshold": 0.31}),
        ("cache_aware", {"balance_abs_threshold": 65}),
        ("cache_aware", {"balance_rel_threshold": 1.6}),
        ("cache_aware", {"max_tree_size": 1 << 20}),
        ("prefix_hash", {"prefix_token_count": 255}),
        ("prefix_hash", {"prefix_hash_load_factor": 1.3}),
    ],
)
def test_policy_version_changes_exactly_with_a_setting_of_the_policy(
    policy: str, change: dict[str, Any]
) -> None:
    changed = replace(SETTINGS, **change)
    for name in ("cache_aware", "prefix_hash", "round_robin", "dp_sticky"):
        version = policy_version(name, SETTINGS)
        stem, _, digits = version.rpartition("-")
        assert stem == name and len(digits) == 8 and int(digits, 16) >= 0
        assert (policy_version(name, changed) != version) == (name == policy)
        assert policy_version(name, replace(SETTINGS, port=1234)) == version
