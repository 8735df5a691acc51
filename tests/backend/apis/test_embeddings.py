import base64
import struct
from collections.abc import Callable
from typing import Any

import pytest

from meshd.backend.apis.embeddings import answer
from meshd.backend.call import Call
from meshd.backend.reply import Reply, RequestError
from meshd.backend.vectors import embed

MakeCall = Callable[..., Call]
Plain = Callable[[Reply], Any]


def vectors(body: Any) -> list[list[float]]:
    return [item["embedding"] for item in body["data"]]


def test_each_input_has_its_vector_and_index(call: MakeCall, plain: Plain) -> None:
    body = plain(answer(call(input=["hello", "a b"], dimensions=8)))
    assert vectors(body) == [embed("hello", 8), embed("a b", 8)]
    assert [item["index"] for item in body["data"]] == [0, 1]
    assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 3}


def test_dimensions_default_to_the_flag(call: MakeCall, plain: Plain) -> None:
    assert len(vectors(plain(answer(call(embedding_dimensions=5, input="x"))))[0]) == 5


def test_ids_are_embedded_as_decimal_words(call: MakeCall, plain: Plain) -> None:
    assert vectors(plain(answer(call(input=[1, 22])))) == [embed("1 22", 16)]
    assert vectors(plain(answer(call(input=[[1], [22]])))) == [embed("1", 16), embed("22", 16)]


def test_base64_equals_the_list(call: MakeCall, plain: Plain) -> None:
    (text,) = vectors(plain(answer(call(input="hello", encoding_format="base64"))))
    assert isinstance(text, str)
    decoded = struct.unpack("<16f", base64.b64decode(text))
    assert decoded == pytest.approx(embed("hello", 16), abs=1e-7)


@pytest.mark.parametrize(
    "members", [{}, {"input": 7}, {"input": "a", "dimensions": 0}, {"input": "a", "dimensions": 4097}]
)
def test_wrong_members_are_refused(call: MakeCall, members: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        answer(call(**members))


def test_unknown_encoding_is_refused(call: MakeCall) -> None:
    with pytest.raises(RequestError):
        answer(call(input="a", encoding_format="int8"))
