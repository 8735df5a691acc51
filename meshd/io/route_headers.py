"""`--route-headers`: which upstream answered, and why, in fields of every answer to a placed request.

They show internal addresses, so they are off by default. ``x-mesh-route-reason`` tells what
the upstream had to be to become a candidate, and then the reason of the policy. A resource operation asks all
origins and no policy: it has only ``fan_out`` there, and no version of a policy.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Final

from meshd.config import Settings
from meshd.routing.placement import FAN_OUT

if TYPE_CHECKING:
    from meshd.io.account import Record
    from meshd.io.http1 import Field
    from meshd.routing.placement import Placement

VERSION_LABEL: Final = "mesh.model_version"
_DIGITS: Final = 8
_SETTINGS: Final = {
    "cache_aware": ("cache_threshold", "balance_abs_threshold", "balance_rel_threshold", "max_tree_size"),
    "prefix_hash": ("prefix_token_count", "prefix_hash_load_factor"),
}
"""What decides picks, of the policies that have settings."""


def policy_version(policy: str, settings: Settings) -> str:
    """Return ``<policy>-<8 hex digits>``, which change exactly when a setting of the policy changes."""
    values = {name: getattr(settings, name) for name in _SETTINGS.get(policy, ())}
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return f"{policy}-{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"


class RouteHeaders:
    """The fields of one process; the versions of its policies are worked out once."""

    __slots__ = ("_settings", "_versions")

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._versions: dict[str, bytes] = {}

    def fields(self, record: Record) -> tuple[Field, ...]:
        """Return the fields of an answer; none for a request that was never placed."""
        placement = record.placement
        if placement is None:
            return ()
        upstream = placement.upstream
        version = upstream.labels.get(VERSION_LABEL) or next(iter(upstream.models), "unknown")
        fields: list[Field] = [
            (b"x-mesh-upstream", _value(upstream.url)),
            (b"x-mesh-attempts", b"%d" % record.attempts),
            (b"x-mesh-model-version", _value(version)),
        ]
        if placement.policy != FAN_OUT:
            fields.append((b"x-mesh-policy-version", self._version(placement.policy)))
        fields.append((b"x-mesh-route-reason", _value(_reason(placement))))
        return tuple(fields)

    def _version(self, policy: str) -> bytes:
        version = self._versions.get(policy)
        if version is None:
            version = self._versions[policy] = policy_version(policy, self._settings).encode()
        return version

    def __repr__(self) -> str:
        return f"RouteHeaders({sorted(self._versions)})"


def _reason(placement: Placement) -> str:
    if placement.policy == FAN_OUT:
        return FAN_OUT
    breaker = "half_open_trial" if placement.is_trial else "circuit_closed"
    return f"capability_match,healthy,{breaker},{placement.reason}"


def _value(text: str) -> bytes:
    """Return text that an upstream may have chosen as the value of a field."""
    return "".join(char if " " <= char <= "~" else "?" for char in text).encode()
