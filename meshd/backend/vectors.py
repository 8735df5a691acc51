"""Deterministic embedding vectors: hash bytes mapped to -1..1 and scaled to norm 1."""

from __future__ import annotations

import base64
import hashlib
import math
import struct
from typing import Final

DECIMALS: Final = 8


def embed(text: str, dimensions: int) -> list[float]:
    """Return the vector of ``text``: SHA-256(text ‖ u32le(k)) for k = 0, 1, …, one byte an element."""
    data = text.encode()
    blocks = -(-dimensions // hashlib.sha256().digest_size)
    stream = b"".join(hashlib.sha256(data + struct.pack("<I", k)).digest() for k in range(blocks))
    raw = [byte / 127.5 - 1 for byte in stream[:dimensions]]
    norm = math.sqrt(math.fsum(x * x for x in raw))
    return [round(x / norm, DECIMALS) for x in raw]


def to_base64(vector: list[float]) -> str:
    """Return ``vector`` as base64 of little-endian float32."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
