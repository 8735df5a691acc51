"""A body for one data-parallel rank: the client's own bytes without its rank, and then ours.

A prepare worker finds once which pieces of the body stay (``find_rank_free``), and an I/O process sends
them with a rank (``ranked_body``), another one at each attempt; nothing is copied or parsed again::

    {"model":"m1", "data_parallel_rank":9 ,"prompt":"a"}
    └──────────────┘                     └┘└──────────┘ └ replaced: ,"data_parallel_rank":3}
     kept           cut with one comma  kept   kept

Of the top level every member of that name goes (names are compared after unescaping), together with one
comma beside it; white space around both stays, as does every other byte up to the last ``}``. An object
without another member has nothing to keep and becomes ``{"data_parallel_rank":N}``.

The pieces are ``(start, end, start, end, …)`` in bytes of the body. A body can name the member often, and
each time costs a piece, in the view as in each write; past ``MAX_PIECES`` the request is refused, since
only a broken client repeats a member that often.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import orjson

from meshd.api.request_json import Members, refuse
from meshd.api.view import RoutingView

RANK_MEMBER: Final = "data_parallel_rank"
MAX_PIECES: Final = 32

_QUOTED_MEMBER: Final = b'"data_parallel_rank"'
_BLANKS: Final = b" \t\r\n"
_TAIL_BYTES: Final = 256
# Possessive, so that a string of megabytes costs no stack of places to go back to.
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BLANK: Final = re.compile(rb"[ \t\r\n]*+")
_SCALAR: Final = re.compile(rb"[^,}\] \t\r\n]++")
_NESTED: Final = re.compile(rb'[^"\[\]{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"|([\[{])|([\]}]))', re.DOTALL)
_ESCAPED_LETTER: Final = re.compile(rb"\\u00[567]")
_OPENING: Final = 1
_CLOSING: Final = 2

Buffer = bytes | memoryview


class RankedBody(NamedTuple):
    """A body as the buffers to write, and their length together.

    The memoryviews are of the client's body: whoever owns that keeps it until they are sent.
    """

    buffers: list[Buffer]
    length: int


def find_rank_free(members: Members, body: memoryview | bytes) -> tuple[int, ...]:
    """Return the pieces of ``body`` that stay; ``members`` is what it was parsed to.

    Without such a member it costs a look at the last bytes. A member named once, plainly, is found at the
    speed of memchr, 0.2 ms for each MB; otherwise the whole body is scanned, 10 to 300 ms for each MB.
    Raises ``MeshError`` ``invalid_request`` if the member is repeated too often.
    """
    end = _last_before(body, len(body))  # the brace that ends the object
    if RANK_MEMBER not in members:
        return (0, end) if members else ()
    if len(members) == 1:
        return ()
    return _pieces(_cuts(bytes(body)), end)


def ranked_body(view: RoutingView, body: memoryview, rank: int) -> RankedBody:
    """Return ``body`` with ``rank`` in it, or as it is if the view was made without NEEDS_RANK_FREE.

    The latter is a request that was prepared before the first data-parallel upstream came: its server
    balances it by itself.
    """
    pieces = view.rank_free
    if pieces is None:
        return RankedBody([body], len(body))
    if not pieces:
        tail = b'{"data_parallel_rank":%d}' % rank
        return RankedBody([tail], len(tail))
    tail = b',"data_parallel_rank":%d}' % rank
    buffers: list[Buffer] = [body[start:end] for start, end in zip(pieces[::2], pieces[1::2], strict=True)]
    buffers.append(tail)
    return RankedBody(buffers, sum(map(len, buffers)))


def _last_before(body: memoryview | bytes, end: int) -> int:
    """Return the place of the last byte before ``end`` that is no white space."""
    while end:
        start = max(0, end - _TAIL_BYTES)
        tail = bytes(body[start:end]).rstrip(_BLANKS)
        if tail:
            return start + len(tail) - 1
        end = start
    raise ValueError("the body is blank")


def _cuts(body: bytes) -> list[tuple[int, int]]:
    """Return what is to be cut from an object that has another member too, in order."""
    start = body.find(_QUOTED_MEMBER)
    is_plain = start >= 0 and (b"\\u00" not in body or _ESCAPED_LETTER.search(body) is None)
    if not is_plain or body.find(_QUOTED_MEMBER, start + 1) >= 0:
        return _scan(body)
    # Some member of the top level has the name, and this is the only place that can be it.
    end = _member_end(body, start + len(_QUOTED_MEMBER))
    comma = _skip_blank(body, end)
    if body[comma : comma + 1] == b",":
        return [(start, end), (comma, comma + 1)]
    comma = _last_before(body, start)
    return [(comma, comma + 1), (start, end)]


def _scan(body: bytes) -> list[tuple[int, int]]:
    cuts: list[tuple[int, int]] = []
    kept_comma = -1  # the last one that was not cut
    start = _skip_blank(body, _skip_blank(body, 0) + 1)
    while True:
        name_end = _end(_STRING.match(body, start))
        end = _member_end(body, name_end)
        comma = _skip_blank(body, end)
        is_last = body[comma : comma + 1] != b","
        if _is_rank(body[start:name_end]):
            cuts.append((start, end))
            if not is_last:
                cuts.append((comma, comma + 1))
            elif kept_comma >= 0:
                cuts.append((kept_comma, kept_comma + 1))
        elif not is_last:
            kept_comma = comma
        if is_last:
            return sorted(cuts)
        start = _skip_blank(body, comma + 1)


def _pieces(cuts: list[tuple[int, int]], end: int) -> tuple[int, ...]:
    pieces: list[int] = []
    start = 0
    for cut_start, cut_end in [*cuts, (end, end)]:
        if cut_start > start:
            pieces += (start, cut_start)
        start = cut_end
    if len(pieces) > 2 * MAX_PIECES:
        refuse(f'The member "{RANK_MEMBER}" is repeated too often.')
    return tuple(pieces)


def _is_rank(name: bytes) -> bool:
    if b"\\" not in name:
        return name == _QUOTED_MEMBER
    # The name is a fraction of a body that was parsed before, so this cannot fail.
    unescaped: Any = orjson.loads(name)
    return bool(unescaped == RANK_MEMBER)


def _member_end(body: bytes, name_end: int) -> int:
    """Return where the value of a member ends."""
    start = _skip_blank(body, _skip_blank(body, name_end) + 1)
    first = body[start : start + 1]
    if first == b'"':
        return _end(_STRING.match(body, start))
    if first not in (b"{", b"["):
        return _end(_SCALAR.match(body, start))
    depth = 0
    for token in _NESTED.finditer(body, start):
        if token.lastindex == _OPENING:
            depth += 1
        elif token.lastindex == _CLOSING:
            depth -= 1
            if not depth:
                return token.end()
    raise ValueError("the body is not a JSON object")


def _skip_blank(body: bytes, start: int) -> int:
    return _end(_BLANK.match(body, start))


def _end(match: re.Match[bytes] | None) -> int:
    if match is None:
        raise ValueError("the body is not a JSON object")
    return match.end()
