"""A second reader for long bodies: simdjson, which goes over text several times as fast as the strict reader.

It can also leave values where they are: most of a long body is text, and most policies read none. Only the
strict reader (``request_json``) decides what a body is: this one either says what that one would say too, or
``None`` for "ask it". So it is ``None`` for whatever simdjson refuses, and for what simdjson takes and we do
not, or takes otherwise:

    integers beyond 64 bits, 1e999    it refuses them
    more than 512 levels              it knows 1024: a body with many openings is read inside 512 more of them
    a name twice, while skimming      its look-up finds the first member of the name
    a byte order mark                 it skips one
    a name with U+0000, likewise      its look-up ends there

tests/api/test_long_json.py holds the two against each other; decision 0007 has the figures.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import orjson

from meshd.api.request_json import MAX_DEPTH, Members

_simdjson: Any
try:
    import simdjson as _simdjson
except ImportError:  # it is of the extra ``fast``
    _simdjson = None

LONG_BYTES: Final = 32 << 10
"""From here on it pays; at half of it both take the same."""
MOST_BYTES: Final = 2 << 20
"""The parser keeps its buffers, up to 15 bytes for each of the longest body it has seen."""

_MEMBERS_MAX: Final = 64  # a look-up goes through all of them
_FEW_OPENINGS: Final = 128  # counting more costs what reading inside of others does
_CHUNK_BYTES: Final = 64 << 10  # a copy that stays in the cache
_STARTS: Final = frozenset(b"{ \t\r\n")

# What usually stands behind that text (below), to the end of the body.
_MEMBERS_BEHIND: Final = re.compile(
    rb'"(?<!\\")\s*+(?:,\s*+"[^"\\]{0,64}+"\s*+:\s*+(?:"[^"\\]{0,64}+"|[-+.\w]{1,32}+)\s*+)*\}\s*+\Z'
)
_BEHIND_BYTES: Final = 256

# A body that opens with short members and then the text as one string. The body is known to be valid when the
# answer counts, so what stands behind the last colon is the value of that member. They are repeated with
# a bound and not possessively, since before Python 3.11.5 such a group finds nothing.
_ONE_TEXT: Final = re.compile(
    rb'\s*+\{(?:\s*+"[^"\\]{0,64}+"\s*+:\s*+(?:"[^"\\]{0,256}+"|[-+.\w]{1,32}+)\s*+,){0,63}'
    rb'\s*+"(prompt|text|input)"\s*+:\s*+"'
)
_LEVELS_AROUND: Final = 1024 - MAX_DEPTH  # it counts neither the innermost level nor an empty array
_OPENINGS: Final = b"[" * _LEVELS_AROUND
_CLOSINGS: Final = b"]" * _LEVELS_AROUND
# Members whose elements are looked at; of another array or object it is enough that it is one.
_LOOKED_INTO: Final = frozenset(("conversation", "input", "input_ids", "prompt", "text"))


class Opening(NamedTuple):
    """A body that was skimmed, and the beginning of its text.

    ``text_bytes``: of all of the text as it is written, so that an escape counts as more than it is in UTF-8,
    and so do members behind the text that are not short.
    """

    members: Members
    text: str
    text_bytes: int


class LongReader:
    """Reads the bodies of one process, one at a time."""

    def __init__(self) -> None:
        self._parser: Any = _simdjson.Parser(MOST_BYTES + 2 * MAX_DEPTH)

    def read(self, body: memoryview | bytes) -> Members | None:
        """Return the members of ``body``, which is not kept, or ``None``: see the module.

        Also ``None`` for a body of many small values, which the strict reader reads as fast.
        """
        if not _may_try(body) or not _has_few_openings(body):
            return None
        try:
            document = self._parser.parse(body)
        except (ValueError, RuntimeError, MemoryError):
            return None
        if type(document) is not _simdjson.Object:
            return None
        members: Members = document.as_dict()
        return members

    def skim(self, body: memoryview | bytes) -> Members | None:
        """Return stand-ins for the members of ``body``, which is not kept, or ``None``: see the module.

        Good for the checks, the facts and the names. Not for the text: a string may be empty, an array that
        nobody looks into is ``[]`` or ``[None]``, such an object is ``{}``.
        """
        if not _may_try(body):
            return None
        try:
            return self._skim(body, _ONE_TEXT.match(body))
        except (ValueError, RuntimeError, MemoryError):
            return None

    def open_text(self, body: memoryview | bytes, name: str, size: int) -> Opening | None:
        """Skim a body that is short members and then a longer string of this ``name``, and read its opening.

        ``size``: bytes of it, as written. ``None`` for any other body, and as for ``skim``.
        """
        if not _may_try(body):
            return None
        head = _ONE_TEXT.match(body)
        if head is None or head[1] != name.encode():
            return None
        start = head.end()
        data = bytes(body[start : start + size])
        cut = data.rfind(b" ")  # within no escape and no character
        if cut < 0:
            return None
        try:
            text: str = orjson.loads(b'"%s"' % data[:cut])  # refused if the string ends there
            members = self._skim(body, head)
        except (ValueError, RuntimeError, MemoryError):
            return None
        return None if members is None else Opening(members, text, len(body) - start - _bytes_behind(body))

    def _skim(self, body: memoryview | bytes, head: re.Match[bytes] | None) -> Members | None:
        is_bounded = head is None
        if head is not None or _has_few_openings(body):
            document = self._parser.parse(body)
        else:
            document = self._parse_bounded(body)
        if type(document) is not _simdjson.Object or len(document) > _MEMBERS_MAX:
            return None
        text_name = "" if head is None else str(head[1], "ascii")
        members: Members = {}
        for name in list(document):
            if name in members or "\0" in name:
                return None
            value = document[name] if name != text_name else ""
            kind = type(value)
            if kind is _simdjson.Array or kind is _simdjson.Object:
                if not is_bounded:
                    if not _has_few_openings(body):
                        return None
                    is_bounded = True
                value = _stand_in(name, value)
            members[name] = value
        return members

    def _parse_bounded(self, body: memoryview | bytes) -> Any:
        """Parse a body inside so many arrays that 512 levels are left; ``None`` if it is not one value."""
        value = self._parser.parse(b"".join((_OPENINGS, body, _CLOSINGS)))
        for _ in range(_LEVELS_AROUND):
            if type(value) is not _simdjson.Array or len(value) != 1:
                return None  # it has closed some of ours and opened others
            value = value[0]
        return value


def open_long_reader() -> LongReader | None:
    """Return a reader, or ``None`` if simdjson is not installed or draws its line elsewhere."""
    if _simdjson is None:
        return None
    reader = LongReader()
    deepest, too_deep = (b'{"a":%s%s}' % (b"[" * n, b"]" * n) for n in (MAX_DEPTH - 1, MAX_DEPTH))
    return reader if reader.skim(deepest) is not None and reader.skim(too_deep) is None else None


def _may_try(body: memoryview | bytes) -> bool:
    return len(body) <= MOST_BYTES and body[0] in _STARTS


def _bytes_behind(body: memoryview | bytes) -> int:
    """Return how much of ``body`` stands behind its one text; 0 if that is not short."""
    tail = bytes(body[-_BEHIND_BYTES:])
    behind = _MEMBERS_BEHIND.search(tail)
    return 0 if behind is None else len(tail) - behind.start()


def _stand_in(name: str, value: Any) -> Any:
    if type(value) is _simdjson.Object:
        return value.as_dict() if name in _LOOKED_INTO else {}
    if name in _LOOKED_INTO:
        return value.as_list()
    return [None] if len(value) else []


def _has_few_openings(body: memoryview | bytes) -> bool:
    openings = 0
    for start in range(0, len(body), _CHUNK_BYTES):
        chunk = bytes(body[start : start + _CHUNK_BYTES])
        for opening in (b"[", b"{"):
            position = chunk.find(opening)
            while position >= 0:
                openings += 1
                if openings > _FEW_OPENINGS:
                    return False
                position = chunk.find(opening, position + 1)
    return True
