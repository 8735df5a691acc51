import base64
import math
import struct

import pytest

from meshd.backend.vectors import embed, to_base64


def test_hello_in_eight_dimensions_is_the_known_vector() -> None:
    assert embed("hello", 8) == [
        0.40058367,
        -0.04647656,
        -0.26336717,
        -0.00663951,
        -0.41386269,
        0.53780018,
        0.53780018,
        0.13500334,
    ]


def test_empty_text_in_four_dimensions_is_the_known_vector() -> None:
    assert embed("", 4) == [0.7847136, -0.52998981, -0.25061534, 0.20131396]


@pytest.mark.parametrize("dimensions", [1, 16, 31, 32, 33, 1000, 4096])
def test_norm_is_one_and_length_is_as_asked(dimensions: int) -> None:
    vector = embed("some text", dimensions)
    assert len(vector) == dimensions
    assert math.isclose(math.sqrt(sum(x * x for x in vector)), 1, abs_tol=1e-6)


def test_text_is_hashed_as_utf8_and_texts_differ() -> None:
    assert embed("é", 8) != embed("e", 8)


def test_base64_holds_the_same_numbers_as_float32() -> None:
    vector = embed("hello", 40)
    decoded = struct.unpack("<40f", base64.b64decode(to_base64(vector)))
    assert decoded == pytest.approx(vector, abs=1e-7)
