"""Words for a name that does not exist: the nearest one that does."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

# Below this likeness a proposal misleads more than it helps.
_CUTOFF: Final = 0.6


def unknown(
    what: str, name: str, known: Iterable[str], prefix: str = "", otherwise: str = "see meshd --help"
) -> str:
    """Say that ``name`` is unknown and which of ``known`` is nearest; ``prefix`` is put before both.

    ``otherwise``: what is said if none is near.
    """
    near = get_close_matches(name, list(known), n=1, cutoff=_CUTOFF)
    hint = f"did you mean {prefix}{near[0]}?" if near else otherwise
    return f"unknown {what} {prefix}{name}: {hint}"
