"""A line of requests that wait for a shared amount: first come, first served within one process.

Between processes there is no order yet, only fairness. A process that gives something back looks who
waits, anywhere, and passes the turn on around the rows: to itself, by serving its own line, or to another
process, by waking it. A newcomer does not take what is free while anyone waits. All of this is only about
whose turn it is: what may be taken at all is `limits.SharedBound`'s word, so a lost wake-up or a wrong
guess costs time, never the bound. ``poll`` makes up for it: called at least every 50 ms and after each
wake-up, it takes whatever is free.

Nothing here reads a clock or knows an event loop; callbacks run inside ``poll``, ``give``, ``leave`` and
``close``, never inside ``join``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Final

from meshd.admission.limits import SharedBound

_ALL: Final = 1 << 60
_MANY_ROWS: Final = 1 << 20  # more than there are rows: makes a distance around them from a difference

Wake = Callable[[int], None]
"""Make the process of that row call ``poll`` soon."""


class Ending(Enum):
    """How a place in the line ended."""

    GRANTED = "granted"  # the amount is the caller's now
    EXPIRED = "expired"
    CLOSED = "closed"


class Place:
    """A place in the line; ``on_end`` is called once unless its owner leaves before."""

    __slots__ = ("amount", "deadline_ns", "is_waiting", "on_end")

    def __init__(self, amount: int, deadline_ns: int, on_end: Callable[[Ending], None]) -> None:
        self.amount = amount
        self.deadline_ns = deadline_ns
        self.on_end = on_end
        self.is_waiting = True


class SharedLine:
    """The line of one process before ``bound``; ``waiting`` counts the places, and bounds them."""

    def __init__(self, bound: SharedBound, waiting: SharedBound, row: int, wake: Wake) -> None:
        self._bound = bound
        self._waiting = waiting
        self._row = row
        self._wake = wake
        self._turn = row
        self._places: OrderedDict[Place, None] = OrderedDict()
        self._is_serving = False

    def try_take(self, amount: int) -> bool:
        """Take at once, unless someone waits."""
        if self._bound.bound is not None and (self._waiting.own or self._waiting.is_held_elsewhere()):
            return False
        return self._bound.try_take(amount)

    def join(self, amount: int, deadline_ns: int, on_end: Callable[[Ending], None]) -> Place | None:
        """Wait for ``amount``; ``None`` if the line is full."""
        if not self._waiting.try_take():
            return None
        place = Place(amount, deadline_ns, on_end)
        self._places[place] = None
        return place

    def leave(self, place: Place) -> bool:
        """Give a place up; False if it has ended already, and what it was granted is the caller's."""
        if not place.is_waiting:
            return False
        was_first = self._first() is place
        self._quit(place)
        if was_first:  # a smaller amount behind it may fit
            self._serve()
        return True

    def give(self, amount: int) -> None:
        """Give ``amount`` back and let the next one have it."""
        self._bound.give(amount)
        if self._bound.bound is None:
            return
        waiting = self._waiting.holders()
        if waiting:
            self._pass_on(waiting)

    def poll(self, now_ns: int) -> None:
        """End what waited too long, then serve as far as the bound allows."""
        for place in [place for place in self._places if place.deadline_ns <= now_ns]:
            self._end(place, Ending.EXPIRED)
        self._serve()

    def close(self) -> None:
        """Send everybody home."""
        for place in list(self._places):
            self._end(place, Ending.CLOSED)

    def _pass_on(self, waiting: list[int]) -> None:
        self._turn = min(waiting, key=lambda row: (row - self._turn - 1) % _MANY_ROWS)
        if self._turn != self._row:
            self._wake(self._turn)
        elif len(waiting) == 1:
            self._serve()
        else:  # what is free besides belongs to those who were woken and are not yet here
            self._serve(at_most=1)

    def _serve(self, at_most: int = _ALL) -> None:
        if self._is_serving:  # a callback gave something back: the loop below goes on with it
            return
        self._is_serving = True
        try:
            while at_most and (place := self._first()) is not None and self._bound.try_take(place.amount):
                self._end(place, Ending.GRANTED)
                at_most -= 1
        finally:
            self._is_serving = False

    def _first(self) -> Place | None:
        return next(iter(self._places), None)

    def _end(self, place: Place, ending: Ending) -> None:
        if place.is_waiting:  # a callback before may have taken it out
            self._quit(place)
            place.on_end(ending)

    def _quit(self, place: Place) -> None:
        place.is_waiting = False
        del self._places[place]
        self._waiting.give()

    def __repr__(self) -> str:
        return f"SharedLine({self._bound}, waiting={self._waiting.own})"
