from __future__ import annotations

import struct

from meshd.api.block_keys import KEYS_MAX, TEXT_BYTES_MAX, block_keys, bytes_covered


def _hex(keys: bytes) -> list[str]:
    return [f"{key:016x}" for key in struct.unpack(f"<{len(keys) // 8}Q", keys)]


def test_keys_equal_the_vectors_of_the_specification() -> None:
    assert _hex(block_keys("m1", b"a" * 300)) == ["42aa95315b17ab59", "1f30f42ddcbcbfb8", "95fb233602fc1545"]
    assert _hex(block_keys("m1", b"hello")) == ["26a5f39835c6b0bb"]
    long = _hex(block_keys("m1", b"a" * 10000))
    assert (len(long), long[63], long[-1]) == (66, "def6c6bf9f94dadc", "98c6d5a5b9daf6f5")


def test_texts_that_open_alike_share_the_keys_of_their_whole_common_blocks() -> None:
    one, other = block_keys("m1", b"a" * 300), block_keys("m1", b"a" * 300 + b"b" * 100)
    assert one[:16] == other[:16]
    assert one[16:] != other[16:24]
    assert bytes_covered(2, 400) == 256


def test_the_model_tells_equal_texts_apart() -> None:
    assert not set(_hex(block_keys("m1", b"x" * 400))) & set(_hex(block_keys("m2", b"x" * 400)))


def test_an_empty_text_has_no_keys() -> None:
    assert block_keys("m1", b"") == b""


def test_text_beyond_the_bound_does_not_count() -> None:
    text = bytes(TEXT_BYTES_MAX)
    assert len(block_keys("m", text)) == 8 * KEYS_MAX
    assert block_keys("m", text + b"more") == block_keys("m", text)


def test_covered_bytes_follow_the_block_sizes() -> None:
    assert [bytes_covered(keys, 300) for keys in (0, 1, 2, 3)] == [0, 128, 256, 300]
    assert bytes_covered(64, 10**6) == 8192
    assert bytes_covered(65, 10**6) == 9216
    assert bytes_covered(KEYS_MAX, TEXT_BYTES_MAX) == TEXT_BYTES_MAX
