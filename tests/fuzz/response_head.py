"""Responses of an upstream: heads as a strict reader and h11 read them, exchanges that no cut can change."""

from __future__ import annotations

import asyncio

import h11
from hypothesis import strategies as st

from meshd.io.chunked import ChunkedDecoder
from meshd.io.headers import downstream_head
from meshd.io.http1 import ResponseHead, UpstreamProtocolError, find_head_end, parse_response_head
from meshd.io.upstream import UpstreamConnection, UpstreamFailure
from tests.fakes.asked import asked, attached
from tests.fakes.heads import facts
from tests.fakes.transport import FakeClock, FakeTransport
from tests.fuzz.engine import Target, cuts, main, mutated
from tests.fuzz.strict import fields_of, length_of, lines_of, values

LOOP = asyncio.new_event_loop()  # only makes futures; nothing runs in it
WORDS = [
    b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\n\n", b"\0", b" ", b"\t", b":", b",", b"\x7f", b"\xff",
    b"HTTP/1.1 ", b"HTTP/1.0 ", b"200", b"204", b"304", b"100", b"101", b"600",
    b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 \r\nx: y\r\n\r\n" * 17, b"content-length: 5\r\n",
    b"content-length: 0\r\n", b"Content-Length: 5, 5\r\n", b"transfer-encoding: chunked\r\n",
    b"Transfer-Encoding: gzip\r\n", b"connection: close\r\n", b"Connection: x\r\n", b"x: y\r\n",
    b" fold\r\n", b"hello", b"upgrade: h2c\r\n", b"5\r\nhello\r\n0\r\n\r\n",
    b"location: http://u:1/a?b\r\n", b"set-cookie: a\r\n", b"trailer: x\r\n",
]  # fmt: skip


@st.composite
def _responses(draw: st.DrawFn) -> bytes:
    line = draw(
        st.sampled_from(
            [b"HTTP/1.1 200 OK", b"HTTP/1.0 200 OK", b"HTTP/1.1 204 ", b"HTTP/1.1 304 N", b"HTTP/1.1 500"]
        )
    )
    fields = draw(
        st.lists(st.sampled_from([w for w in WORDS if w.endswith(b"\r\n") and b": " in w]), max_size=4)
    )
    body = draw(st.sampled_from([b"hello", b"5\r\nhello\r\n0\r\n\r\n", b"", b"hello!", b"5\r\nhel"]))
    return line + b"\r\n" + b"".join(fields) + b"\r\n" + body


class _Sink:
    def __init__(self) -> None:
        self.body = b""
        self.end = ""

    def pass_chunks(self, data: bytes, decoder: ChunkedDecoder) -> bool:
        return False

    def body_data(self, data: bytes) -> None:
        self.body += data

    def body_end(self) -> None:
        assert not self.end, "a body ends once"
        self.end = "whole"

    def body_failed(self, failure: UpstreamFailure) -> None:
        assert not self.end, "a body ends once"
        self.end = failure.code


def _exchange(pieces: list[bytes], ends: bool) -> tuple[object, ...]:
    """Play ``pieces`` to one exchange; return what it was: head, body, end, and whether to use it again."""
    connection = UpstreamConnection("u", LOOP, lambda _: None, FakeClock())
    transport = FakeTransport(connection)
    response = asked(connection, "POST", b"POST / HTTP/1.1\r\n\r\n")
    sink = _Sink()
    is_attached = False
    for piece in pieces:
        if transport.is_closing():
            break
        transport.receive(piece)
        if response.done() and not is_attached and response.exception() is None:
            is_attached = True
            attached(connection, sink)
    if ends and not transport.is_closing():
        transport.end()
    transport.settle()
    if not response.done():
        return ("waiting",)
    failure = response.exception()
    if failure is not None:
        assert isinstance(failure, UpstreamFailure)
        return (failure.code,)
    if not is_attached:
        attached(connection, sink)
    head = response.result()
    return facts(head), sink.body, sink.end, connection.is_reusable


def check(data: bytes) -> None:
    for ends in (True, False):
        whole = _exchange([data], ends)
        for pieces in cuts(data):
            other = _exchange(pieces, ends)
            # A body broken in the very bytes that brought its head is told instead of the head.
            if whole == ("upstream_protocol_error",) and len(other) == 4 and other[2] == whole[0]:
                continue
            assert other == whole, (ends, pieces)
    end = find_head_end(data)
    if end > 0:
        for method in ("POST", "HEAD"):
            try:
                head = parse_response_head(data[:end], method)
            except UpstreamProtocolError:
                continue
            _compare(data[:end], head)
            _relay(head)


def _compare(raw: bytes, head: ResponseHead) -> None:
    line, *others = lines_of(raw)
    fields = fields_of(others)
    assert list(head.fields) == fields
    assert line.startswith(b"HTTP/1.1 " if head.is_http11 else b"HTTP/1.0 ")
    assert 100 <= head.status <= 599 and line[9:12] == b"%d" % head.status and head.status != 101
    assert line[13:] == head.reason
    if head.status != 204:
        assert head.content_length == length_of(fields)
        codings = values(fields, b"transfer-encoding")
        assert [c.lower() for c in codings] == ([b"chunked"] if codings else [])
        assert not (codings and (head.content_length is not None or not head.is_http11))
    assert not (head.status in (204, 304) and head.has_body)


def _relay(head: ResponseHead) -> None:
    """What goes to the client is one head with one framing."""
    if head.status < 200:
        return
    length = head.content_length
    framing = f"content-length: {length}\r\n" if length is not None else "transfer-encoding: chunked\r\n"
    if head.status == 204:
        framing = ""
    sent = downstream_head(head, request_id="req-0", framing=framing, closes=False, upstream_authority="u:1")
    assert find_head_end(sent) == len(sent)
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "h")]))
    client.send(h11.EndOfMessage())
    client.receive_data(sent)
    response = client.next_event()
    assert isinstance(response, h11.Response) and response.status_code == head.status
    fields = fields_of(lines_of(sent)[1:])
    for name in (b"x-request-id", b"content-length", b"transfer-encoding"):
        assert len(values(fields, name)) <= 1
    for name in (b"connection", b"upgrade", b"trailer", b"keep-alive"):
        assert values(fields, name) == []
    assert values(fields, b"x-request-id") == [b"req-0"]
    # Only where the value is a URL: other text that happens to hold an address is the upstream's own say.
    assert not any(
        value.startswith(b"http://u:1") and value[10:11] in b"/?# " for value in values(fields, b"location")
    )


TARGET = Target("response_head", mutated(_responses(), WORDS), check)

if __name__ == "__main__":
    main(TARGET)
