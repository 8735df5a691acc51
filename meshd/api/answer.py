"""What a prepare job says of a request that it has answered whole: tokenize and detokenize."""

from __future__ import annotations

from typing import NamedTuple


class Answer(NamedTuple):
    """The finished body of a response, which lies in the view area of the job's slot.

    It is there from ``start`` on, ``length`` bytes, until the slot is released. ``view_bytes``: what the
    view area must hold; if that is more than it has, nothing was written and ``length`` is 0.
    """

    model: str
    start: int
    length: int
    view_bytes: int

    @property
    def is_written(self) -> bool:
        return self.length > 0
