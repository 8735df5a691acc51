"""Answers of the health routes."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from meshd.api.health import HEALTH_ROUTES, HealthFacts, health_answer

SOUND = HealthFacts(
    is_draining=False,
    has_registry=True,
    pool_is_alive=True,
    pool_has_failed=False,
    healthy_workers=3,
    total_workers=4,
)


def test_sound_node_answers_200_in_the_documented_shapes() -> None:
    assert health_answer("liveness", SOUND) == (200, b'{"status":"ok","reason":null}')
    assert health_answer("health", SOUND) == (200, b'{"status":"ok","reason":null}')
    assert health_answer("readiness", SOUND) == (
        200,
        b'{"status":"ready","reason":null,"healthy_workers":3,"total_workers":4}',
    )


def test_failed_pool_is_503_on_every_route() -> None:
    facts = replace(SOUND, pool_is_alive=False, pool_has_failed=True)
    for route in ("liveness", "health", "readiness"):
        status, body = health_answer(route, facts)
        assert (status, orjson.loads(body)["reason"]) == (503, "prepare_pool_failed")


def test_pool_without_live_worker_is_unhealthy_but_lives_and_serves() -> None:
    facts = replace(SOUND, pool_is_alive=False)
    assert health_answer("liveness", facts)[0] == 200
    assert health_answer("health", facts)[0] == 503
    assert health_answer("readiness", facts)[0] == 200


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_draining": True, "has_registry": False, "healthy_workers": 0}, "draining"),
        ({"has_registry": False, "pool_has_failed": True, "healthy_workers": 0}, "starting"),
        ({"pool_has_failed": True, "healthy_workers": 0}, "prepare_pool_failed"),
        ({"healthy_workers": 0, "needs_tokens": True}, "no_available_workers"),
        ({"needs_tokens": True}, "tokenizer_unavailable"),
    ],
)
def test_readiness_names_the_first_reason_that_applies(changes: dict[str, int], reason: str) -> None:
    status, body = health_answer("readiness", replace(SOUND, **changes))
    assert status == 503
    assert orjson.loads(body)["status"] == "not ready"
    assert orjson.loads(body)["reason"] == reason


def test_liveness_does_not_depend_on_upstreams_or_draining() -> None:
    facts = replace(SOUND, is_draining=True, has_registry=False, healthy_workers=0, total_workers=0)
    assert health_answer("liveness", facts)[0] == 200
    assert health_answer("health", facts)[0] == 200


def test_policy_that_needs_tokens_is_ready_with_a_tokenizer() -> None:
    assert health_answer("readiness", replace(SOUND, needs_tokens=True, has_tokenizer=True))[0] == 200


def test_aliases_belong_to_their_routes() -> None:
    assert HEALTH_ROUTES["/healthz"] == "health"
    assert HEALTH_ROUTES["/livez"] == HEALTH_ROUTES["/health/live"] == "liveness"
    assert HEALTH_ROUTES["/health_generate"] == HEALTH_ROUTES["/readyz"] == "readiness"
