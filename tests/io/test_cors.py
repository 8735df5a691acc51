from __future__ import annotations

import pytest

from meshd.io.cors import Cors
from meshd.io.headers import downstream_head
from meshd.io.http1 import RequestHead, parse_request_head, parse_response_head

PAGE = "https://chat.example"


def head(*lines: str, method: str = "OPTIONS") -> RequestHead:
    raw = "\r\n".join((f"{method} /v1/chat/completions HTTP/1.1", "host: m", *lines, "", ""))
    return parse_request_head(raw.encode("latin-1"), 8192, 64)


def preflight(
    cors: Cors, *lines: str, methods: tuple[str, ...] = ("POST",), closes: bool = False
) -> str | None:
    answer = cors.preflight_answer(head(*lines), methods, request_id="req-1", date=b"now", closes=closes)
    return None if answer is None else answer.decode("latin-1")


ASKS = (f"origin: {PAGE}", "access-control-request-method: POST")


def test_preflight_of_a_listed_origin_is_answered_with_the_methods_of_the_path() -> None:
    answer = preflight(
        Cors((PAGE,)),
        *ASKS,
        "access-control-request-headers: authorization, content-type",
        methods=("GET", "DELETE"),
    )
    assert answer == (
        "HTTP/1.1 204 No Content\r\n"
        "date: now\r\n"
        "server: meshd\r\n"
        "x-request-id: req-1\r\n"
        f"access-control-allow-origin: {PAGE}\r\n"
        "access-control-allow-methods: GET, DELETE\r\n"
        "access-control-allow-headers: authorization, content-type\r\n"
        "access-control-max-age: 600\r\n"
        "vary: origin\r\n"
        "\r\n"
    )


def test_preflight_that_asks_for_no_headers_allows_none_and_says_close_where_it_must() -> None:
    answer = preflight(Cors((PAGE,)), *ASKS, closes=True)
    assert answer is not None
    assert "allow-headers" not in answer
    assert answer.endswith("connection: close\r\n\r\n")


def test_a_path_that_takes_any_method_allows_the_asked_one() -> None:
    answer = preflight(Cors((PAGE,)), f"origin: {PAGE}", "access-control-request-method: PATCH", methods=())
    assert answer is not None
    assert "access-control-allow-methods: PATCH\r\n" in answer


@pytest.mark.parametrize(
    ("origins", "lines"),
    [
        ((), ASKS),
        (("https://other.example",), ASKS),
        ((PAGE,), ("access-control-request-method: POST",)),
        ((PAGE,), (f"origin: {PAGE}",)),
        ((PAGE,), (*ASKS, "origin: https://other.example")),
        ((PAGE,), ("origin: http://chat.example", ASKS[1])),
        ((PAGE,), ("origin: null", ASKS[1])),
        ((PAGE,), (f"origin: {PAGE}", "access-control-request-method: PO ST")),
    ],
)
def test_other_options_requests_are_no_preflights(origins: tuple[str, ...], lines: tuple[str, ...]) -> None:
    assert preflight(Cors(origins), *lines) is None


def test_only_options_is_a_preflight() -> None:
    request = head(*ASKS, method="POST")
    assert Cors((PAGE,)).preflight_answer(request, ("POST",), request_id="r", date=b"", closes=False) is None


def test_asked_headers_that_are_no_list_of_names_are_not_repeated() -> None:
    answer = preflight(Cors((PAGE,)), *ASKS, "access-control-request-headers: a b; <c>")
    assert answer is not None
    assert "allow-headers" not in answer


def test_answers_to_a_listed_origin_may_be_read_by_its_pages() -> None:
    fields = Cors((PAGE,)).response_fields(head(f"origin: {PAGE}", method="POST"))
    assert fields == (
        (b"access-control-allow-origin", PAGE.encode()),
        (b"access-control-expose-headers", b"x-request-id, x-mesh-error-code"),
        (b"vary", b"origin"),
    )


def test_answers_to_others_carry_nothing() -> None:
    for cors, lines in (
        (Cors(()), (f"origin: {PAGE}",)),
        (Cors((PAGE,)), ("origin: https://other.example",)),
        (Cors((PAGE,)), ()),
    ):
        assert cors.response_fields(head(*lines, method="POST")) == ()


def test_a_star_lists_every_origin_and_names_the_one_that_asked() -> None:
    cors = Cors(("*",))
    assert cors.response_fields(head("origin: https://any.example", method="POST"))[0] == (
        b"access-control-allow-origin",
        b"https://any.example",
    )
    assert cors.response_fields(head(method="POST")) == ()


RESPONSE = (
    b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\ncontent-length: 2\r\nvary: accept-encoding\r\n"
    b"access-control-allow-credentials: true\r\nx-other: 1\r\n\r\n"
)


def test_our_rules_take_the_place_of_the_upstreams() -> None:
    cors, request = Cors((PAGE,)), head(f"origin: {PAGE}", method="POST")
    response = parse_response_head(RESPONSE, "POST")
    relayed = cors.relayed(request, response)
    written = downstream_head(
        relayed, request_id="r", framing="content-length: 2\r\n", closes=False,
        upstream_authority="u", extra=cors.response_fields(request),
    ).decode()  # fmt: skip
    assert written.lower().count("access-control-allow-origin") == 1
    assert f"access-control-allow-origin: {PAGE}" in written
    assert "credentials" not in written
    assert "vary: accept-encoding" in written
    assert "vary: origin" in written
    assert "x-other: 1" in written
    assert relayed.content_length == 2
    assert cors.relayed(request, response) is relayed


def test_the_upstreams_rules_pass_where_ours_do_not_apply() -> None:
    response = parse_response_head(RESPONSE, "POST")
    request = head("origin: https://other.example", method="POST")
    assert Cors((PAGE,)).relayed(request, response) is response
    assert Cors(()).relayed(head(f"origin: {PAGE}", method="POST"), response) is response


def test_a_response_without_rules_is_relayed_as_it_is() -> None:
    response = parse_response_head(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", "POST")
    assert Cors((PAGE,)).relayed(head(f"origin: {PAGE}", method="POST"), response) is response
