"""W3C Trace Context: what is read, and what goes on."""

from __future__ import annotations

import pytest

from meshd.io.headers import forwarded_fields
from meshd.io.http1 import RequestHead, parse_request_head
from meshd.io.traceparent import TraceContext, TraceIds, read_traceparent, trace_fields

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{PARENT}-01"


def head_with(*lines: str) -> RequestHead:
    raw = "\r\n".join(("GET /x HTTP/1.1", "host: h", *lines, "", ""))
    return parse_request_head(raw.encode(), 65536, 256)


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        (VALID, 1),
        (VALID[:-2] + "00", 0),
        (VALID[:-2] + "03", 3),
        (VALID[:-2] + "ff", 3),  # flags that version 00 does not know are not passed on
        (VALID.replace("00-", "cc-", 1), 1),
        (VALID.replace("00-", "cc-", 1) + "-what-the-future-holds", 1),
    ],
)
def test_valid_field_is_read(value, flags):
    context = read_traceparent(head_with(f"TraceParent: {value}"))
    assert context == TraceContext(int(TRACE, 16), int(PARENT, 16), flags)
    assert context.is_sampled == bool(flags & 1)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "anything",
        VALID.replace("00-", "ff-", 1),
        VALID.replace("00-", "0-", 1),
        VALID + "-more",
        VALID + "-",
        VALID.replace("00-", "cc-", 1) + ".more",
        VALID.upper(),
        VALID.replace(TRACE, "0" * 32),
        VALID.replace(PARENT, "0" * 16),
        VALID.replace(TRACE, TRACE[:-1]),
        VALID.replace(PARENT, PARENT + "0"),
        VALID[:-1],
        VALID[:-2] + "0x",
        VALID.replace(PARENT, PARENT[:-1] + "g"),
        f"{VALID},{VALID}",
    ],
)
def test_anything_else_is_no_field(value):
    assert read_traceparent(head_with(f"traceparent: {value}")) is None


def test_no_field_and_two_fields_are_none():
    assert read_traceparent(head_with()) is None
    assert read_traceparent(head_with(f"traceparent: {VALID}", f"traceparent: {VALID}")) is None


def test_continued_trace_keeps_its_state_in_order_and_bytes():
    head = head_with("tracestate: a=1", "x: y", f"traceparent: {VALID}", "TraceState: b=2,,c=3")
    context = read_traceparent(head)
    assert context is not None
    lines = trace_fields(context, 0xABC, head)
    assert lines == (
        f"traceparent: 00-{TRACE}-0000000000000abc-01\r\ntracestate: a=1\r\nTraceState: b=2,,c=3\r\n".encode()
    )
    for passes_credentials in (True, False):
        assert forwarded_fields(head, passes_credentials, lines) == "x: y\r\n" + lines.decode()
        assert forwarded_fields(head, passes_credentials).count("race") == 3  # untouched, and not mixed up


def test_new_trace_leaves_a_state_behind_that_is_not_its_own():
    lines = trace_fields(TraceContext(7, 0, 1), 9, head_with("tracestate: a=1"))
    assert lines == b"traceparent: 00-%032x-%016x-01\r\n" % (7, 9)


def test_ids_are_random_and_never_zero():
    ids, others = TraceIds(), TraceIds()
    found = {make() for each in (ids, others) for make in (each.trace_id, each.span_id) for _ in range(1000)}
    assert len(found) == 4000 and 0 not in found
    assert max(found) < 1 << 128 and max(ids.span_id() for _ in range(100)) < 1 << 64
    assert TraceIds(b"seed").trace_id() == TraceIds(b"seed").trace_id()
