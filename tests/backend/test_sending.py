"""Each way of sending, seen from a raw socket."""

from typing import Any

import pytest

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Name a river"}]}
TEXT = "This is a deterministic answer to: Name a river"
MESSAGE = {"model": "meshd-demo", **HI}


def streamed(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True}


def chat_text(events: list[Any]) -> str:
    return "".join(e["choices"][0]["delta"].get("content", "") for e in events if e != "[DONE]")


def test_each_api_streams_what_it_answers_plainly(shared_backend: Any) -> None:
    ask = shared_backend.post
    assert chat_text(ask(CHAT, streamed(HI)).events) == TEXT
    assert ask(CHAT, HI).json["choices"][0]["message"]["content"] == TEXT

    prompt = {"prompt": "Name a river"}
    events = ask("/v1/completions", streamed(prompt)).events
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == TEXT
    assert ask("/v1/completions", prompt).json["choices"][0]["text"] == TEXT

    events = ask("/v1/messages", streamed(MESSAGE)).events
    assert "".join(e["delta"].get("text", "") for e in events if "delta" in e) == TEXT
    assert ask("/v1/messages", MESSAGE).json["content"][0]["text"] == TEXT

    question = {"model": "meshd-demo", "input": "Name a river"}
    events = ask("/v1/responses", streamed(question)).events
    assert "".join(e["delta"] for e in events if "delta" in e) == TEXT
    assert ask("/v1/responses", question).json["output"][0]["content"][0]["text"] == TEXT

    text = {"text": "Name a river"}
    assert ask("/generate", streamed(text)).events[-2]["text"] == TEXT
    assert ask("/generate", text).json["text"] == TEXT


@pytest.mark.parametrize("body", [HI, streamed(HI)])
def test_complete_answers_end_their_framing(shared_backend: Any, body: Any) -> None:
    answer = shared_backend.post(CHAT, body)
    assert answer.is_complete and not answer.was_reset
    assert answer.header("connection") == "close"


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize("body", [HI, streamed(HI)])
def test_split_and_slow_answers_have_the_same_bytes(shared_backend: Any, size: int, body: Any) -> None:
    whole = shared_backend.post(CHAT, body)
    for fault in (f"split={size}", "token-delay-ms=1", "delay-head-ms=1"):
        answer = shared_backend.post(CHAT, body, fault)
        assert answer.wire_body == whole.wire_body


def test_long_forced_answer_arrives_whole(shared_backend: Any) -> None:
    body = {**HI, "max_tokens": 30_000, "ignore_eos": True}
    events = shared_backend.post(CHAT, streamed(body)).events
    assert len(chat_text(events).split()) == 30_000
    assert chat_text(events) == shared_backend.post(CHAT, body).json["choices"][0]["message"]["content"]


def test_close_ends_the_connection_before_any_byte(shared_backend: Any) -> None:
    answer = shared_backend.post(CHAT, HI, "close")
    assert (answer.data, answer.was_reset) == (b"", False)


def test_reset_aborts_the_connection_before_any_byte(shared_backend: Any) -> None:
    answer = shared_backend.post(CHAT, HI, "reset")
    assert (answer.data, answer.was_reset) == (b"", True)


@pytest.mark.parametrize(("item", "is_reset"), [("cut", False), ("reset-at", True)])
@pytest.mark.parametrize("at", [0, 1, 50, 300])
@pytest.mark.parametrize("is_stream", [False, True])
def test_body_is_cut_after_exactly_so_many_bytes(
    shared_backend: Any, item: str, is_reset: bool, at: int, is_stream: bool
) -> None:
    body = streamed(HI) if is_stream else HI
    whole = shared_backend.post(CHAT, body)
    answer = shared_backend.post(CHAT, body, f"{item}={at}")
    assert answer.status == 200
    assert answer.body == whole.body[:at]
    assert answer.was_reset is is_reset
    assert not answer.is_complete


def test_cut_at_the_very_end_leaves_the_last_chunk_out(shared_backend: Any) -> None:
    whole = shared_backend.post(CHAT, streamed(HI))
    answer = shared_backend.post(CHAT, streamed(HI), f"cut={len(whole.body)}")
    assert answer.body == whole.body and not answer.is_complete
    beyond = shared_backend.post(CHAT, streamed(HI), f"cut={len(whole.body) + 1}")
    assert beyond.wire_body == whole.wire_body


