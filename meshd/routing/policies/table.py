"""All policies by name; what each one's constructor takes is known here alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final

from meshd.config.policies import POLICIES, POLICY_ALIASES
from meshd.routing.policies.cache_aware import CacheAware
from meshd.routing.policies.consistent_hash import ConsistentHash
from meshd.routing.policies.dp_sticky import DpSticky
from meshd.routing.policies.least_load import LeastLoad
from meshd.routing.policies.power_of_two import PowerOfTwo
from meshd.routing.policies.prefix_hash import PrefixHash
from meshd.routing.policies.random_choice import RandomChoice
from meshd.routing.policies.round_robin import RoundRobin
from meshd.routing.policy import Policy
from meshd.routing.prefix_index import PrefixIndex
from meshd.routing.sessions import SessionTable
from meshd.routing.upstream import POLICY_LABEL

PolicyTable = Mapping[str, Callable[[], Policy]]
"""Policy name → a constructor of a fresh policy object."""

NAMES: Final = frozenset(POLICIES)
_ALIASES: Final = dict(POLICY_ALIASES)


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """What the policies of one process are made of.

    ``first_turn``: its number, so that turns differ between processes. ``index`` and ``sessions`` are shared
    by all of them; the rest are the settings of the same names.
    """

    rng: Random
    first_turn: int
    index: PrefixIndex
    sessions: SessionTable
    prefix_hash_load_factor: float
    cache_threshold: float
    balance_abs_threshold: int
    balance_rel_threshold: float


def policy_table(parts: PolicyParts) -> PolicyTable:
    """Return the policies of one process."""
    rng, turn = parts.rng, parts.first_turn
    return {
        "random": lambda: RandomChoice(rng),
        "round_robin": lambda: RoundRobin(turn),
        "power_of_two": lambda: PowerOfTwo(rng),
        "least_load": lambda: LeastLoad(turn),
        "cache_aware": lambda: CacheAware(
            parts.index,
            turn,
            parts.cache_threshold,
            parts.balance_abs_threshold,
            parts.balance_rel_threshold,
        ),
        "prefix_hash": lambda: PrefixHash(parts.prefix_hash_load_factor),
        "consistent_hash": lambda: ConsistentHash(turn),
        "dp_sticky": lambda: DpSticky(parts.sessions, turn),
    }


def labelled_policy(labels: Mapping[str, str]) -> str:
    """Return the name of the policy that the labels of an upstream ask for; empty if they ask for none.

    Of the names so found only those in ``NAMES`` are policies.
    """
    asked = labels.get(POLICY_LABEL, "").strip()
    return _ALIASES.get(asked, asked)
