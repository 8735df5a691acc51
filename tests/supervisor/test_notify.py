from __future__ import annotations

import socket
import uuid

import pytest

from meshd.supervisor.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        name = str(tmp_path / "notify") if request.param == "path" else f"@{uuid.uuid4()}"
        server.bind(name.replace("@", "\0", 1) if name.startswith("@") else name)
        server.setblocking(False)
        yield server, name


def test_each_message_is_one_datagram_of_lines(manager):
    server, name = manager
    notifier = Notifier(name)
    notifier.ready("serving")
    notifier.stopping("draining")
    assert server.recv(100) == b"READY=1\nSTATUS=serving"
    assert server.recv(100) == b"STOPPING=1\nSTATUS=draining"


def test_the_watchdog_is_fed_at_half_its_time_and_not_more_often(manager):
    server, name = manager
    notifier = Notifier(name, watchdog_usec=1000)
    for now_ns in (0, 499_999, 500_000, 900_000):
        notifier.watchdog(now_ns)
    assert [server.recv(100), server.recv(100)] == [b"WATCHDOG=1"] * 2
    with pytest.raises(BlockingIOError):
        server.recv(100)
    assert notifier.next_ns == 1_000_000


def test_a_manager_that_does_not_read_never_holds_us_up(manager):
    server, name = manager
    notifier = Notifier(name)
    for _ in range(10_000):
        notifier.status("x" * 100)
    server.close()
    notifier.status("gone")


def test_a_state_that_finds_the_queue_full_is_sent_when_there_is_room_and_before_signs_of_life(manager):
    server, name = manager
    notifier = Notifier(name, watchdog_usec=2)
    for now_ns in range(0, 1_000_000, 1000):
        notifier.watchdog(now_ns)
    notifier.ready("serving")
    notifier.stopping("draining")
    seen = drain(server)
    assert set(seen) == {b"WATCHDOG=1"}
    notifier.watchdog(2_000_000)
    assert drain(server) == [b"READY=1\nSTATUS=serving", b"STOPPING=1\nSTATUS=draining", b"WATCHDOG=1"]


def drain(server):
    seen = []
    try:
        while True:
            seen.append(server.recv(100))
    except BlockingIOError:
        return seen


def test_without_a_manager_nothing_is_sent_and_no_time_is_due():
    notifier = Notifier(None, watchdog_usec=1000)
    notifier.ready("serving")
    notifier.watchdog(10**9)
    assert notifier.next_ns is None
