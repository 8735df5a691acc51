from __future__ import annotations

import pytest

from meshd.api.prefix_key import key_position, pack_token_ids, prefix_key


@pytest.mark.parametrize(
    ("ids", "key", "position"),
    [
        ([1, 2, 3, 4], 0x6FC1EBD4F4D6EA31, 0xCEDCA61C9F075917),
        ([5, 17, 256, 70000], 0x6098D5672B0C4873, 0x59FFD8386B3E7F78),
        ([151644, 8948, 198, 2610], 0xBBBA9154D8D8FC92, 0x47BE21646350BCA2),
    ],
)
def test_keys_and_positions_equal_the_published_vectors(ids, key, position):
    assert prefix_key(pack_token_ids(ids)) == key
    assert key_position(key) == position


def test_no_ids_have_no_key_and_no_place():
    assert prefix_key(pack_token_ids([])) == key_position(0) == 0


def test_ids_are_packed_little_endian():
    assert pack_token_ids([1, 0xFFFFFFFF]) == b"\x01\0\0\0\xff\xff\xff\xff"


@pytest.mark.parametrize("token_id", [-1, 2**32, 10**40])
def test_an_id_that_is_no_u32_cannot_be_packed(token_id):
    with pytest.raises(OverflowError):
        pack_token_ids([token_id])
