"""Receive one request body into the memory that was reserved for it.

A *sized* body (Content-Length) lands in its room without a copy: the event loop is handed ``free`` and says
how much of it was filled. A chunked one comes by way of other memory, loses its framing in `take`, and makes
its room grow. Both count ``received``; of a body that has failed nothing further is stored.
"""

from __future__ import annotations

from typing import Protocol

from meshd.errors import MeshError
from meshd.io.chunked import ChunkedDecoder, ChunkedError
from meshd.io.http1 import RequestHead, malformed
from meshd.strand import Promise


class Room(Protocol):
    """Where a body is stored. ``grow`` makes room for that many bytes in all, and keeps what is there."""

    @property
    def body(self) -> memoryview: ...

    def grow(self, body_bytes: int) -> bool: ...


class BodyReceiver:
    """The body of ``head`` on its way into ``room``; ``most``: the largest length of a chunked one.

    ``ready``, if its owner sets one, is kept when the body is whole, or raises why it never will be.
    """

    __slots__ = ("_chunked", "_length", "_room", "is_sized", "ready", "received")

    def __init__(self, head: RequestHead, room: Room, most: int) -> None:
        self._chunked: ChunkedDecoder | None = None
        if head.is_chunked:
            self._chunked = ChunkedDecoder(head.trailer_bytes, head.trailer_fields)
        self._length = most if head.is_chunked else head.content_length or 0
        self._room = room
        self.is_sized = not head.is_chunked
        self.received = 0
        self.ready: Promise[None] | None = None

    def __repr__(self) -> str:
        return f"BodyReceiver({self.received} of {'' if self.is_sized else 'at most '}{self._length} bytes)"

    @property
    def free(self) -> memoryview:
        """Where the next bytes of a sized body belong; whoever fills it adds to ``received``."""
        return self._room.body[self.received : self._length]

    @property
    def is_complete(self) -> bool:
        return self.received == self._length if self._chunked is None else self._chunked.is_complete

    def take(self, data: bytes) -> bytes:
        """Store the next bytes of the body; return those that follow its end.

        Raises MeshError for broken framing, for a body that grows too large, and without memory.
        """
        if self._chunked is not None:
            return self._take_chunked(self._chunked, data)
        piece = data[: self._length - self.received]
        self._store(piece)
        return data[len(piece) :]

    def fail(self, error: MeshError) -> None:
        """Tell whoever waits for the body that it will never be whole."""
        if self.ready is not None:
            self.ready.set_exception(error)

    def _take_chunked(self, chunked: ChunkedDecoder, data: bytes) -> bytes:
        try:
            for piece in chunked.feed(data):
                self._grow(self.received + len(piece))
                self._store(piece)
        except ChunkedError as error:
            raise malformed(f"The chunked body is broken: {error}.") from error
        if self.received + chunked.left > self._length:  # announced, so nobody has to send it
            raise _too_large()
        return chunked.rest

    def _grow(self, body_bytes: int) -> None:
        if body_bytes > self._length:
            raise _too_large()
        held = len(self._room.body)
        if body_bytes > held and not self._room.grow(min(self._length, max(body_bytes, 2 * held))):
            raise MeshError(
                "buffer_budget_exhausted", "No memory is free for this body now.", is_closing=True
            )

    def _store(self, piece: bytes) -> None:
        end = self.received + len(piece)
        self._room.body[self.received : end] = piece
        self.received = end


def _too_large() -> MeshError:
    return MeshError("body_too_large", "The request body is too large.", is_closing=True)
