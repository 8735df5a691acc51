"""The shared memory and the doorbells of a node, made once and handed to children by descriptor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

import meshd.admission.gate as gate
from meshd.control import ProcessBoard, Role, Topology
from meshd.memory import Segment
from meshd.metrics import layout as metric_cells
from meshd.prepare.layout import create_rings
from meshd.prepare.tokenizer_board import TokenizerBoard
from meshd.routing import conditions, load, prefix_index, registry, retry_budget, sessions
from meshd.slab import SLAB_KIND


class NodeMemory:
    """Everything shared. It outlives every child: a successor finds what its predecessor left."""

    def __init__(self, topology: Topology) -> None:
        io_seats, prepare_seats = range(topology.io_seats), range(topology.prepare_seats)
        self.board = ProcessBoard.create(topology.board_seats)
        self._segments = {
            "board": self.board.segment,
            "rings": create_rings(topology.io_seats, topology.prepare_seats),
            "metrics": Segment.create("metrics", metric_cells.segment_size(topology.metric_rows)),
            "load": Segment.create(
                load.SEGMENT_KIND, load.segment_bytes(topology.io_seats, topology.max_upstreams)
            ),
            "registry": Segment.create(registry.SEGMENT_KIND, registry.SEGMENT_BYTES),
            "tokenizers": TokenizerBoard.create(2 * len(topology.groups)),
            "conditions": Segment.create(
                conditions.SEGMENT_KIND, conditions.segment_bytes(topology.io_seats, topology.max_upstreams)
            ),
            "retries": Segment.create(
                retry_budget.SEGMENT_KIND, retry_budget.segment_bytes(topology.io_seats)
            ),
            "prefix_index": Segment.create(
                prefix_index.SEGMENT_KIND,
                prefix_index.segment_bytes(topology.prefix_index_bytes, topology.io_seats),
            ),
            "sessions": Segment.create(sessions.SEGMENT_KIND, sessions.segment_bytes()),
            "gate": Segment.create(gate.SEGMENT_KIND, gate.segment_size(topology.io_seats)),
        }
        self._slabs = {f"slab{seat}": Segment.create(SLAB_KIND, topology.slab_bytes) for seat in io_seats}
        self._io_bells = {f"bell_io{seat}": _eventfd() for seat in io_seats}
        self._prepare_bells = {f"bell_prepare{seat}": _eventfd() for seat in prepare_seats}

    def fds_for(self, role: Role, index: int) -> dict[str, int]:
        """Name the descriptors a child needs, and no more: an I/O process sees only its own bodies."""
        fds = {name: segment.fd for name, segment in self._segments.items()}
        fds |= self._io_bells | self._prepare_bells
        if role is Role.IO:
            fds[f"slab{index}"] = self._slabs[f"slab{index}"].fd
        if role is Role.LEADER:
            fds |= {name: slab.fd for name, slab in self._slabs.items()}
        return fds

    def ring_all(self) -> None:
        """Make every I/O process and prepare worker look at the board."""
        _ring(self._io_bells.values())
        _ring(self._prepare_bells.values())


def _eventfd() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def _ring(bells: Iterable[int]) -> None:
    for bell in bells:
        with contextlib.suppress(BlockingIOError):  # a full counter rings already
            os.eventfd_write(bell, 1)
