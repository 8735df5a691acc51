from meshd.backend.reply import DONE_EVENT, Event, Reply, json_reply, stream_reply
from meshd.backend.state import Request
from meshd.backend.wire import DateLine, Framing, framing_of, render_head, render_reply


def request_of(method: str = "POST", *, is_http_10: bool = False) -> Request:
    return Request(method, "/x", (), b"", 1, is_http_10=is_http_10)


def head_of(reply: Reply, *, is_keep_alive: bool = True, method: str = "POST") -> list[bytes]:
    return render_head(request_of(method), reply, b"D", is_keep_alive=is_keep_alive).split(b"\r\n")


def test_plain_reply_has_its_length() -> None:
    reply = json_reply({}, headers=((b"retry-after", b"1"),))
    assert head_of(reply, is_keep_alive=False) == [
        b"HTTP/1.1 200 OK",
        b"date: D",
        b"server: meshd-backend",
        b"content-type: application/json",
        b"content-length: 2",
        b"retry-after: 1",
        b"connection: close",
        b"",
        b"",
    ]


def test_stream_is_chunked_or_ends_with_the_connection() -> None:
    reply = stream_reply(iter([]), 0)
    assert framing_of(request_of(), reply) is Framing.CHUNKED
    assert framing_of(request_of(is_http_10=True), reply) is Framing.CLOSE
    assert b"transfer-encoding: chunked" in head_of(reply)


def test_head_request_and_204_have_no_body() -> None:
    assert framing_of(request_of("HEAD"), json_reply({})) is Framing.NONE
    assert framing_of(request_of(), Reply(204)) is Framing.NONE
    assert b"content-length: 2" in head_of(json_reply({}), method="HEAD")
    assert not any(line.startswith(b"content-") for line in head_of(Reply(204)))


def test_unknown_status_has_a_reason_too() -> None:
    assert head_of(Reply(529))[0] == b"HTTP/1.1 529 Status"


def test_whole_reply_in_each_framing() -> None:
    def events() -> Reply:
        return stream_reply(iter([Event(b"{}"), DONE_EVENT]), 1)

    assert render_reply(b"H", Framing.LENGTH, json_reply({})) == b"H{}"
    assert render_reply(b"H", Framing.NONE, json_reply({})) == b"H"
    assert render_reply(b"H", Framing.CLOSE, events()) == b"Hdata: {}\n\ndata: [DONE]\n\n"
    assert render_reply(b"H", Framing.CHUNKED, events()) == (
        b"Ha\r\ndata: {}\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    )


def test_date_is_in_http_form_and_changes_with_the_second() -> None:
    dates = DateLine()
    assert dates.at(0.9) == b"Thu, 01 Jan 1970 00:00:00 GMT"
    assert dates.at(61.0) == b"Thu, 01 Jan 1970 00:01:01 GMT"
