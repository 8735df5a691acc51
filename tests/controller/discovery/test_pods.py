"""What the JSON of a pod says to discovery."""

from __future__ import annotations

from typing import Any

import pytest

from meshd.controller.discovery.pods import Pod, serving_pod, uid_of


def pod(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "metadata": {"uid": "u1", "labels": {"app": "engine"}},
        "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    for name, values in changes.items():
        made[name].update(values)
    return made


def test_a_ready_pod_serves_on_the_port_of_discovery() -> None:
    assert serving_pod(pod(), 8000) == Pod("u1", "http://10.0.0.1:8000", ())


def test_an_ipv6_address_is_bracketed() -> None:
    found = serving_pod(pod(status={"podIP": "2001:db8::1"}), 80)
    assert found is not None
    assert found.url == "http://[2001:db8::1]:80"


def test_labels_that_start_with_mesh_are_those_of_the_upstream() -> None:
    labels = {"mesh.responses_state": "shared", "app": "engine", "mesh.capacity": "8", "meshx": "no"}
    found = serving_pod(pod(metadata={"labels": labels}), 80)
    assert found is not None
    assert found.labels == (("mesh.capacity", "8"), ("mesh.responses_state", "shared"))


@pytest.mark.parametrize(
    "changes",
    [
        {"status": {"podIP": ""}},
        {"status": {"podIP": None}},
        {"status": {"conditions": [{"type": "Ready", "status": "False"}]}},
        {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}},
        {"status": {"conditions": [{"type": "ContainersReady", "status": "True"}]}},
        {"status": {"conditions": None}},
        {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}},
    ],
)
def test_a_pod_that_is_not_ready_or_terminates_does_not_serve(changes: dict[str, Any]) -> None:
    assert serving_pod(pod(**changes), 80) is None


def test_a_pod_without_labels_or_status_is_read() -> None:
    assert serving_pod({"metadata": {"uid": "u1"}}, 80) is None
    assert serving_pod(pod(metadata={"labels": None}), 80) is not None


def test_another_uid_or_another_address_is_another_key() -> None:
    keys = {
        found.key
        for found in (
            serving_pod(pod(), 80),
            serving_pod(pod(metadata={"uid": "u2"}), 80),
            serving_pod(pod(status={"podIP": "10.0.0.2"}), 80),
        )
        if found is not None
    }
    assert len(keys) == 3


@pytest.mark.parametrize("metadata", [None, [], {}, {"uid": ""}, {"uid": 1}])
def test_what_has_no_uid_is_refused(metadata: object) -> None:
    with pytest.raises(ValueError, match="UID"):
        uid_of({"metadata": metadata})
