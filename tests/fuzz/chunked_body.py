"""Chunked bodies: the same payload, end and rest wherever the bytes are cut, and h11 reads the same."""

from __future__ import annotations

import h11
from hypothesis import strategies as st

from meshd.io.chunked import ChunkedDecoder, ChunkedError
from tests.fuzz.engine import Target, cuts, main, mutated

HEAD = b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
WORDS = [
    b"\r\n", b"\n", b"\r", b"0\r\n\r\n", b"0\r\n", b"1\r\n", b"5\r\nhello\r\n", b"0x", b"+", b"-", b" ",
    b"\t", b";", b";a=b", b"ffffffffffffffff", b"0000000000000001", b"x: y\r\n",
    b"authorization: z\r\n", b" fold\r\n", b"\0", b"\x7f", b"GET / HTTP/1.1\r\n\r\n",
    b"A\r\n0123456789\r\n", b"e" * 1020, b";" + b"e" * 1023 + b"\r\n",
]  # fmt: skip


@st.composite
def _bodies(draw: st.DrawFn) -> bytes:
    parts = []
    for piece in draw(st.lists(st.binary(min_size=1, max_size=20), max_size=5)):
        extension = draw(st.sampled_from([b"", b"", b";a", b';a="b"', b"; c = d"]))
        size = draw(st.sampled_from([b"%x", b"%X", b"000%x"])) % len(piece)
        parts.append(size + extension + b"\r\n" + piece + b"\r\n")
    trailers = draw(st.sampled_from([b"", b"x: y\r\n", b"content-length: 9\r\n"]))
    return (
        b"".join(parts)
        + b"0\r\n"
        + trailers
        + b"\r\n"
        + draw(st.sampled_from([b"", b"GET /", b"\r\n", b"0"]))
    )


Result = tuple[bytes, bool, bytes] | None


def _decode(pieces: list[bytes]) -> Result:
    """Return payload, whether it is whole, and what follows; None when the framing was refused."""
    decoder = ChunkedDecoder(trailer_bytes=60, trailer_fields=3)
    payload: list[bytes] = []
    try:
        for index, piece in enumerate(pieces):
            payload += decoder.feed(piece)
            if decoder.is_complete:
                return b"".join(payload), True, decoder.rest + b"".join(pieces[index + 1 :])
    except ChunkedError:
        return None
    return b"".join(payload), False, b""


def check(data: bytes) -> None:
    result = _decode([data])
    for pieces in cuts(data):
        assert _decode(pieces) == result, pieces
    if result is not None and result[1]:
        _compare(data, *result)


def _compare(data: bytes, payload: bytes, _is_whole: bool, rest: bytes) -> None:
    if b"content-length" in data.lower() or b"transfer-encoding" in data.lower():
        return  # h11 judges framing fields in trailers too, where they mean nothing
    server = h11.Connection(h11.SERVER)
    server.receive_data(HEAD + data)
    assert isinstance(server.next_event(), h11.Request)
    read: list[bytes] = []
    while isinstance(event := server.next_event(), h11.Data):
        read.append(bytes(event.data))
    assert isinstance(event, h11.EndOfMessage), event
    assert b"".join(read) == payload
    assert server.trailing_data[0] == rest


TARGET = Target("chunked_body", mutated(_bodies(), WORDS), check)

if __name__ == "__main__":
    main(TARGET)
