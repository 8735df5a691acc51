"""Bodies on their way into memory: what is stored, what is left over, and when it is refused."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.errors import MeshError
from meshd.io.body import BodyReceiver
from meshd.io.http1 import RequestHead, parse_request_head
from meshd.strand import Promise


class Room:
    """Room that grows up to ``growth`` bytes."""

    def __init__(self, size: int, growth: int = 1 << 30) -> None:
        self.body = memoryview(bytearray(size))
        self.growth = growth
        self.asked: list[int] = []

    def grow(self, body_bytes: int) -> bool:
        self.asked.append(body_bytes)
        if body_bytes > self.growth:
            return False
        self.body = memoryview(bytearray(self.body).ljust(body_bytes, b"\0"))
        return True


def head(framing: str) -> RequestHead:
    return parse_request_head(f"POST / HTTP/1.1\r\nHost: h\r\n{framing}\r\n\r\n".encode(), 65536, 64)


def sized(length: int, room: Room) -> BodyReceiver:
    return BodyReceiver(head(f"Content-Length: {length}"), room, 1)


def chunked(room: Room, most: int = 1 << 20) -> BodyReceiver:
    return BodyReceiver(head("Transfer-Encoding: chunked"), room, most)


def test_sized_body_is_written_into_the_free_rest_of_its_room():
    room = Room(16)
    body = sized(10, room)
    assert body.take(b"abc") == b"" and not body.is_complete
    assert len(body.free) == 7
    body.free[:7] = b"defghij"
    body.received += 7
    assert body.is_complete and bytes(room.body[:10]) == b"abcdefghij"


def test_bytes_behind_a_sized_body_are_given_back_unstored():
    room = Room(4)
    body = sized(3, room)
    assert body.take(b"abcGET /") == b"GET /"
    assert body.is_complete and bytes(room.body) == b"abc\0"


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=6), st.integers(1, 50))
def test_chunked_body_is_the_same_in_whatever_pieces_it_comes(pieces, step):
    room = Room(16)
    body = chunked(room)
    wire = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\nGET /"
    rest = b""
    for at in range(0, len(wire), step):
        rest = rest + wire[at : at + step] if body.is_complete else body.take(wire[at : at + step])
    assert body.is_complete and rest == b"GET /"
    assert bytes(room.body[: body.received]) == b"".join(pieces)


def test_room_at_least_doubles_and_never_exceeds_the_most():
    room = Room(16)
    body = chunked(room, most=100)
    body.take(b"11\r\n" + bytes(17) + b"\r\n" + b"32\r\n" + bytes(50) + b"\r\n")
    assert room.asked == [32, 67]
    body.take(b"21\r\n" + bytes(33))
    assert room.asked == [32, 67, 100]


@pytest.mark.parametrize(
    ("wire", "growth", "code"),
    [
        (b"x\r\n", 1000, "malformed_request"),
        (b"65\r\n", 1000, "body_too_large"),
        (b"60\r\n" + bytes(96) + b"\r\n5\r\n" + bytes(5), 1000, "body_too_large"),
        (b"20\r\n" + bytes(32), 20, "buffer_budget_exhausted"),
    ],
)
def test_body_that_can_not_be_stored_is_refused_and_ends_the_connection(wire, growth, code):
    with pytest.raises(MeshError) as refused:
        chunked(Room(16, growth), most=100).take(wire)
    assert refused.value.code == code and refused.value.is_closing


def test_failure_is_told_once():
    async def scene() -> None:
        body = sized(3, Room(3))
        body.fail(MeshError("request_timeout", "nobody waits yet"))
        body.ready = Promise()
        body.fail(MeshError("request_timeout", "first"))
        body.fail(MeshError("malformed_request", "second"))
        with pytest.raises(MeshError, match="first"):
            await body.ready

    asyncio.run(scene())
