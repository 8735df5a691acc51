"""What the benchmark must know of a front end, and what one start of it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TOKEN_POLICIES: Final = frozenset({"prefix_hash"})  # policies that need a tokenizer


@dataclass(frozen=True, slots=True)
class Site:
    """What one start of a front end is given. ``directory`` is its own, empty and removed afterwards."""

    directory: Path
    port: int
    metrics_port: int
    upstreams: tuple[str, ...]
    policy: str
    tokenizer: Path | None
    extra: tuple[str, ...] = ()
    cores: int = 1


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """``policies``: a policy of ours → its name there, or that of the nearest thing; empty: a floor for any.

    ``made_by``: the command that makes its programs, if they are no packages of the system.
    ``distribution``: the Python distribution that a program must belong to, if any.
    ``tokenizes``: whether it really tokenizes with the policies that need it.
    """

    name: str
    what: str
    programs: tuple[str, ...]
    policies: Mapping[str, str]
    command: Callable[[Site], list[str]]
    made_by: str = ""
    distribution: str = ""
    rewrites_bodies: bool = False
    tokenizes: bool = False

    def can_apply(self, policy: str) -> bool:
        return not self.policies or policy in self.policies
