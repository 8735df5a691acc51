from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshd.admission.gate import Gate, GateLimits, Ticket, segment_size
from meshd.errors import MeshError
from meshd.memory import Segment


def _admitted(gate: Gate) -> Ticket:
    ticket = gate.try_admit()
    assert ticket is not None
    return ticket


def _refused(gate: Gate) -> MeshError:
    with pytest.raises(MeshError) as caught:
        gate.wait(lambda _: None)
    return caught.value


def test_bound_holds_over_processes_and_a_released_ticket_is_taken_again(node: Any) -> None:
    one, other = node.gate(0), node.gate(1)
    ticket = _admitted(one)
    _admitted(other)
    assert one.try_admit() is None and other.try_admit() is None
    ticket.release()
    _admitted(other)
    assert (one.held, other.held) == (0, 2)


def test_ticket_is_released_once(node: Any) -> None:
    gate = node.gate()
    ticket = _admitted(gate)
    ticket.release()
    with pytest.raises(RuntimeError, match="twice"):
        ticket.release()
    assert gate.held == 0


@pytest.mark.parametrize("bound", [0, -1])
def test_without_a_bound_everyone_enters_and_no_other_process_is_looked_at(node: Any, bound: int) -> None:
    node.limits = replace(node.limits, max_concurrent=bound)
    gate, other = node.gate(0), node.gate(1)
    node.segment.words[8 + 8] = 10**6  # whatever stands in another row
    tickets = [_admitted(gate) for _ in range(500)]
    assert gate.held == 500 and other.held == 0
    for ticket in tickets:
        ticket.release()
    assert gate.held == 0 and node.woken == []


def test_waiting_request_gets_the_next_free_ticket_of_its_process(node: Any) -> None:
    gate = node.gate()
    first, _ = _admitted(gate), _admitted(gate)
    ended: list[Ticket | MeshError] = []
    gate.wait(ended.append)
    assert gate.waiting == 1
    first.release()
    assert isinstance(ended[0], Ticket)
    assert (gate.held, gate.waiting) == (2, 0)


def test_ticket_released_in_one_process_wakes_the_one_that_waits(node: Any) -> None:
    one, other = node.gate(0), node.gate(2)
    first, _ = _admitted(one), _admitted(one)
    ended: list[Ticket | MeshError] = []
    other.wait(ended.append)
    first.release()
    assert node.woken == [2] and not ended
    other.poll()
    assert isinstance(ended[0], Ticket)


def test_request_over_the_queue_of_the_node_is_refused_at_once(node: Any) -> None:
    one, other = node.gate(0), node.gate(1)
    for _ in range(2):
        _admitted(one)
    for gate in (one, other, other):
        gate.wait(lambda _: None)
    error = _refused(one)
    assert (error.code, error.status, error.retry_after_s) == ("admission_full", 429, 1)


def test_queue_of_size_zero_means_now_or_never(node: Any) -> None:
    node.limits = replace(node.limits, queue_size=0)
    gate = node.gate()
    _admitted(gate)
    _admitted(gate)
    assert gate.try_admit() is None
    assert _refused(gate).code == "admission_full"


def test_wait_ends_after_the_queue_timeout(node: Any) -> None:
    gate = node.gate()
    tickets = [_admitted(gate), _admitted(gate)]
    ended: list[MeshError] = []
    gate.wait(ended.append)
    node.clock.pass_s(59.99)
    gate.poll()
    assert ended == []
    node.clock.pass_s(0.01)
    gate.poll()
    assert [(error.code, error.status) for error in ended] == [("admission_timeout", 503)]
    tickets[0].release()
    assert gate.held == 1 and gate.waiting == 0


def test_client_that_leaves_frees_its_place_and_gets_no_ticket(node: Any) -> None:
    gate = node.gate()
    ticket, _ = _admitted(gate), _admitted(gate)
    ended: list[Ticket | MeshError] = []
    place = gate.wait(ended.append)
    assert gate.leave(place)
    ticket.release()
    assert ended == [] and (gate.held, gate.waiting) == (1, 0)


def test_closed_gate_refuses_all_and_lets_tickets_end(node: Any) -> None:
    gate = node.gate()
    ticket, _ = _admitted(gate), _admitted(gate)
    ended: list[MeshError] = []
    gate.wait(ended.append)
    gate.close()
    assert ended[0].code == "admission_closed" and _refused(gate).code == "admission_closed"
    with pytest.raises(MeshError, match="shutting down"):
        gate.try_admit()
    ticket.release()
    assert gate.held == 1


def test_refusal_advises_by_what_waits_and_how_fast_it_goes(node: Any) -> None:
    node.limits = replace(node.limits, queue_size=20)
    gate, other = node.gate(0), node.gate(1)
    for _ in range(10):  # one grant a second
        other.poll()
        gate.poll()
        _admitted(gate).release()
        node.clock.pass_s(1)
    for _ in range(2):
        _admitted(gate)
    for _ in range(20):
        gate.wait(lambda _: None)
    assert 15 <= _refused(other).retry_after_s <= 20  # 20 wait; 12 grants in 10 s, of which it saw all


