from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.api.dialects import cut_name, dialect_of_path, error_body, error_event, error_type

ANY_TEXT = st.text(st.characters())  # lone surrogates included


def test_the_openai_envelope_has_its_members_in_order():
    body = error_body("openai", "no_available_workers", 503, "No upstream.", "req-1")
    assert body == (
        b'{"error":{"message":"No upstream.","type":"api_error","param":null,"code":"no_available_workers"}}'
    )


def test_the_messages_envelope_has_its_members_in_order():
    body = error_body("messages", "body_too_large", 413, "Too large.", "msg-1")
    assert body == (
        b'{"type":"error","error":{"type":"request_too_large","message":"Too large."},"request_id":"msg-1"}'
    )


@pytest.mark.parametrize(
    ("status", "openai", "messages"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (403, "permission_error", "permission_error"),
        (404, "not_found_error", "not_found_error"),
        (405, "invalid_request_error", "invalid_request_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (431, "invalid_request_error", "invalid_request_error"),
        (501, "api_error", "api_error"),
        (503, "api_error", "api_error"),
        (529, "api_error", "overloaded_error"),
    ],
)
def test_types_follow_the_status(status, openai, messages):
    assert error_type(status, "openai") == openai
    assert error_type(status, "messages") == messages


def test_only_the_messages_paths_speak_the_messages_dialect():
    assert dialect_of_path("/v1/messages") == "messages"
    assert dialect_of_path("/v1/messages/count_tokens") == "messages"
    assert dialect_of_path("/v1/messages/") == "openai"
    assert dialect_of_path("/nowhere") == "openai"


@given(ANY_TEXT, ANY_TEXT, st.sampled_from(["openai", "messages"]))
def test_an_error_body_is_valid_json_for_every_message(message, request_id, dialect):
    body = error_body(dialect, "invalid_request", 400, message, request_id)
    text = json.loads(body)["error"]["message"]
    assert text.isprintable() or not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in text)


def test_quotes_and_newlines_in_a_message_stay_one_line_of_json():
    body = error_body("openai", "invalid_request", 400, 'a "b"\r\nc', "req-1")
    assert b"\n" not in body
    assert json.loads(body)["error"]["message"] == 'a "b"??c'


def test_a_name_of_ten_thousand_control_characters_is_cut_and_replaced():
    assert cut_name("\x00\x7f\x9b" * 10_000) == "?" * 256


@given(ANY_TEXT)
def test_a_name_is_never_longer_than_256_bytes(name):
    assert len(cut_name(name * 50).encode()) <= 256


def test_a_name_is_cut_between_characters():
    assert cut_name("é" * 200) == "é" * 128
    assert cut_name("a" + "é" * 200) == "a" + "é" * 127


def test_error_event_of_chat_and_completions():
    assert error_event("openai", "upstream_connection_failed", "Gone.") == (
        b'data: {"error":{"message":"Gone.","type":"api_error","param":null,'
        b'"code":"upstream_connection_failed"}}\n\n'
    )


def test_error_event_of_responses_carries_the_sequence_number():
    assert error_event("responses", "upstream_timeout", "Late.", 42) == (
        b'event: error\ndata: {"type":"error","code":"upstream_timeout","message":"Late.","param":null,'
        b'"sequence_number":42}\n\n'
    )


def test_error_event_of_messages():
    assert error_event("messages", "upstream_connection_failed", "Gone.\n\n") == (
        b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"Gone.??"}}\n\n'
    )
