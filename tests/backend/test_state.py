import base64

from meshd.backend.state import Request, RequestLog, Stats


def request_of(body: bytes = b"", target: str = "/x") -> Request:
    return Request("POST", target, ((b"Host", b"a"), (b"x-a", b"\xff"), (b"X-A", b"2")), body, 3)


def test_request_is_shown_with_headers_as_pairs_in_order_and_body_in_base64() -> None:
    assert request_of(b"\x00\xff", "/x?y=1").to_dict() == {
        "method": "POST",
        "target": "/x?y=1",
        "headers": [["Host", "a"], ["x-a", "\xff"], ["X-A", "2"]],
        "body": base64.b64encode(b"\x00\xff").decode(),
        "connection": 3,
    }


def test_path_leaves_out_the_query_and_a_header_is_found_in_any_case() -> None:
    request = request_of(target="/x?y=1?z")
    assert request.path == "/x"
    assert request.header(b"host") == b"a"
    assert request.header(b"x-a") == b"\xff"
    assert request.header(b"none") is None


def test_log_keeps_the_last_requests() -> None:
    log = RequestLog(capacity=3)
    for number in range(5):
        log.add(request_of(target=f"/{number}"))
    assert [item["target"] for item in log.to_list()] == ["/2", "/3", "/4"]


def test_log_drops_the_oldest_bodies_but_never_the_newest() -> None:
    log = RequestLog(body_bytes=10)
    for size in (4, 4, 4):
        log.add(request_of(b"x" * size))
    assert len(log) == 2
    log.add(request_of(b"x" * 50))
    assert [len(base64.b64decode(item["body"])) for item in log.to_list()] == [50]


def test_cleared_log_has_its_whole_room_again() -> None:
    log = RequestLog(body_bytes=10)
    log.add(request_of(b"x" * 9))
    assert log.clear() == 1
    log.add(request_of(b"x" * 5))
    log.add(request_of(b"x" * 5))
    assert len(log) == 2


def test_stats_add_up() -> None:
    stats = Stats()
    assert (stats.open_connection(), stats.open_connection()) == (1, 2)
    stats.close_connection()
    for _ in range(3):
        stats.begin()
    stats.end(is_aborted=False)
    stats.end(is_aborted=True)
    assert stats.to_dict() == {
        "served": 1,
        "active": 1,
        "max_active": 3,
        "aborted": 1,
        "connections": 2,
        "open_connections": 1,
    }