def test_dead_process_blocks_its_tickets_until_it_is_retired(node: Any) -> None:
    dead, living = node.gate(0, owner=77), node.gate(1)
    for _ in range(2):
        _admitted(dead)
    dead.wait(lambda _: None)
    ended: list[Ticket | MeshError] = []
    living.wait(ended.append)
    node.controller().retire(0, 77)
    living.poll()
    assert isinstance(ended[0], Ticket)
    ended[0].release()
    assert living.try_admit() is not None


def test_successor_in_a_row_starts_with_nothing_held(node: Any) -> None:
    _admitted(node.gate(0, owner=77))
    successor = node.gate(0, owner=78)
    node.controller().retire(0, 77)  # late
    _admitted(successor)
    _admitted(successor)
    assert node.gate(1).try_admit() is None


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.sampled_from("awrlpt")), max_size=80),
    seed=st.integers(0, 999),
)
def test_any_sequence_keeps_the_bounds_and_ends_with_nothing_held(
    steps: list[tuple[int, str]], seed: int
) -> None:
    segment, rng = Segment.create("gate", segment_size(4)), random.Random(seed)
    now = [0]
    limits = GateLimits(3, 4, 50, 1)
    gates = [Gate(segment, row, 4, row + 1, limits, lambda: now[0]) for row in range(4)]
    tickets: list[Ticket] = []
    waiting: list[tuple[Gate, Any]] = []

    def end(result: Ticket | MeshError) -> None:
        if isinstance(result, Ticket):
            tickets.append(result)

    for row, step in steps:
        gate = gates[row]
        if step == "a" and (ticket := gate.try_admit()):
            tickets.append(ticket)
        elif step == "w":
            try:
                waiting.append((gate, gate.wait(end)))
            except MeshError as error:
                assert error.code == "admission_full"
                assert sum(each.waiting for each in gates) == 4
        elif step == "r" and tickets:
            tickets.pop(rng.randrange(len(tickets))).release()
        elif step == "l" and waiting:
            holder, place = waiting.pop(rng.randrange(len(waiting)))
            holder.leave(place)
        elif step == "t":
            now[0] += 20
        else:
            gate.poll()
        assert sum(each.held for each in gates) == len(tickets) <= 3
        assert sum(each.waiting for each in gates) <= 4
    for each in gates:
        each.poll()  # after everybody polled, nobody waits beside a free place
    assert len(tickets) == 3 or not sum(each.waiting for each in gates)
    now[0] += 100
    for each in gates:
        each.poll()
    for ticket in tickets:
        ticket.release()
    assert [(each.held, each.waiting) for each in gates] == [(0, 0)] * 4
    segment.close()


def test_racing_gates_serve_every_request_within_the_bound(
    fork: Callable[[Callable[[], int]], int],
) -> None:
    """A kernel semaphore of the bound's size is the judge; doorbells are eventfds, as in the real node."""
    processes, bound = 3, 2
    segment = Segment.create("gate", segment_size(processes))
    judge = os.eventfd(bound, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
    bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(processes)]
    limits = GateLimits(bound, 1000, 60_000_000_000, 1)

    def run(row: int) -> int:
        def wake(other: int) -> None:
            os.eventfd_write(bells[other], 1)

        gate = Gate(segment, row, processes, os.getpid(), limits, time.monotonic_ns, wake)
        return _serve(gate, judge, bells[row], random.Random(row))

    children = [fork(partial(run, row)) for row in range(processes)]
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * processes
    for fd in (judge, *bells):
        os.close(fd)


def _serve(gate: Gate, judge: int, bell: int, rng: random.Random) -> int:
    """Send 800 requests through, some waiting. Exit status: 0 all served, 2 the bound was exceeded."""
    held: list[tuple[Ticket, bool]] = []
    served = exceeded = asked = 0

    def take(result: Ticket | MeshError) -> None:
        nonlocal served, exceeded
        assert isinstance(result, Ticket)
        is_within = _drain(judge)
        served += 1
        exceeded += not is_within
        held.append((result, is_within))

    while served < 800 or held:
        if asked < 800 and gate.waiting < 5:
            asked += 1
            ticket = gate.try_admit()
            if ticket is None:
                gate.wait(take)
            else:
                take(ticket)
        while held and rng.random() < 0.7:
            ticket, is_within = held.pop()
            if is_within:
                os.eventfd_write(judge, 1)
            ticket.release()
        _drain(bell)
        gate.poll()
    return 2 if exceeded else 0


def _drain(fd: int) -> bool:
    try:
        os.eventfd_read(fd)
    except BlockingIOError:
        return False
    return True
