from collections.abc import Callable
from typing import Any

import pytest

from meshd.backend.apis.completions import answer
from meshd.backend.call import Call
from meshd.backend.reply import Reply, RequestError

MakeCall = Callable[..., Call]
Plain = Callable[[Reply], Any]
Stream = Callable[[Reply], list[Any]]

BEGINNING = "This is a deterministic answer to:"


def test_each_prompt_and_each_copy_has_a_choice_prompt_by_prompt(call: MakeCall, plain: Plain) -> None:
    body = plain(answer(call(prompt=["a", "b c"], n=2)))
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, f"{BEGINNING} a"),
        (1, f"{BEGINNING} a"),
        (2, f"{BEGINNING} b c"),
        (3, f"{BEGINNING} b c"),
    ]
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (3, 30)


def test_ids_are_answered_as_words(call: MakeCall, plain: Plain) -> None:
    assert plain(answer(call(prompt=[5, 77])))["choices"][0]["text"] == f"{BEGINNING} 5 77"
    body = plain(answer(call(prompt=[[5], [77]])))
    assert [c["text"] for c in body["choices"]] == [f"{BEGINNING} 5", f"{BEGINNING} 77"]


def test_stream_concatenates_to_the_plain_text_of_each_choice(
    call: MakeCall, plain: Plain, stream: Stream
) -> None:
    members = {"prompt": ["a", "b c d"], "max_tokens": 8}
    wanted = [c["text"] for c in plain(answer(call(**members)))["choices"]]
    events = stream(answer(call(**members, stream=True, stream_options={"include_usage": True})))
    texts, finishes = ["", ""], {}
    for event in events[:-2]:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["text"]
        finishes[choice["index"]] = choice["finish_reason"]
    assert texts == wanted
    assert finishes == {0: "stop", 1: "length"}
    assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 15
    assert events[-1] == "[DONE]"


def test_missing_prompt_is_refused(call: MakeCall) -> None:
    with pytest.raises(RequestError):
        answer(call())
