"""Jobs that end with their I/O process are counted once, whoever dies when; and which workers are taken."""

from __future__ import annotations

import random
from collections.abc import Callable

from meshd.control import ProcessBoard, Role, State, Topology
from meshd.controller.pool_watch import PoolWatch
from meshd.memory import Segment
from meshd.metrics.catalog import build_catalog
from meshd.metrics.cells import MetricRow, segment_size
from meshd.metrics.job_balance import JobBalance
from meshd.prepare.layout import create_rings, open_layout
from meshd.prepare.ring import IoEnd, WorkerEnd

CATALOG = build_catalog()


class Node:
    """The shared memory of a node with one I/O process (two seats) and two prepare workers."""

    def __init__(self) -> None:
        self.topology = Topology.of(1, 2)
        self.board = ProcessBoard.create(self.topology.board_seats)
        self.rings = create_rings(self.topology.io_seats, self.topology.prepare_seats)
        self.layout = open_layout(self.rings, self.topology.io_seats, self.topology.prepare_seats)
        self.cells = Segment.create("metrics", segment_size(self.topology.metric_rows))
        self.balance = JobBalance(self.cells, CATALOG)
        self.watch = PoolWatch(self.topology, self.board, self.rings, self.balance)

    def start_worker(self, seat: int) -> None:
        row = self.board.row(self.topology.board_prepare(seat))
        row.open(Role.PREPARE, seat, 300 + seat, "")
        row.state = State.READY

    def ends(self, prepare_seat: int) -> tuple[IoEnd, WorkerEnd]:
        pair = self.layout.pair(0, prepare_seat)
        return IoEnd(self.rings, pair), WorkerEnd(self.rings, pair)


class IoProcess:
    """What an I/O process counts, from its birth in a seat to its death."""

    def __init__(self, node: Node, seat: int = 0) -> None:
        self.node, self.seat = node, seat
        self.row = node.board.row(node.topology.board_io(seat))
        self.row.open(Role.IO, seat, 100, "")

    def attach(self) -> None:
        node, words = self.node, self.node.rings.words
        metrics = MetricRow(node.cells, self.row.seat, CATALOG)
        words[node.layout.lost_word(self.seat)] = node.balance.open_jobs(self.row.seat)
        words[node.layout.epoch_word(self.seat)] = self.row.epoch
        self.in_flight = 0
        self.submitted = metrics.counter("mesh_prepare_jobs_total").inc
        self.run = metrics.buffered_histogram("mesh_prepare_run_seconds").observe
        self.fail = metrics.counter("mesh_prepare_errors_total", reason="prepare_timeout").inc
        self.flush = metrics.flush

    def submit(self, jobs: int = 1) -> None:
        self.submitted(jobs)
        self.in_flight += jobs

    def end_one(self, how: Callable[[], None]) -> None:
        if self.in_flight:
            self.in_flight -= 1
            how()

    def die(self) -> None:
        self.row.close()


def test_open_jobs_are_submissions_without_a_run_or_an_error() -> None:
    node = Node()
    process = IoProcess(node)
    process.attach()
    process.submit(5)
    process.run(0.001)
    process.run(99.0)
    process.fail()
    assert node.balance.open_jobs(0) == 4, "runs are counted when they are flushed"
    process.flush()
    assert node.balance.open_jobs(0) == 2


def test_jobs_in_flight_are_not_lost_while_their_process_lives() -> None:
    node = Node()
    assert node.watch.lost_jobs() == 0
    process = IoProcess(node)
    assert node.watch.lost_jobs() == 0
    process.attach()
    process.submit(3)
    assert node.watch.lost_jobs() == 0


def test_jobs_of_a_dead_process_are_lost_before_and_after_its_successor_attaches() -> None:
    node = Node()
    process = IoProcess(node)
    process.attach()
    process.submit(3)
    process.fail()
    process.die()
    assert node.watch.lost_jobs() == 2
    successor = IoProcess(node)
    assert node.watch.lost_jobs() == 2
    successor.attach()
    successor.submit(7)
    assert node.watch.lost_jobs() == 2
    successor.die()
    assert node.watch.lost_jobs() == 9


def test_a_process_that_dies_before_it_attaches_loses_nothing() -> None:
    node = Node()
    for _ in range(3):
        IoProcess(node).die()
    assert node.watch.lost_jobs() == 0


def test_lost_jobs_balance_the_books_over_any_history() -> None:
    """Submissions = runs + errors + lost, whenever nobody lives; and the number never falls."""
    rng = random.Random(7)
    node = Node()
    processes: dict[int, IoProcess] = {}
    before = 0
    for _ in range(500):
        seat = rng.randrange(2)
        process = processes.get(seat)
        if process is None:
            processes[seat] = process = IoProcess(node, seat)
            if rng.random() < 0.8:
                process.attach()
        elif hasattr(process, "in_flight") and rng.random() < 0.8:
            steps = (
                process.submit,
                lambda process=process: process.end_one(process.fail),
                lambda process=process: process.end_one(lambda: process.run(0.1)),
                process.flush,
            )
            rng.choices(steps, (4, 1, 1, 1))[0]()
        else:
            processes.pop(seat).die()
        lost = node.watch.lost_jobs()
        assert lost >= before
        before = lost
    for process in processes.values():
        process.die()
    assert node.watch.lost_jobs() == sum(node.balance.open_jobs(seat) for seat in range(2))


def test_a_worker_is_reserved_from_dispatch_to_answer() -> None:
    node = Node()
    for seat in range(2):
        node.start_worker(seat)
    assert node.watch.reserved_workers() == 0
    (io, worker), (other_io, _) = node.ends(0), node.ends(1)
    io.push(1, bytes(24), 0, 0, 0, 0)
    assert node.watch.reserved_workers() == 1
    other_io.push(2, bytes(24), 0, 0, 0, 0)
    assert node.watch.reserved_workers() == 2
    other_io.withdraw(0, 2)  # never claimed: it will not run
    worker.take()
    io.withdraw(0, 1)  # timed out, and still running
    assert node.watch.reserved_workers() == 1
    worker.complete(1, 0, 0, 0, 0)
    assert node.watch.reserved_workers() == 0


def test_a_dead_worker_is_not_reserved() -> None:
    node = Node()
    node.start_worker(0)
    node.ends(0)[0].push(1, bytes(24), 0, 0, 0, 0)
    node.board.row(node.topology.board_prepare(0)).close()
    assert node.watch.reserved_workers() == 0


def test_a_fault_that_one_process_saw_is_seen() -> None:
    node = Node()
    assert not node.watch.has_fault
    node.rings.words[node.layout.fault_word(1)] = 1
    assert node.watch.has_fault
