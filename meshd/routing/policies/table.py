"""All policies by name; what each one's constructor takes is known here alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from meshd.routing.policies.least_load import LeastLoad
from meshd.routing.policies.power_of_two import PowerOfTwo
from meshd.routing.policies.prefix_hash import PrefixHash
from meshd.routing.policies.random_choice import RandomChoice
from meshd.routing.policies.round_robin import RoundRobin
from meshd.routing.policy import Policy

PolicyTable = Mapping[str, Callable[[], Policy]]
"""Policy name → a constructor of a fresh policy object."""


def policy_table(rng: Random, first_turn: int, prefix_hash_load_factor: float) -> PolicyTable:
    """Return the policies of one process; ``first_turn`` is its number, so that turns differ."""
    return {
        "random": lambda: RandomChoice(rng),
        "round_robin": lambda: RoundRobin(first_turn),
        "power_of_two": lambda: PowerOfTwo(rng),
        "least_load": lambda: LeastLoad(first_turn),
        "prefix_hash": lambda: PrefixHash(prefix_hash_load_factor),
    }
