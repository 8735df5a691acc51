"""The body slab of one I/O process: where request bodies and their routing views lie.

The slab is one sparse shared segment. A *slot* is a run of whole pages in it::

    ┌──────────────────────┬──────────────────────────────────────────┐
    │ view area            │ body area                                │
    │ view_bytes, padded   │ capacity: a size class, or whole pages   │
    └──────────────────────┴──────────────────────────────────────────┘
    view_offset            body_offset

A prepare worker finds both by the offsets in a job descriptor: it reads the body and writes the view area
while the job runs; at any other time the slot is the I/O process's alone. No descriptor is ever passed.
A job whose result is a whole answer gets a *wide view*: the body area of a second slot.

Allocation has two levels, both known to this process alone; nothing but bytes is shared:

- the *arena*: free extents of the segment, first fit, neighbours merged. O(number of free extents).
- *size classes* 4 KiB … 1 MiB in steps of four, each a stack of areas taken from the arena: last in first
  out, so that the next request reuses pages that are mapped and warm in the cache. O(1), no page fault.

A body beyond the largest class gets an extent of its own, and its pages go back to the system at release:
a page fault per 4 KiB is small against receiving and parsing a megabyte. What the stacks keep is bounded
by ``_CACHED_BYTES`` and is given back when the arena runs short, so no mix of sizes can strand the memory.

After the death of an I/O process its successor takes the same slab. Slots that a prepare worker may still
write into are put in *quarantine* before the first reservation; all other pages are given back.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from typing import Final

from meshd.memory import PAGE, Segment, round_up

SLAB_KIND: Final = "slab"
CLASS_BYTES: Final = tuple(4096 << 2 * step for step in range(5))  # 4 KiB … 1 MiB
_LARGEST_CLASS: Final = CLASS_BYTES[-1]
_CACHED_BYTES: Final = 32 << 20  # free areas kept warm: 2,700 of the smallest slots with an 8 KiB view
_PLACE: Final = struct.Struct("@3n")


class BodySlab:
    """Hands out slots of one segment; belongs to one I/O process and is not shared.

    ``budget_bytes`` bounds the slots in use, views included; by default the segment is the bound.
    """

    def __init__(self, segment: Segment, view_bytes: int, budget_bytes: int | None = None) -> None:
        self.in_use_bytes = 0
        self.view_bytes = view_bytes
        self.memory = segment.map  # of the whole segment, for those who copy out of it
        self._segment = segment
        self._view_room = round_up(view_bytes, PAGE)
        self._arena = _Arena(PAGE, segment.size // PAGE * PAGE)
        self._budget = segment.size if budget_bytes is None else budget_bytes
        self._stacks: tuple[list[_Area], ...] = tuple([] for _ in CLASS_BYTES)
        self._cached_bytes = 0

    def reserve(self, body_bytes: int) -> Slot | None:
        """Return a slot for at least ``body_bytes``, or None if there is no room now."""
        if body_bytes <= _LARGEST_CLASS:
            step = (max(body_bytes - 1, 0) >> 12).bit_length() + 1 >> 1
            stack = self._stacks[step]
            if stack:
                area = stack[-1]
                if self.in_use_bytes + area.size > self._budget:
                    return None
                stack.pop()
                self._cached_bytes -= area.size
                self.in_use_bytes += area.size
                return Slot(self, area)
            return self._carve(CLASS_BYTES[step], step)
        return self._carve(round_up(body_bytes, PAGE), -1)

    def quarantine(self, view_offset: int, view_capacity: int, body_offset: int, body_length: int) -> Slot:
        """Keep a predecessor's slot out of use until the returned slot is released.

        Only before the first ``reserve``, once for each slot. Raises ``ValueError`` if the range is not
        free, which means that the words it was read from are wrong.
        """
        if view_offset % PAGE or body_offset % PAGE:
            raise ValueError(f"no slot begins at {view_offset}, {body_offset}")
        if body_offset - view_offset == self._view_room:
            return self._keep(view_offset, round_up(body_offset + body_length - view_offset, PAGE))
        slot = self._keep(body_offset, round_up(max(body_length, 1), PAGE))  # it has a wide view
        slot.adopt_view(self._keep(view_offset, round_up(view_capacity, PAGE)))
        return slot

    def _keep(self, start: int, size: int) -> Slot:
        self._arena.take(start, size)
        self.in_use_bytes += size
        return Slot(self, self._area(start, size, -1))

    def scrub(self) -> None:
        """Give back every page that is not in a slot: what a predecessor touched is not ours to keep."""
        for start, length in self._arena.extents():
            self._segment.discard(start, length)

    def trim(self) -> None:
        """Give back the pages of free slots that are kept warm; for a process that leaves."""
        self._give_back_stacks()

    def _carve(self, capacity: int, step: int) -> Slot | None:
        size = self._view_room + capacity
        if self.in_use_bytes + size > self._budget:
            return None
        start = self._arena.first_fit(size)
        if start is None:
            self._give_back_stacks()
            start = self._arena.first_fit(size)
            if start is None:
                return None
        self.in_use_bytes += size
        return Slot(self, self._area(start, size, step))

    def _area(self, start: int, size: int, step: int) -> _Area:
        data = self._segment.bytes
        body_offset = start + self._view_room
        view = data[start : start + self.view_bytes]
        place = _PLACE.pack(body_offset, start, self.view_bytes)
        return _Area(start, size, step, body_offset, data[body_offset : start + size], view, place)

    def _take_back(self, area: _Area) -> None:
        self.in_use_bytes -= area.size
        if area.step >= 0 and self._cached_bytes + area.size <= _CACHED_BYTES:
            self._cached_bytes += area.size
            self._stacks[area.step].append(area)
        else:
            self._give_back(area)

    def _give_back(self, area: _Area) -> None:
        self._segment.discard(area.start, area.size)
        self._arena.give(area.start, area.size)

    def _give_back_stacks(self) -> None:
        for stack in self._stacks:
            while stack:
                self._give_back(stack.pop())
        self._cached_bytes = 0

    def _grow_in_place(self, area: _Area, body_bytes: int) -> _Area | None:
        """Extend an own extent into free pages right behind it; None if they are taken."""
        extra = round_up(body_bytes, PAGE) + self._view_room - area.size
        behind = area.start + area.size
        if area.step >= 0 or self.in_use_bytes + extra > self._budget:
            return None
        if not self._arena.is_free(behind, extra):
            return None
        self._arena.take(behind, extra)
        self.in_use_bytes += extra
        return self._area(area.start, area.size + extra, -1)

    def __repr__(self) -> str:
        return f"BodySlab(in_use={self.in_use_bytes}, cached={self._cached_bytes}, free={self._arena!r})"


class _Area:
    """A run of pages laid out as a slot; ``step`` is its size class, or -1 for an own extent."""

    __slots__ = ("body", "body_offset", "place", "size", "start", "step", "view")

    def __init__(
        self,
        start: int,
        size: int,
        step: int,
        body_offset: int,
        body: memoryview,
        view: memoryview,
        place: bytes,
    ) -> None:
        self.start = start
        self.size = size
        self.step = step
        self.body_offset = body_offset
        self.body = body
        self.view = view
        self.place = place


class Slot:
    """One reservation. ``body`` and ``view`` are writable and must not be used after ``release``.

    Offsets count from the start of the segment. ``place``: body offset, view offset and view capacity as the
    three words that a job descriptor wants of them, packed once for all uses of the pages.
    """

    __slots__ = (
        "_area",
        "_slab",
        "body",
        "body_capacity",
        "body_offset",
        "place",
        "view",
        "view_capacity",
        "view_offset",
        "wide_view",
    )

    def __init__(self, slab: BodySlab, area: _Area) -> None:
        self._slab = slab
        self._area: _Area | None = area
        self.wide_view: Slot | None = None
        self.body = area.body
        self.body_offset = area.body_offset
        self.body_capacity = len(area.body)
        self.view = area.view
        self.view_offset = area.start
        self.view_capacity = slab.view_bytes
        self.place = area.place

    def fill(self, data: bytes) -> None:
        """Store ``data``, which fits, at the beginning of the body area."""
        at = self.body_offset
        self._slab.memory[at : at + len(data)] = data

    def grow(self, body_bytes: int) -> Slot | None:
        """Move to a slot of at least ``body_bytes`` with the same leading bytes; this one is then released.

        None if there is no room, and this slot stays as it was. Copies the whole capacity unless the pages
        behind an own extent happen to be free. Never while a prepare job uses the slot, or with a wide view.
        """
        area = self._held()
        if body_bytes <= self.body_capacity:
            raise ValueError(f"{body_bytes} bytes fit already")
        larger = self._slab._grow_in_place(area, body_bytes)
        if larger is not None:
            self._area = None
            return Slot(self._slab, larger)
        slot = self._slab.reserve(body_bytes)
        if slot is not None:
            slot.body[: self.body_capacity] = self.body
            self.release()
        return slot

    def widen_view(self, view_bytes: int) -> bool:
        """Make the view area at least so long, once and before any job uses the slot; False without room."""
        slot = self._slab.reserve(view_bytes)
        if slot is not None:
            self.adopt_view(slot)
        return slot is not None

    def adopt_view(self, slot: Slot) -> None:
        """Take the body area of another slot for the view area; that slot is released with this one."""
        self.wide_view = slot
        self.view, self.view_offset, self.view_capacity = slot.body, slot.body_offset, slot.body_capacity
        self.place = _PLACE.pack(self.body_offset, self.view_offset, self.view_capacity)

    def release(self) -> None:
        """Give the slot back, exactly once: a second time could take it from its next owner, so it raises."""
        area = self._held()
        self._area = None
        self._slab._take_back(area)
        if self.wide_view is not None:
            self.wide_view.release()

    def _held(self) -> _Area:
        if self._area is None:
            raise RuntimeError(f"the slot at {self.view_offset} was released before")
        return self._area

    def __repr__(self) -> str:
        state = "released" if self._area is None else "held"
        return f"Slot(view={self.view_offset}, body={self.body_offset}+{self.body_capacity}, {state})"


class _Arena:
    """Free extents of the segment, by start; touching ones are always merged."""

    def __init__(self, start: int, end: int) -> None:
        self._starts = [start]
        self._lengths = {start: end - start}

    def extents(self) -> list[tuple[int, int]]:
        return [(start, self._lengths[start]) for start in self._starts]

    def first_fit(self, size: int) -> int | None:
        """Take ``size`` bytes from the lowest extent that has them."""
        for start in self._starts:
            if self._lengths[start] >= size:
                self.take(start, size)
                return start
        return None

    def is_free(self, start: int, size: int) -> bool:
        position = bisect_left(self._starts, start + 1) - 1
        if position < 0:
            return False
        left = self._starts[position]
        return start + size <= left + self._lengths[left]

    def take(self, start: int, size: int) -> None:
        """Take exactly this range out of the extent around it. Raises ``ValueError`` if it is not free."""
        if not self.is_free(start, size):
            raise ValueError(f"the range {start}+{size} is not free")
        position = bisect_left(self._starts, start + 1) - 1
        left = self._starts.pop(position)
        end = left + self._lengths.pop(left)
        if start + size < end:
            self._starts.insert(position, start + size)
            self._lengths[start + size] = end - start - size
        if left < start:
            self._starts.insert(position, left)
            self._lengths[left] = start - left

    def give(self, start: int, size: int) -> None:
        """Put a range back and merge it with its neighbours."""
        position = bisect_left(self._starts, start)
        if position < len(self._starts) and self._starts[position] == start + size:
            size += self._lengths.pop(self._starts.pop(position))
        if position > 0:
            left = self._starts[position - 1]
            if left + self._lengths[left] == start:
                self._lengths[left] += size
                return
        self._starts.insert(position, start)
        self._lengths[start] = size

    def __repr__(self) -> str:
        return repr(self.extents())
