"""HTTP/1.1 bytes of a reply: head, framing, chunks. Pure."""

from __future__ import annotations

from email.utils import formatdate
from enum import Enum
from http import HTTPStatus
from typing import Final

from meshd.backend.reply import Reply
from meshd.backend.state import Request

MALFORMED_HEAD: Final = b"HTTP/1.1 2x0 broken\x00status line\r\n\r\n"
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
BODILESS: Final = (204, 304)


class Framing(Enum):
    """How the receiver finds the end of the body."""

    NONE = "none"  # HEAD, 204, 304
    LENGTH = "length"
    CHUNKED = "chunked"
    CLOSE = "close"  # a stream to an HTTP/1.0 client


def framing_of(request: Request, reply: Reply) -> Framing:
    if request.method == "HEAD" or reply.status in BODILESS:
        return Framing.NONE
    if reply.events is None:
        return Framing.LENGTH
    return Framing.CLOSE if request.is_http_10 else Framing.CHUNKED


def render_head(request: Request, reply: Reply, date: bytes, *, is_keep_alive: bool) -> bytes:
    framing = framing_of(request, reply)
    lines = [
        b"HTTP/1.1 %d %b" % (reply.status, _reason(reply.status)),
        b"date: " + date,
        b"server: meshd-backend",
    ]
    if reply.status not in BODILESS:
        lines.append(b"content-type: " + reply.content_type)
        if reply.events is None:
            lines.append(b"content-length: %d" % len(reply.body))
    if framing is Framing.CHUNKED:
        lines.append(b"transfer-encoding: chunked")
    if reply.events is not None:
        lines.append(b"cache-control: no-cache")
    lines += [b"%b: %b" % header for header in reply.headers]
    if not is_keep_alive:
        lines.append(b"connection: close")
    return b"\r\n".join(lines) + b"\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def render_reply(head: bytes, framing: Framing, reply: Reply) -> bytes:
    """Return the whole response at once."""
    if framing is Framing.NONE:
        return head
    if reply.events is None:
        return head + reply.body
    rendered = (event.render() for event in reply.events)
    if framing is Framing.CLOSE:
        return head + b"".join(rendered)
    return b"".join((head, *map(chunk, rendered), LAST_CHUNK))


class DateLine:
    """The value of the Date field, made once a second."""

    def __init__(self) -> None:
        self._second = -1
        self._value = b""

    def at(self, unix_time: float) -> bytes:
        second = int(unix_time)
        if second != self._second:
            self._second = second
            self._value = formatdate(second, usegmt=True).encode()
        return self._value


def _reason(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b"Status"