def test_nearest_of_several_limits_acts(shared_backend: Any) -> None:
    answer = shared_backend.post(CHAT, HI, "cut=40,reset-at=20")
    assert (len(answer.body), answer.was_reset) == (20, True)


def test_cut_and_split_act_together(shared_backend: Any) -> None:
    assert len(shared_backend.post(CHAT, streamed(HI), "cut=100,split=3").body) == 100


@pytest.mark.parametrize("at", [0, 10])
def test_stall_falls_silent_until_the_peer_closes(start_backend: Any, raw_request: Any, at: int) -> None:
    backend = start_backend()
    with backend.connect() as sock:
        sock.sendall(raw_request("POST", CHAT, HI, **{"x-backend-fault": f"stall={at}"}))
        data = b""
        while len(data.partition(b"\r\n\r\n")[2]) < at or b"\r\n\r\n" not in data:
            data += sock.recv(65536)
        assert len(data.partition(b"\r\n\r\n")[2]) == at
        assert backend.stats()["active"] == 1
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            sock.recv(1)
    assert backend.wait_for(active=0)["aborted"] == 1


def test_error_event_ends_a_stream_properly_without_its_terminator(shared_backend: Any) -> None:
    answer = shared_backend.post(CHAT, streamed(HI), "error-event=2")
    assert answer.is_complete
    assert [set(event) & {"choices", "error"} for event in answer.events] == [
        {"choices"},
        {"choices"},
        {"error"},
    ]
    answer = shared_backend.post("/v1/messages", streamed(MESSAGE), "error-event=1")
    assert [event["type"] for event in answer.events] == ["message_start", "error"]
    body = {"model": "meshd-demo", "input": "x"}
    answer = shared_backend.post("/v1/responses", streamed(body), "error-event=1")
    assert [(e["type"], e["sequence_number"]) for e in answer.events] == [
        ("response.created", 0),
        ("error", 1),
    ]


@pytest.mark.parametrize(
    ("path", "body", "terminal"),
    [
        (CHAT, HI, b"[DONE]"),
        ("/v1/completions", {"prompt": "x"}, b"[DONE]"),
        ("/generate", {"text": "x"}, b"[DONE]"),
        ("/v1/messages", MESSAGE, b"message_stop"),
        ("/v1/responses", {"model": "meshd-demo", "input": "x"}, b"response.completed"),
    ],
)
def test_no_done_leaves_the_terminal_event_of_the_api_out(
    shared_backend: Any, path: str, body: Any, terminal: bytes
) -> None:
    whole = shared_backend.post(path, streamed(body))
    answer = shared_backend.post(path, streamed(body), "no-done")
    assert answer.is_complete and terminal in whole.body and terminal not in answer.body
    assert len(answer.events) == len(whole.events) - 1


def test_status_is_answered_with_retry_after(shared_backend: Any) -> None:
    answer = shared_backend.post(CHAT, streamed(HI), "status=503,retry-after=7")
    assert (answer.status, answer.header("retry-after")) == (503, "7")
    assert answer.json["error"]["type"] == "api_error"


def test_malformed_head_is_no_status_line(shared_backend: Any) -> None:
    answer = shared_backend.post(CHAT, HI, "malformed-head")
    assert answer.data.startswith(b"HTTP/1.1 2x0 ")
    assert not answer.was_reset


def test_bad_json_has_the_length_of_what_it_sends(shared_backend: Any) -> None:
    answer = shared_backend.post(CHAT, HI, "bad-json")
    assert answer.is_complete
    with pytest.raises(ValueError, match="delimiter"):
        _ = answer.json


def test_delay_flags_apply_to_plain_and_streamed_answers_alike(start_backend: Any) -> None:
    backend = start_backend("--token-delay-ms", "2", "--first-token-delay-ms", "5")
    assert backend.post(CHAT, HI).json["choices"][0]["message"]["content"] == TEXT
    assert chat_text(backend.post(CHAT, streamed(HI)).events) == TEXT
