from typing import Any

import pytest

from meshd.backend.call import Call, integer, make_call, prompt_texts, read_body
from meshd.backend.reply import RequestError


def call_of(body: dict[str, Any]) -> Call:
    return Call(body, "0" * 24, ("m1", "m2"))


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b'{"a":NaN}', b"\xff", b"{} x"])
def test_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        read_body(raw)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")


def test_named_model_is_echoed_and_an_absent_one_is_the_first_served() -> None:
    assert call_of({"model": "m2"}).model() == "m2"
    assert call_of({}).model() == "m1"


def test_model_not_served_is_404() -> None:
    with pytest.raises(RequestError) as caught:
        call_of({"model": "m3"}).model()
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize("body", [{"model": ""}, {"model": 7}, {"model": None}])
def test_model_that_is_required_must_be_a_name(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        call_of(body).model(is_required=True)
    assert caught.value.status == 400


@pytest.mark.parametrize("messages", [None, [], "x", {}])
def test_messages_must_be_a_non_empty_array(messages: object) -> None:
    with pytest.raises(RequestError):
        call_of({"messages": messages}).messages()


def test_first_present_limit_counts() -> None:
    call = call_of({"max_tokens": 3, "max_completion_tokens": None})
    assert len(call.output("x", "max_completion_tokens", "max_tokens").words) == 3
    assert len(call_of({}).output("x", "max_tokens").words) == 7


def test_forced_words_are_bounded() -> None:
    with pytest.raises(RequestError):
        call_of({"max_tokens": 10**9, "ignore_eos": True}).output("x", "max_tokens")
    assert not call_of({"max_tokens": 10**9}).output("x", "max_tokens").is_cut


@pytest.mark.parametrize("value", [True, -1, 1.5, "3", 6])
def test_integer_of_another_kind_or_out_of_bounds_is_refused(value: object) -> None:
    with pytest.raises(RequestError) as caught:
        integer({"n": value}, "n", 1, high=5)
    assert "'n'" in caught.value.message


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ("a b", ["a b"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], ["1 2"]),
        ([[1, 2], [3]], ["1 2", "3"]),
    ],
)
def test_prompts_of_every_kind(value: object, texts: list[str]) -> None:
    assert prompt_texts(value, "prompt") == texts


@pytest.mark.parametrize("value", [None, [], {}, ["a", 1], [[1], "a"], [True], [1.5], [["a"]]])
def test_prompts_of_mixed_or_other_kinds_are_refused(value: object) -> None:
    with pytest.raises(RequestError):
        prompt_texts(value, "prompt")


def test_usage_chunk_needs_the_option_and_no_fault_against_it() -> None:
    body = b'{"stream_options":{"include_usage":true}}'
    assert make_call(body, ("m",), has_usage=True, embedding_dimensions=4).wants_usage_chunk
    assert not make_call(body, ("m",), has_usage=False, embedding_dimensions=4).wants_usage_chunk
    assert not call_of({"stream_options": None}).wants_usage_chunk
