"""The byte layout of the segment ``rings``: who writes which word, and where.

::

       0  segment header                                                        memory.py
      64  check line: check word, I/O seats, prepare seats, depth               who creates the segment
     128  I/O cells, 128 bytes each, by I/O seat                                that I/O process
          +0    waiting     jobs that wait for a prepare worker
          +8    epoch       of its board row when it attached; written after ``lost``
          +16   lost        jobs of its predecessors for which no outcome was counted
          +24   fault       1: it has found this segment broken; stays until the node ends
      …   prepare cells, 128 bytes each, by prepare seat                        the leader of the seat
          +0    retire      pid of the worker that is asked to leave
          +8    log_turn    counts how often its worker was asked to reopen its log
      …   pairs, 2560 bytes each, by I/O seat, then prepare seat
          +0    tail        descriptors submitted                               I/O process
          +8    valid_from  descriptors below are a dead predecessor's          I/O process
          +128  taken       completions consumed                                I/O process
          +256  head        descriptors claimed                                 prepare worker
          +264  done        completions published                               prepare worker ¹
          +384  withdrawn   16 words: sequence that must not (go on to) run     I/O process
          +512  descriptors 16 × 64 bytes                                       I/O process
          +1536 completions 16 × 64 bytes                                       prepare worker ¹

    descriptor (8 words)                          completion (4 words, and 4 that nobody uses)
      0  sequence                                   0  sequence
      1  body_offset      in the I/O seat's slab    1  outcome | view_length << 8
      2  view_offset                                2  claimed_ns
      3  view_capacity                              3  finished_ns
      4  body_length
      5  start_by_ns      not started after this
      6  endpoint | needs << 16 | attempt << 32
      7  finish_by_ns     no answer wanted after

¹ after the death of the worker its leader, and no one before the leader has reaped it.

Counters run up from 0 and never wrap (64 bits); record ``n`` lies at ``n % 16``. The I/O process keeps
``tail - taken <= 16``, and every claimed descriptor yields exactly one completion, in order. So completion
``n`` answers descriptor ``n``, neither ring can overflow, and no one ever waits for room:
``taken <= done <= head <= tail <= taken + 16``.

Words of different writers never share a cache line; cells are 128 bytes apart because the prefetcher of
x86-64 fetches lines in pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshd.errors import StartupError
from meshd.memory import HEADER_BYTES, Segment

RINGS_KIND: Final = "rings"
RINGS_VERSION: Final = 3
DEPTH: Final = 16
RECORD_BYTES: Final = 64

OUTCOME_VIEW: Final = 0
OUTCOME_REFUSED: Final = 1
OUTCOME_FAILED: Final = 2  # an exception in the job
OUTCOME_SKIPPED: Final = 3  # withdrawn, past its start time, or of a dead I/O process: it never ran
OUTCOME_DIED: Final = 4  # the prepare worker died between claim and completion

# Values of the word ``busy`` on the board; 0 is idle.
BUSY: Final = 1
BUSY_LONG: Final = 2  # with a body above LONG_BODY: nobody should queue behind it who has a choice
LONG_BODY: Final = 16 << 10

_CHECK: Final = int.from_bytes(b"RINGPAIR", "little")
_CHECK_OFFSET: Final = HEADER_BYTES
_CELL_BYTES: Final = 128
_PAIR_BYTES: Final = 2560


def job_word(endpoint_number: int, needs: int, attempt: int) -> int:
    """Pack three 16-bit numbers into the seventh word of a descriptor.

    ``attempt``: 0, and 1 for the one retry after a death.
    """
    return endpoint_number | needs << 16 | attempt << 32


def result_word(outcome: int, view_length: int) -> int:
    """Pack the outcome of a job and the bytes of its result into the second word of a completion."""
    return outcome | view_length << 8


def outcome_of(word: int) -> int:
    return word & 0xFF


def view_length_of(word: int) -> int:
    return word >> 8


def endpoint_number_of(word: int) -> int:
    return word & 0xFFFF


def needs_of(word: int) -> int:
    return word >> 16 & 0xFFFF


def attempt_of(word: int) -> int:
    return word >> 32 & 0xFFFF


@dataclass(frozen=True, slots=True)
class PairLayout:
    """Where one pair of rings lies: ``*_word`` are indexes of u64 words, ``*_at`` are byte offsets."""

    tail_word: int
    valid_from_word: int
    taken_word: int
    head_word: int
    done_word: int
    withdrawn_word: int
    descriptors_at: int
    completions_at: int

    @classmethod
    def at(cls, start: int) -> PairLayout:
        return cls(
            tail_word=start // 8,
            valid_from_word=start // 8 + 1,
            taken_word=(start + 128) // 8,
            head_word=(start + 256) // 8,
            done_word=(start + 264) // 8,
            withdrawn_word=(start + 384) // 8,
            descriptors_at=start + 512,
            completions_at=start + 1536,
        )


@dataclass(frozen=True, slots=True)
class RingsLayout:
    """Offsets of everything in the segment ``rings`` for so many seats."""

    io_seats: int
    prepare_seats: int

    @property
    def size(self) -> int:
        return self._pairs_at + self.io_seats * self.prepare_seats * _PAIR_BYTES

    def waiting_word(self, io_seat: int) -> int:
        return (self._io_cells_at + io_seat * _CELL_BYTES) // 8

    def epoch_word(self, io_seat: int) -> int:
        return self.waiting_word(io_seat) + 1

    def lost_word(self, io_seat: int) -> int:
        return self.waiting_word(io_seat) + 2

    def fault_word(self, io_seat: int) -> int:
        return self.waiting_word(io_seat) + 3

    def retire_word(self, prepare_seat: int) -> int:
        return (self._prepare_cells_at + prepare_seat * _CELL_BYTES) // 8

    def log_turn_word(self, prepare_seat: int) -> int:
        return self.retire_word(prepare_seat) + 1

    def pair(self, io_seat: int, prepare_seat: int) -> PairLayout:
        if not (0 <= io_seat < self.io_seats and 0 <= prepare_seat < self.prepare_seats):
            raise IndexError(f"no pair of I/O seat {io_seat} and prepare seat {prepare_seat}")
        number = io_seat * self.prepare_seats + prepare_seat
        return PairLayout.at(self._pairs_at + number * _PAIR_BYTES)

    @property
    def _io_cells_at(self) -> int:
        return _CHECK_OFFSET + 64

    @property
    def _prepare_cells_at(self) -> int:
        return self._io_cells_at + self.io_seats * _CELL_BYTES

    @property
    def _pairs_at(self) -> int:
        return self._prepare_cells_at + self.prepare_seats * _CELL_BYTES


def create_rings(io_seats: int, prepare_seats: int) -> Segment:
    """Create the segment with empty rings for every pair of seats."""
    layout = RingsLayout(io_seats, prepare_seats)
    segment = Segment.create(RINGS_KIND, layout.size, RINGS_VERSION)
    at = _CHECK_OFFSET // 8
    for place, value in enumerate(_check_line(layout)):
        segment.words[at + place] = value
    return segment


def open_layout(segment: Segment, io_seats: int, prepare_seats: int) -> RingsLayout:
    """Return the layout of a mapped segment.

    Raises ``StartupError`` if the segment was made for other seats or by another layout.
    """
    layout = RingsLayout(io_seats, prepare_seats)
    if not is_intact(segment, layout) or segment.size < layout.size:
        raise StartupError(
            f"the segment 'rings' has check line {_found_line(segment)}, expected {_check_line(layout)}"
        )
    return layout


def is_intact(segment: Segment, layout: RingsLayout) -> bool:
    """Say whether the check line is still that of this layout."""
    return _found_line(segment) == _check_line(layout)


def has_fault(segment: Segment, layout: RingsLayout) -> bool:
    """Say whether any I/O process has found the segment broken, or it is now. O(I/O seats)."""
    words = segment.words
    is_told = any(words[layout.fault_word(seat)] for seat in range(layout.io_seats))
    return is_told or not is_intact(segment, layout)


def _found_line(segment: Segment) -> tuple[int, ...]:
    at = _CHECK_OFFSET // 8
    return tuple(segment.words[at : at + 4])


def _check_line(layout: RingsLayout) -> tuple[int, int, int, int]:
    return _CHECK, layout.io_seats, layout.prepare_seats, DEPTH
