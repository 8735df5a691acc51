"""What the JSON of a Kubernetes pod says to discovery: whether it serves, where, and as what.

A pod serves when it has an address, its condition Ready is true and it is not terminating. Its key is its
UID with its URL: a new pod on the address of an old one is another upstream, and so is a pod that came back
with another address.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

LABEL_PREFIX: Final = "mesh."


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that serves. ``labels``: those of the upstream."""

    uid: str
    url: str
    labels: tuple[tuple[str, str], ...]

    @property
    def key(self) -> str:
        return f"{self.uid} {self.url}"


def uid_of(pod: Mapping[str, Any]) -> str:
    """Return the identity of any pod. Raises ``ValueError`` for what is none."""
    metadata = pod.get("metadata")
    uid = metadata.get("uid") if isinstance(metadata, dict) else None
    if not isinstance(uid, str) or not uid:
        raise ValueError("an object without a UID")
    return uid


def serving_pod(pod: Mapping[str, Any], port: int) -> Pod | None:
    """Return the pod with its server on ``port``; None while it does not serve. Raises ``ValueError``."""
    uid = uid_of(pod)
    metadata, status = pod["metadata"], pod.get("status") or {}
    address = status.get("podIP")
    if not address or metadata.get("deletionTimestamp") or not _is_ready(status):
        return None
    host = f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    labels = (metadata.get("labels") or {}).items()
    return Pod(
        uid,
        f"http://{host}:{port}",
        tuple(sorted((key, value) for key, value in labels if key.startswith(LABEL_PREFIX))),
    )


def _is_ready(status: Mapping[str, Any]) -> bool:
    conditions = status.get("conditions") or []
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)
