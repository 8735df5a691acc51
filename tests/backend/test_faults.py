import json

import pytest

from meshd.backend.faults import NO_FAULTS, Faults, StandingFaults, parse_faults, shape, status_reply
from meshd.backend.reply import DONE_EVENT, Dialect, Event, json_reply, stream_reply


def events_after(spec: str, dialect: Dialect = Dialect.OPENAI) -> list[bytes]:
    events = iter([Event(b'{"a":1}'), Event(b'{"b":2}'), DONE_EVENT])
    shaped = shape(stream_reply(events, 2), parse_faults(spec), dialect).events
    assert shaped is not None
    return [event.data for event in shaped]


def test_every_item_is_read() -> None:
    spec = (
        "status=503,retry-after=7,delay-head-ms=1,token-delay-ms=2,close,reset,cut=3,reset-at=4,stall=0,"
        "error-event=5,no-done,no-usage,split=6,malformed-head,bad-json,times=8"
    )
    assert parse_faults(spec) == Faults(
        status=503,
        retry_after="7",
        delay_head_ms=1,
        token_delay_ms=2,
        close=True,
        reset=True,
        cut=3,
        reset_at=4,
        stall=0,
        error_event=5,
        no_done=True,
        no_usage=True,
        split=6,
        malformed_head=True,
        bad_json=True,
        times=8,
    )


def test_empty_specification_and_spaces_around_items_are_allowed() -> None:
    assert parse_faults("") == parse_faults(" , ") == NO_FAULTS
    assert parse_faults(" close , cut=1 ") == Faults(close=True, cut=1)


@pytest.mark.parametrize(
    "spec",
    [
        "nope",
        "close=1",
        "status",
        "status=99",
        "status=600",
        "cut=-1",
        "cut=x",
        "cut=٣",
        "split=0",
        "retry-after",
        "times=1.5",
        "no_done",
        "status=",
        "Close",
    ],
)
def test_wrong_item_is_named(spec: str) -> None:
    with pytest.raises(ValueError, match=spec.partition("=")[0]):
        parse_faults(spec)


def test_times_lets_later_requests_pass_until_set_again() -> None:
    standing = StandingFaults(parse_faults("status=500,times=2"))
    assert [standing.take().status for _ in range(4)] == [500, 500, None, None]
    standing.set(parse_faults("status=503,times=1"))
    assert [standing.take().status for _ in range(2)] == [503, None]


def test_without_times_the_faults_stay() -> None:
    standing = StandingFaults(parse_faults("close"))
    assert all(standing.take().close for _ in range(5))


def test_status_is_a_json_error_of_the_dialect_and_has_no_body_where_http_has_none() -> None:
    reply = status_reply(parse_faults("status=529"), Dialect.MESSAGES)
    assert reply is not None and reply.status == 529
    assert json.loads(reply.body)["error"]["type"] == "overloaded_error"
    empty = status_reply(parse_faults("status=204"), Dialect.OPENAI)
    assert empty is not None and empty.body == b""
    assert status_reply(NO_FAULTS, Dialect.OPENAI) is None


def test_retry_after_is_added_to_whatever_is_answered() -> None:
    reply = shape(json_reply({}), parse_faults("retry-after=soon"), Dialect.OPENAI)
    assert reply.headers == ((b"retry-after", b"soon"),)


def test_error_event_ends_the_stream_without_its_terminator() -> None:
    data = events_after("error-event=1")
    assert data[0] == b'{"a":1}' and len(data) == 2
    assert json.loads(data[1])["error"]["code"] == "backend_fault"
    first = events_after("error-event=0", Dialect.RESPONSES)
    assert len(first) == 1 and json.loads(first[0])["sequence_number"] == 0


def test_no_done_leaves_out_the_terminal_event_alone() -> None:
    assert events_after("no-done") == [b'{"a":1}', b'{"b":2}']


def test_bad_json_breaks_every_payload_and_the_plain_body() -> None:
    assert events_after("bad-json") == [b'{"a":1', b'{"b":2', b"[DONE]"]
    assert shape(json_reply({"a": 1}), parse_faults("bad-json"), Dialect.OPENAI).body == b'{"a":1'


def test_no_fault_changes_nothing() -> None:
    assert events_after("") == [b'{"a":1}', b'{"b":2}', b"[DONE]"]
    assert shape(json_reply({"a": 1}), NO_FAULTS, Dialect.OPENAI) == json_reply({"a": 1})
