"""A body on its way from one client connection, as its exchange begins it."""

from __future__ import annotations

from typing import Protocol

from meshd.io.body import Room
from meshd.io.downstream import DownstreamConnection
from meshd.strand import Promise


class FillableRoom(Room, Protocol):
    def fill(self, data: bytes) -> None: ...


def begun(connection: DownstreamConnection, room: FillableRoom, most: int) -> Promise[None] | None:
    """Take the body into ``room`` if it is there whole; else begin to receive it."""
    body = connection.take_whole_body()
    if body is None:
        return connection.begin_body(room, most)
    room.fill(body)
    return None
