"""Least loaded, ties rotate: what several policies do when nothing else decides.

Turns keep an idle fleet from sending everything to its first upstream.
"""

from __future__ import annotations

from collections.abc import Sequence


class Rotation:
    """The turn counter of one policy object; ``turn`` is where this process starts among equals.

    Whoever only wants to know what would be picked sets ``turn`` back.
    """

    __slots__ = ("turn",)

    def __init__(self, turn: int) -> None:
        self.turn = turn

    def least(self, counts: Sequence[int]) -> int:
        """Return the index of the smallest count; of equal ones each in turn."""
        least = min(counts)
        return self.next_of([index for index, count in enumerate(counts) if count == least])

    def next_of(self, indexes: Sequence[int]) -> int:
        """Return each of ``indexes`` in turn."""
        index = indexes[self.turn % len(indexes)]
        self.turn += 1
        return index
