"""Trace context of a request: what its `traceparent` says, and the fields that go on (W3C Trace Context).

    00-<trace-id: 32 hex digits>-<parent-id: 16>-<flags: 2>

A valid field is continued: the same trace, a span of ours as the parent of what the upstream does, and
`tracestate` as it came. Anything else, a repeated field too, begins a trace of its own, and a `tracestate` of
another trace does not belong to it. A client that asks not to be sampled gets its fields forwarded untouched.
"""

from __future__ import annotations

import os
import random
import re
from typing import Final, NamedTuple

from meshd.io.http1 import RequestHead

SAMPLED: Final = 1
_KNOWN_FLAGS: Final = 3  # sampled, and random of level 2; all others must be 0 in version 00
# A later version may have more after its flags, behind another dash; version 00 has nothing there.
_FORM: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)


class TraceContext(NamedTuple):
    """Where a request stands in a trace; ``parent_id`` 0: we are the first."""

    trace_id: int
    parent_id: int
    flags: int

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)


class TraceIds:
    """Random ids, never 0. Seeded by the system once: asking it for each would be a system call."""

    __slots__ = ("_random",)

    def __init__(self, seed: bytes | None = None) -> None:
        self._random = random.Random(os.urandom(32) if seed is None else seed)

    def trace_id(self) -> int:
        return self._random.getrandbits(128) or 1

    def span_id(self) -> int:
        return self._random.getrandbits(64) or 1


def read_traceparent(head: RequestHead) -> TraceContext | None:
    """Return what a valid `traceparent` says, None if there is none."""
    value = head.values.get(b"traceparent")
    if value is None or b"traceparent" in head.repeated:
        return None
    found = _FORM.fullmatch(value)
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5] is not None):
        return None
    context = TraceContext(int(found[2], 16), int(found[3], 16), int(found[4], 16) & _KNOWN_FLAGS)
    return context if context.trace_id and context.parent_id else None


def trace_fields(context: TraceContext, span_id: int, head: RequestHead) -> bytes:
    """Return the header lines that make ``span_id`` the parent of what an upstream does."""
    line = b"traceparent: 00-%032x-%016x-%02x\r\n" % (context.trace_id, span_id, context.flags)
    if not context.parent_id or b"tracestate" not in head.values:
        return line
    state = (b"%b: %b\r\n" % field for field in head.fields if field[0].lower() == b"tracestate")
    return line + b"".join(state)
