"""The chunked framing of bodies, read (RFC 9112 §7.1). Pure.

    SIZE ──n──→ DATA ──→ DATA_END ──→ SIZE …
      └───0──→ TRAILER, line by line ──empty line──→ complete

Bytes of the framing are bounded against the data that they frame: tiny chunks with long extensions would keep
a connection busy for ever and bring nothing.
"""

from __future__ import annotations

import re
from typing import Final

from meshd.io.http1 import MAX_RESPONSE_FIELDS, MAX_RESPONSE_HEAD_BYTES, TOKEN_BYTE

MAX_CHUNK_LINE_BYTES: Final = 1024  # size and extensions of one chunk
MAX_FRAMING_EXCESS_BYTES: Final = 1 << 20  # by which framing may exceed the data it frames

# RFC 9112 allows white space before the semicolon; readers that disagree about it can be played off, so none.
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;[\t -~\x80-\xff]*)?")
_PLAIN_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,16})\r\n")
_TRAILER_LINE: Final = re.compile(TOKEN_BYTE + rb"+:[\t -~\x80-\xff]*")

_EVENT_END: Final = b"\n\n\r\n"  # of a chunk that ends where an event does


def _size_lines(most: int) -> list[bytes]:
    """Return the size line of one whole chunk, by the length of the chunk with its framing; b"" for none.

    Most events come in a chunk of their own: to compare the line that it must have then costs a tenth of
    reading it. Payloads of less than two bytes are left out, for they cannot be what `_EVENT_END` looks for.
    """
    lines = [b""] * most
    for payload_bytes in range(2, most):
        line = b"%x\r\n" % payload_bytes
        if len(line) + payload_bytes + 2 < most:
            lines[len(line) + payload_bytes + 2] = line
    return lines


_SIZE_LINES: Final = _size_lines(1024)

_SIZE: Final = 0
_DATA: Final = 1
_DATA_END: Final = 2
_TRAILER: Final = 3
_STATE_NAMES: Final = ("SIZE", "DATA", "DATA_END", "TRAILER")


class ChunkedError(Exception):
    """The chunked framing is broken; the connection cannot be used any further."""


class ChunkedDecoder:
    """Decode one chunked body from any pieces of it.

    ``feed(data)`` returns the payload pieces in order. After the last chunk and its trailer section
    ``is_complete`` is true and ``rest`` holds the bytes that follow the body. Extensions and trailers are
    discarded; the trailer section may have so many bytes and fields. ``left`` is what the current chunk
    still owes, ``excess_bytes`` by how much the framing exceeds the data so far.
    """

    __slots__ = (
        "_line",
        "_state",
        "_trailer_bytes_left",
        "_trailer_fields_left",
        "excess_bytes",
        "is_complete",
        "left",
        "rest",
    )

    def __init__(
        self, trailer_bytes: int = MAX_RESPONSE_HEAD_BYTES, trailer_fields: int = MAX_RESPONSE_FIELDS
    ) -> None:
        self._state = _SIZE
        self._line = b""
        self._trailer_bytes_left = trailer_bytes
        self._trailer_fields_left = trailer_fields
        self.left = 0
        self.excess_bytes = 0
        self.is_complete = False
        self.rest = b""

    def __repr__(self) -> str:
        return f"ChunkedDecoder({_STATE_NAMES[self._state]} left={self.left} complete={self.is_complete})"

    def feed(self, data: bytes) -> list[bytes]:
        """Return payload pieces of ``data``; raise ChunkedError when the framing is broken."""
        pieces: list[bytes] = []
        at = 0
        size = len(data)
        while at < size:
            if self._state == _DATA:
                end = min(size, at + self.left)
                pieces.append(data[at:end] if at or end < size else data)
                self.left -= end - at
                self.excess_bytes -= end - at
                at = end
                if not self.left:
                    self._state = _DATA_END
                continue
            end = data.find(b"\n", at)
            stop = size if end < 0 else end + 1
            self._line += data[at:stop]
            if len(self._line) > MAX_CHUNK_LINE_BYTES and self._state != _TRAILER:
                raise ChunkedError("chunk line too long")
            # The empty line that ends the trailer section is free.
            if self._state == _TRAILER and len(self._line) > self._trailer_bytes_left + 2:
                raise ChunkedError("trailer section too large")
            self._account(stop - at)
            at = stop
            if end < 0:
                self._check_partial()
                break
            line, self._line = self._line, b""
            self._end_line(line)
            if self.is_complete:
                self.rest = data[at:]
                break
        return pieces

    def pass_events(self, data: bytes) -> int:
        """Return the payload bytes of ``data`` if it is whole chunks, each of which ends with an empty line.

        0 if it is anything else, the last chunk included, or if the decoder stands within a chunk. Nothing
        was consumed then. Such data can be relayed as it stands: its framing is what we would write.
        """
        if self._state != _SIZE or self._line:
            return 0
        size = len(data)
        payload = 0
        if size < len(_SIZE_LINES):
            line = _SIZE_LINES[size]
            if line and data.startswith(line) and data.endswith(_EVENT_END):
                payload = size - len(line) - 2
        if not payload:
            payload = _event_bytes(data)
        if payload:
            self._account(size - 2 * payload)
        return payload

    def _account(self, framing_bytes: int) -> None:
        self.excess_bytes += framing_bytes
        if self.excess_bytes > MAX_FRAMING_EXCESS_BYTES:
            raise ChunkedError("framing bytes exceed the data by too much")

    def _check_partial(self) -> None:
        # Data that runs past its declared size shows at once, without waiting for a line end.
        if self._state == _DATA_END and self._line != b"\r":
            raise ChunkedError("chunk data is not followed by CRLF")

    def _end_line(self, line: bytes) -> None:
        if not line.endswith(b"\r\n") or b"\r" in line[:-2]:
            raise ChunkedError("a line of the chunked framing does not end with CRLF")
        if self._state == _SIZE:
            match = _CHUNK_SIZE.fullmatch(line[:-2])
            if match is None:
                raise ChunkedError("malformed chunk size")
            self.left = int(match[1], 16)
            self._state = _DATA if self.left else _TRAILER
        elif self._state == _DATA_END:
            if line != b"\r\n":
                raise ChunkedError("chunk data is not followed by CRLF")
            self._state = _SIZE
        elif line == b"\r\n":
            self.is_complete = True
        else:
            self._end_trailer(line)

    def _end_trailer(self, line: bytes) -> None:
        self._trailer_bytes_left -= len(line)
        self._trailer_fields_left -= 1
        if self._trailer_bytes_left < 0 or self._trailer_fields_left < 0:
            raise ChunkedError("trailer section too large")
        if _TRAILER_LINE.fullmatch(line[:-2]) is None:
            raise ChunkedError("malformed trailer field")


def _event_bytes(data: bytes) -> int:
    """Return the payload bytes of whole chunks that each end with an empty line; 0 for anything else."""
    at, payload, size = 0, 0, len(data)
    while at < size:
        line = _PLAIN_SIZE_LINE.match(data, at)
        if line is None:
            return 0
        start = line.end()
        length = int(line[1], 16)
        at = start + length + 2
        if length < 2 or at > size or not data.endswith(_EVENT_END, start, at):
            return 0
        payload += length
    return payload
