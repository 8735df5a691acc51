"""Transports over TLS: what they count as unsent, and how a large body goes out."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from meshd.io.tls_transport import PIECE_BYTES, TURN_BYTES, TlsTransport, UpstreamTlsTransport
from tests.fakes.transport import FakeTransport


class Owner(asyncio.Protocol):
    """Does what an upstream connection does with its transport; ``upper`` is set once it is made."""

    upper: UpstreamTlsTransport | None = None

    def pause_writing(self) -> None:
        if self.upper is not None:
            self.upper.hold()

    def resume_writing(self) -> None:
        if self.upper is not None:
            self.upper.go_on()


class Turns:
    """A loop of which only `call_soon` is used; the test takes the turns."""

    def __init__(self) -> None:
        self.due: list[Callable[[], Any]] = []

    def call_soon(self, callback: Callable[[], Any]) -> None:
        self.due.append(callback)

    def take(self) -> None:
        due, self.due = self.due, []
        for callback in due:
            callback()


class Scene:
    def __init__(self) -> None:
        self.owner = Owner()
        self.tls = FakeTransport(self.owner)
        self.tcp = FakeTransport(asyncio.Protocol())
        self.turns = Turns()
        self.upper = UpstreamTlsTransport(self.tls, self.tcp, self.turns)  # type: ignore[arg-type]
        self.owner.upper = self.upper


def numbered(length: int) -> bytes:
    return bytes(position * 31 % 251 for position in range(length))


def test_unsent_is_what_either_layer_holds() -> None:
    it = Scene()
    it.tls.unsent, it.tcp.unsent = 7, 5
    assert TlsTransport(it.tls, it.tcp).get_write_buffer_size() == 12


def test_each_layer_gets_half_of_the_write_limits() -> None:
    it = Scene()
    it.upper.set_write_buffer_limits(high=1000, low=200)
    assert (it.tls.high, it.tls.low) == (500, 100)
    assert (it.tcp.high, it.tcp.low) == (500, 100)
    it.upper.set_write_buffer_limits(high=1000, low=0)
    assert (it.tls.low, it.tcp.low) == (0, 0)


def test_limits_of_a_closing_connection_are_left_alone() -> None:
    it = Scene()
    it.tcp.close()
    before = it.tcp.high
    it.upper.set_write_buffer_limits(high=1000, low=0)
    assert it.tcp.high == before


def test_half_a_close_is_not_offered() -> None:
    it = Scene()
    assert not it.upper.can_write_eof()


def test_a_small_request_goes_to_tls_at_once() -> None:
    it = Scene()
    it.upper.writelines((b"head", b"", memoryview(b"body")))
    assert bytes(it.tls.sent) == b"headbody"
    assert it.upper.get_write_buffer_size() == 0
    assert not it.turns.due


def test_a_large_body_takes_turns_and_arrives_in_order() -> None:
    it = Scene()
    body = numbered(3 * TURN_BYTES + 5)
    it.upper.writelines((b"head", memoryview(body)))
    assert len(it.tls.sent) <= TURN_BYTES + PIECE_BYTES
    assert it.upper.get_write_buffer_size() == 4 + len(body) - len(it.tls.sent)
    while it.turns.due:
        assert len(it.turns.due) == 1
        it.turns.take()
    assert bytes(it.tls.sent) == b"head" + body
    assert it.upper.get_write_buffer_size() == 0


def test_nothing_more_is_given_to_tls_while_it_holds_enough_back() -> None:
    it = Scene()
    it.upper.set_write_buffer_limits(high=65536, low=0)
    it.tls.is_stuck = True
    body = numbered(TURN_BYTES)
    it.upper.writelines((b"head", memoryview(body)))
    assert len(it.tls.sent) == 4 + PIECE_BYTES
    assert it.upper.get_write_buffer_size() == 4 + len(body)
    assert not it.turns.due
    for _ in range(len(body) // PIECE_BYTES):
        it.tls.take(it.tls.unsent)  # TLS is rid of all: it takes one more piece
    assert bytes(it.tls.sent) == b"head" + body
    assert it.upper.get_write_buffer_size() == 0


def test_bytes_written_behind_a_body_stay_behind_it() -> None:
    it = Scene()
    it.upper.set_write_buffer_limits(high=65536, low=0)
    it.tls.is_stuck = True
    body = numbered(2 * PIECE_BYTES)
    it.upper.writelines((memoryview(body),))
    it.upper.write(b"behind")
    for _ in range(4):
        it.tls.take(it.tls.unsent)
    assert bytes(it.tls.sent) == body + b"behind"


def test_abort_lets_go_of_the_body() -> None:
    it = Scene()
    it.upper.set_write_buffer_limits(high=65536, low=0)
    it.tls.is_stuck = True
    slot = bytearray(2 * TURN_BYTES)
    body = memoryview(slot)
    it.upper.writelines((body,))
    body.release()
    with pytest.raises(BufferError):
        slot.clear()
    it.tls.take(1)
    it.upper.abort()
    it.turns.take()
    assert it.tls.is_aborted
    sent = len(it.tls.sent)
    it.upper.go_on()
    assert len(it.tls.sent) == sent
    slot.clear()  # nobody looks at it any more


def test_a_lost_connection_lets_go_of_both_layers_and_sends_nothing() -> None:
    it = Scene()
    it.tls.unsent = it.tcp.unsent = 5
    layers = [weakref.ref(it.tls), weakref.ref(it.tcp)]
    it.upper.lost()
    it.upper.write(b"late")
    it.upper.writelines((b"late",))
    it.upper.set_write_buffer_limits(high=10, low=0)
    it.upper.pause_reading()
    it.upper.resume_reading()
    it.upper.close()
    it.upper.abort()
    assert it.upper.is_closing()
    assert it.upper.get_write_buffer_size() == 0
    assert it.upper.get_extra_info("socket") is None
    assert bytes(it.tls.sent) == b""
    del it.tls, it.tcp
    assert [layer() for layer in layers] == [None, None]


def test_a_turn_that_comes_after_the_abort_sends_nothing() -> None:
    it = Scene()
    it.upper.writelines((memoryview(bytes(2 * TURN_BYTES)),))
    it.upper.abort()
    sent = len(it.tls.sent)
    it.turns.take()
    assert len(it.tls.sent) == sent
    assert it.upper.get_write_buffer_size() == 0
