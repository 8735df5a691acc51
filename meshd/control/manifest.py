"""What a child is told at birth: the manifest, and the numbers that are the same for every process."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from typing import Any

from meshd.control.board import Role


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Numbers fixed at start, the same for every process of the node.

    Controller, leaders and I/O processes have two seats each, so that a new process can be ready before the
    old one leaves: I/O process ``n`` sits in I/O seat ``n`` or ``n + io_processes``. ``groups``: the prepare
    seats of each prepare group.
    """

    io_processes: int
    prepare_workers: int
    io_seats: int
    prepare_seats: int
    groups: tuple[tuple[int, ...], ...]
    metric_rows: int
    backends: int = 0
    max_upstreams: int = 1024
    listen_port: int = 0
    metrics_port: int = 0
    controller_socket: str = ""  # name in the abstract Unix namespace, starts with "\0"
    view_bytes: int = 8192
    body_memory_bytes: int = 256 << 20  # bound on the whole node
    slab_bytes: int = 512 << 20  # virtual size of one I/O process's body slab
    prefix_index_bytes: int = 64 << 20  # of its buckets

    @classmethod
    def of(
        cls,
        io_processes: int,
        prepare_workers: int,
        groups: tuple[tuple[int, ...], ...] | None = None,
        backends: int = 0,
        **numbers: Any,
    ) -> Topology:
        """Derive the seats; ``groups`` defaults to one group of all; ``numbers`` are further fields."""
        groups = (tuple(range(prepare_workers)),) if groups is None else groups
        io_seats, prepare_seats = 2 * io_processes, 2 * prepare_workers
        return cls(
            io_processes=io_processes,
            prepare_workers=prepare_workers,
            io_seats=io_seats,
            prepare_seats=prepare_seats,
            groups=groups,
            metric_rows=io_seats + prepare_seats + 2 * len(groups) + 3 + backends,
            backends=backends,
            **numbers,
        )

    def board_io(self, seat: int) -> int:
        return seat

    def board_prepare(self, seat: int) -> int:
        return self.io_seats + seat

    def board_leader(self, group: int, half: int = 0) -> int:
        """``half``: 0 or 1, which of the two seats."""
        return self.io_seats + self.prepare_seats + half * len(self.groups) + group

    @property
    def board_controller(self) -> int:
        """The first of two seats; the other one follows."""
        return self.io_seats + self.prepare_seats + 2 * len(self.groups)

    @property
    def board_supervisor(self) -> int:
        return self.board_controller + 2

    def board_backend(self, number: int) -> int:
        return self.board_controller + 3 + number

    @property
    def board_seats(self) -> int:
        return self.board_controller + 3 + self.backends


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a child is told at birth.

    ``index``: number among its role (I/O seat, prepare group). ``seat``: its row on the board.
    ``settings``: ``Settings.to_dict()``. ``fds``: inherited descriptors by name. ``cpus``: where it runs once
    it is ready.
    ``prepare_cpus``: for a leader, the CPU list of each of its prepare seats, in the order of its group.
    ``takes_over``: another process does this one's work until it is told otherwise (control/child.py).
    """

    role: Role
    index: int
    seat: int
    supervisor_pid: int
    topology: Topology
    settings: dict[str, Any] = field(default_factory=dict)
    fds: dict[str, int] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    prepare_cpus: tuple[tuple[int, ...], ...] = ()
    takes_over: bool = False

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        raw = json.loads(data)
        topology = raw["topology"]
        topology["groups"] = tuple(tuple(group) for group in topology["groups"])
        raw["topology"] = Topology(**topology)
        raw["role"] = Role(raw["role"])
        raw["cpus"] = tuple(raw["cpus"])
        raw["prepare_cpus"] = tuple(tuple(cpus) for cpus in raw["prepare_cpus"])
        return cls(**raw)

    @classmethod
    def from_memfd(cls, fd: int) -> Manifest:
        return cls.from_json(os.pread(fd, os.fstat(fd).st_size, 0))

    def to_memfd(self) -> int:
        """Write the manifest to a fresh memfd and return its descriptor, which the caller closes."""
        fd = os.memfd_create("meshd:manifest", os.MFD_CLOEXEC)
        os.write(fd, self.to_json())
        return fd
