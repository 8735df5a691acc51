"""The key of a prompt's first token ids and its position on the hash ring; both sides must agree on it."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable
from typing import Final

from blake3 import blake3
from xxhash import xxh3_64_intdigest

TOKEN_ID_MAX: Final = 0xFFFF_FFFF
_U64: Final = struct.Struct("<Q")


def pack_token_ids(ids: Iterable[int]) -> bytes:
    """Return ids as u32 little-endian; ``OverflowError`` for one outside 0…2³²−1."""
    packed = array("I", ids)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    """Return the ids of ``pack_token_ids``."""
    ids = array("I", packed)
    if sys.byteorder != "little":
        ids.byteswap()
    return ids.tolist()


def prefix_key(token_ids: bytes) -> int:
    """Return the key of packed ids, already cut to the prefix; 0 stands for no ids."""
    return xxh3_64_intdigest(token_ids) if token_ids else 0


def key_position(key: int) -> int:
    """Return where a key lies on the hash ring: blake3 over its 16 lower-case hex digits; 0 for no ids."""
    if not key:
        return 0
    position: int = _U64.unpack(blake3(b"%016x" % key).digest(8))[0]
    return position
