"""Names of the routing policies, as flags, files and labels of upstreams give them."""

from __future__ import annotations

from typing import Final

POLICIES: Final = (
    "random",
    "round_robin",
    "power_of_two",
    "least_load",
    "cache_aware",
    "prefix_hash",
    "consistent_hash",
    "dp_sticky",
)
POLICY_ALIASES: Final = (("consistent_hashing", "consistent_hash"),)
POLICY_HINTS: Final = (("manual", "dp_sticky"), ("sticky_least_loaded", "dp_sticky"))
"""Names that others use for something alike: refused, with what to write instead."""
