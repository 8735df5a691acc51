"""The block keys of a routing text: one hash for each prefix that the prefix index knows.

The text's first 524,288 bytes are cut into blocks of 128 bytes up to byte 8192 and of 1024 bytes after it;
each block is hashed with the key before it as seed, so a key names all the text up to the end of its block
and the model. Short texts and system prompts are told apart finely, and a long text still has 568 keys.

Made in the prepare worker; an I/O process only compares them.
"""

from __future__ import annotations

from array import array
from typing import Final

from xxhash import xxh3_64_intdigest

TEXT_BYTES_MAX: Final = 524288
"""UTF-8 bytes of a routing text that the prefix index looks at."""

_FINE_BYTES: Final = 128
_FINE_END: Final = 8192
_COARSE_BYTES: Final = 1024
_FINE_KEYS: Final = _FINE_END // _FINE_BYTES
KEYS_MAX: Final = _FINE_KEYS + (TEXT_BYTES_MAX - _FINE_END) // _COARSE_BYTES


def block_keys(model: str, text: bytes) -> bytes:
    """Return the keys of ``text`` as packed u64, the shortest prefix first; empty for an empty text.

    ``text``: UTF-8, at most ``TEXT_BYTES_MAX`` bytes of it count.
    """
    length = min(len(text), TEXT_BYTES_MAX)
    key = xxh3_64_intdigest(model.encode())
    keys = array("Q")
    append = keys.append
    with memoryview(text) as view:
        start = 0
        step = _FINE_BYTES
        while start < length:
            end = min(start + step, length)
            key = xxh3_64_intdigest(view[start:end], key)
            append(key)
            start = end
            if end == _FINE_END:
                step = _COARSE_BYTES
    return keys.tobytes()


def bytes_covered(keys: int, text_bytes: int) -> int:
    """Return how many bytes of a text of ``text_bytes`` its first ``keys`` keys cover."""
    if keys <= _FINE_KEYS:
        covered = keys * _FINE_BYTES
    else:
        covered = _FINE_END + (keys - _FINE_KEYS) * _COARSE_BYTES
    return min(covered, text_bytes)
