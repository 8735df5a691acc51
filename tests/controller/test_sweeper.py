"""What the controller cleans up, and when it calls the preparation pool failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshd.admission import cells
from meshd.control import ProcessBoard, Role, State, Topology
from meshd.controller.pool_watch import PoolWatch
from meshd.controller.sweeper import POOL_LIMIT_NS, Sweeper
from meshd.log import Log
from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import segment_size
from meshd.metrics.job_balance import JobBalance
from meshd.prepare.layout import create_rings, open_layout
from meshd.routing.load import SEGMENT_KIND, LoadTable, segment_bytes


@dataclass
class Node:
    topology: Topology = field(default_factory=lambda: Topology.of(1, 1))
    now_ns: int = 10**12

    def __post_init__(self) -> None:
        self.board = ProcessBoard.create(self.topology.board_seats)
        self.segment = Segment.create(SEGMENT_KIND, segment_bytes(self.topology.io_seats))
        self.loads = self.load_table(None)
        log = Log("test", "error", stream_fd=-1)
        self.gate = Segment.create(cells.SEGMENT_KIND, cells.segment_size(self.topology.io_seats))
        self.admission = cells.Cells(self.gate, None, self.topology.io_seats)
        topology = self.topology
        self.rings = create_rings(topology.io_seats, topology.prepare_seats)
        self.layout = open_layout(self.rings, topology.io_seats, topology.prepare_seats)
        cells_segment = Segment.create("metrics", segment_size(topology.metric_rows))
        pool = PoolWatch(topology, self.board, self.rings, JobBalance(cells_segment, build_catalog()))
        self.sweeper = Sweeper(
            self.board, topology, self.loads, self.admission, pool, log, lambda: self.now_ns
        )

    def load_table(self, row: int | None) -> LoadTable:
        return LoadTable(self.segment, row, self.topology.io_seats)

    def take_admission_row(self, seat: int, pid: int) -> None:
        cells.Cells(self.gate, seat, self.topology.io_seats, pid)

    def sweep_after(self, seconds: float) -> bool:
        self.now_ns += int(seconds * 1e9)
        self.sweeper.sweep()
        return bool(self.board.prepare_failed)


def test_load_of_a_dead_io_process_is_zeroed_and_that_of_a_living_one_stays() -> None:
    node = Node()
    for seat in range(2):
        node.board.row(seat).open(Role.IO, seat, 100 + seat, "0")
        node.load_table(seat).add(5)
    node.sweep_after(0)
    assert node.loads.load(5) == 2
    node.board.row(0).close()
    node.sweep_after(0)
    assert node.loads.load(5) == 1


def test_draining_process_keeps_its_load() -> None:
    node = Node()
    node.board.row(0).open(Role.IO, 0, 100, "0")
    node.board.row(0).state = State.DRAINING
    node.load_table(0).add(5)
    node.sweep_after(0)
    assert node.loads.load(5) == 1


def test_row_is_swept_once_for_each_death() -> None:
    node = Node()
    row = node.board.row(0)
    for _ in range(2):
        row.open(Role.IO, 0, 100, "0")
        table = node.load_table(0)
        table.add(5)
        row.close()
        node.sweep_after(0)
        assert node.loads.load(5) == 0
        table.add(5)  # a write under way when its process was killed cannot be told from a successor's
        node.sweep_after(0)
        assert node.loads.load(5) == 2


def test_tickets_of_a_dead_io_process_stop_counting_and_those_of_its_successor_count() -> None:
    node = Node()
    row = node.board.row(0)
    row.open(Role.IO, 0, 100, "0")
    node.take_admission_row(0, 100)
    node.sweep_after(0)
    assert node.admission.counts(0)
    row.close()
    node.sweep_after(0)
    assert not node.admission.counts(0)
    row.open(Role.IO, 0, 101, "0")
    node.take_admission_row(0, 101)
    node.sweep_after(0)
    assert node.admission.counts(0)


def test_tickets_are_retired_also_when_the_successor_is_already_on_the_board() -> None:
    node = Node()
    row = node.board.row(0)
    row.open(Role.IO, 0, 100, "0")
    node.take_admission_row(0, 100)
    row.close()
    row.open(Role.IO, 0, 101, "0")
    node.sweep_after(0)
    assert not node.admission.counts(0)


def test_pool_fails_ten_seconds_after_its_last_worker_and_recovers_by_itself() -> None:
    node = Node()
    row = node.board.row(node.topology.board_prepare(0))
    row.open(Role.PREPARE, 0, 200, "0")
    row.state = State.READY
    assert not node.sweep_after(100)
    row.close()
    assert not node.sweep_after(POOL_LIMIT_NS / 1e9 - 0.001)
    assert node.sweep_after(0.001)
    row.open(Role.PREPARE, 0, 201, "0")
    assert node.sweep_after(1)
    row.state = State.READY
    assert not node.sweep_after(1)


def test_pool_that_still_loads_its_first_tokenizer_has_not_failed() -> None:
    node = Node()
    node.board.row(node.topology.board_prepare(0)).open(Role.PREPARE, 0, 200, "0")
    assert not node.sweep_after(300)


def test_a_layout_fault_fails_the_pool_until_the_node_is_started_again() -> None:
    node = Node()
    row = node.board.row(node.topology.board_prepare(0))
    row.open(Role.PREPARE, 0, 200, "0")
    row.state = State.READY
    assert not node.sweep_after(1)
    node.rings.words[node.layout.fault_word(1)] = 1  # any I/O process may be the one that saw it
    assert node.sweep_after(0)
    assert node.sweep_after(100), "a live worker does not end it"


def test_a_changed_check_word_fails_the_pool() -> None:
    node = Node()
    row = node.board.row(node.topology.board_prepare(0))
    row.open(Role.PREPARE, 0, 200, "0")
    row.state = State.READY
    node.rings.words[8] ^= 1
    assert node.sweep_after(0)
