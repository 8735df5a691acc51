"""Several scripted upstreams that play the same script, to see which of them a request visits."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from typing import Self

from tests.fakes.scripted_upstream import Script, ScriptedUpstream, Seen


def answer(status: int, body: bytes = b"{}", *fields: bytes) -> bytes:
    """Return a whole JSON response."""
    lines = b"".join(field + b"\r\n" for field in fields)
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b" % (
        status,
        lines,
        len(body),
        body,
    )


class Fleet:
    """``count`` upstreams; ``play`` gives all of them a script, ``members`` are they themselves."""

    def __init__(self, count: int) -> None:
        self._stack = contextlib.ExitStack()
        self.members = [ScriptedUpstream(Script(answer(200))) for _ in range(count)]
        self.urls = [member.url for member in self.members]

    def __enter__(self) -> Self:
        for member in self.members:
            self._stack.enter_context(member)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def play(self, *scripts: Script) -> None:
        """Forget what was seen; one script for all, or one for each."""
        for number, member in enumerate(self.members):
            member.script = scripts[number % len(scripts)]
            member.forget()

    def visits(self) -> list[tuple[int, Seen]]:
        """Take what each member has seen so far: its place, and the request."""
        return [(place, seen) for place, member in enumerate(self.members) for seen in _drain(member.seen)]

    def counts(self) -> list[int]:
        """Take how many requests each member has seen so far."""
        visits = self.visits()
        return [sum(1 for place, _ in visits if place == number) for number in range(len(self.members))]


def _drain(seen: queue.Queue[Seen]) -> Iterator[Seen]:
    with contextlib.suppress(queue.Empty):
        while True:
            yield seen.get_nowait()
