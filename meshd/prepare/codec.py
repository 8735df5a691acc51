"""A job's result as bytes in the view area of its slot: a routing view, a whole answer, or a refusal.

    0              8            16       20       24
    ┌──────────────┬────────────┬────────┬────────┐
    │ key_position │ text_bytes │ name   │ tail   │
    │ u64          │ u64        │ u32    │ u32    │
    ├────────┬─────┴┬───────┬───┴────┬───┴────────┤
    │ check  │ kind │ flags │ pieces │ batch_size │                      24 … 36
    │ u32    │ u8   │ u8    │ u16    │ u32        │
    ├────────┴──────┴───────┴────────┴────────────┤
    │ name bytes: model, or error code            │
    ├─────────────────────────────────────────────┤
    │ tail bytes: answer, or message; of a view   │
    │   rank-free body: start u64 │ end u64       │
    │   of each piece that stays, then            │
    │   block keys: u64 each                      │
    └─────────────────────────────────────────────┘

Everything is little-endian. The record has no length: its reader is told one, and all the parts together
must have it. ``pieces`` is one more than there are, and 0 for a view that was not asked for them. Token ids
and their key stay with the worker: what is asked of them is their place on the hash ring. Block keys stay
packed: an I/O process hands them on.

What stands from ``check`` to the end of the name are the *facts* of a view, and a *plain* view is nothing
else. All requests of a client that asks one model for one thing have the same ones, so `Results` knows a view
by their bytes: decoding one took 16,000 instructions of a compiled build, looking it up takes 1,200. A
*keyed* view also has its place on the ring or its text, which differ: it is made from one of equal facts. The
worker likewise keeps the last plain view packed.

An answer, which can be megabytes, is not copied out; one that does not fit is left out, and its record has
in ``text_bytes`` the length of the view area that it needs.
"""

from __future__ import annotations

import struct
from typing import Final

from meshd.api.answer import Answer
from meshd.api.view import RoutingView
from meshd.errors import CODES, MeshError
from meshd.slab import BodySlab

_CHECK: Final = 0x4D565737  # "MVW7": magic and version of this layout in one word
_PLAIN: Final = 1
_KEYED: Final = 2
_RANKED: Final = 3  # a view with ``rank_free``, whatever else it has
_REFUSAL: Final = 4
_ANSWER: Final = 5
_STREAM: Final = 1
_LOGPROBS: Final = 2
_HAS_STATE: Final = 4
_CREATES_STATE: Final = 8
_ALL_FLAGS: Final = 15
_U32_MAX: Final = 0xFFFF_FFFF
_PIECE_BYTES: Final = 16

_KEYS: Final = struct.Struct("<QQII")
_HEAD: Final = struct.Struct("<QQIIIBBHI")
_FACTS: Final = struct.Struct("<IBBHI")
FACTS_AT: Final = _KEYS.size
HEAD_BYTES: Final = _HEAD.size

_KIND_AT: Final = FACTS_AT + 4
_COPIED_BYTES: Final = 8192  # the longest record that is copied out as a whole; a view has 5 KiB and a name
_KEPT_BYTES: Final = 256  # of facts that are kept: the longest names, which strangers choose, are not
_KEPT_VIEWS: Final = 256


class ViewTooLarge(Exception):
    """The view does not fit its area; the job answers with a refusal, which always fits."""


class CodecFault(Exception):
    """The bytes are no result of a prepare job: a fault of the shared layout, not of a request."""


# ------------------------------------------------------------------------------------- the worker writes


class ViewWriter:
    """Writes the views of one prepare worker; the last plain one stays packed for the next."""

    __slots__ = ("_batch_size", "_flags", "_length", "_model", "_record")

    def __init__(self) -> None:
        self._keep("", 0, 1)

    def write(self, view: RoutingView, out: memoryview, at: int, room: int) -> int:
        """Write ``view`` into ``out``, ``room`` bytes from ``at`` on, and return the bytes written.

        Raises ``ViewTooLarge`` and leaves ``out`` as it was if the view does not fit.
        """
        flags = (
            (_STREAM if view.wants_stream else 0)
            | (_LOGPROBS if view.wants_logprobs else 0)
            | (_HAS_STATE if view.has_state else 0)
            | (_CREATES_STATE if view.creates_state else 0)
        )
        if view.is_asked:
            return _encode_whole(view, flags, out[at : at + room])
        if view.model != self._model or flags != self._flags or view.batch_size != self._batch_size:
            self._keep(view.model, flags, view.batch_size)
        length = self._length
        _check_room(length, room)
        out[at : at + length] = self._record
        return length

    def _keep(self, model: str, flags: int, batch_size: int) -> None:
        record = bytearray(HEAD_BYTES + 4 * len(model))  # a character is four bytes at most
        view = _view_of_flags(model, flags, batch_size)
        self._length = _encode_whole(view, flags, memoryview(record))
        self._record = bytes(record[: self._length])
        self._model = model
        self._flags = flags
        self._batch_size = batch_size

    def __repr__(self) -> str:
        return f"ViewWriter(model={self._model!r})"


def _encode_whole(view: RoutingView, flags: int, out: memoryview) -> int:
    model = view.model.encode()
    rank_free, block_keys = view.rank_free, view.block_keys
    names_end = keys_at = HEAD_BYTES + len(model)
    kind = _PLAIN
    pieces = 0
    if rank_free is not None:
        kind = _RANKED
        keys_at += len(rank_free) * 8
        pieces = 1 + len(rank_free) // 2
    elif block_keys or view.key_position or view.text_bytes:
        kind = _KEYED
    length = keys_at + len(block_keys)
    _check_room(length, len(out))
    _HEAD.pack_into(
        out,
        0,
        view.key_position,
        view.text_bytes,
        len(model),
        length - names_end,
        _CHECK,
        kind,
        flags,
        pieces,
        min(view.batch_size, _U32_MAX),
    )
    out[HEAD_BYTES:names_end] = model
    if rank_free:
        struct.pack_into(f"<{len(rank_free)}Q", out, names_end, *rank_free)
    if block_keys:
        out[keys_at:length] = block_keys
    return length


def _check_room(length: int, room: int) -> None:
    if length > room:
        raise ViewTooLarge(f"a view of {length} bytes does not fit {room}")


def encode_refusal(code: str, message: str, out: memoryview) -> int:
    """Write a refusal at the start of ``out`` and return the bytes written; a long message is cut."""
    name = code.encode()
    names_end = HEAD_BYTES + len(name)
    text = message.encode(errors="replace")[: len(out) - names_end]
    length = names_end + len(text)
    _HEAD.pack_into(out, 0, 0, 0, len(name), len(text), _CHECK, _REFUSAL, 0, 0, 0)
    out[HEAD_BYTES:names_end] = name
    out[names_end:length] = text
    return length


def encode_answer(model: str, body: bytes, out: memoryview) -> int:
    """Write the answer ``body``, or how much room it needs, and return the bytes written.

    Raises ``ViewTooLarge`` if not even the model's name fits.
    """
    name = model.encode()
    names_end = HEAD_BYTES + len(name)
    needed = length = names_end + len(body)
    if needed > len(out):
        length = names_end
        if length > len(out):
            raise ViewTooLarge(f"an answer of {needed} bytes does not fit {len(out)}")
    tail = length - names_end
    _HEAD.pack_into(out, 0, 0, needed, len(name), tail, _CHECK, _ANSWER, 0, 0, 0)
    out[HEAD_BYTES:names_end] = name
    if tail:
        out[names_end:length] = body
    return length


# --------------------------------------------------------------------------------- the I/O process reads


class Results:
    """Reads the results in the slab of one I/O process.

    A plain view is shared by all requests of equal facts; none is ever changed.
    """

    __slots__ = ("_known", "_last", "_last_record", "_memory")

    def __init__(self, slab: BodySlab) -> None:
        self._memory = slab.memory
        self._known: dict[bytes, RoutingView] = {}
        self._last_record = b""
        self._last: RoutingView | None = None  # the plain view in this record

    def read(self, offset: int, area: memoryview, length: int) -> RoutingView | Answer | MeshError:
        """Return the result in the first ``length`` bytes of ``area``, which lies at ``offset``.

        Nothing returned points into it. Raises ``CodecFault`` for what is no result.
        """
        if length > _COPIED_BYTES or length < HEAD_BYTES:
            return decode_result(area[:length])
        record: bytes = self._memory[offset : offset + length]
        view = self._last
        if view is not None and record == self._last_record:
            return view
        if record[_KIND_AT] == _KEYED:
            return self._read_keyed(record)
        facts = record[FACTS_AT:]
        view = self._known.get(facts)
        if view is not None:
            self._last = view
            self._last_record = record
            return view
        result = decode_result(memoryview(record))
        if record[_KIND_AT] == _PLAIN and isinstance(result, RoutingView):
            self._keep(facts, result)
        return result

    def _read_keyed(self, record: bytes) -> RoutingView | Answer | MeshError:
        keys: tuple[int, int, int, int] = _KEYS.unpack_from(record, 0)
        key_position, text_bytes, name_bytes, key_bytes = keys
        names_end = HEAD_BYTES + name_bytes
        facts = record[FACTS_AT:names_end]
        known = self._known.get(facts)
        if known is not None and names_end + key_bytes == len(record) and key_bytes % 8 == 0:
            return known.with_keys(key_position, text_bytes, record[names_end:])
        result = decode_result(memoryview(record))
        if isinstance(result, RoutingView):
            self._keep(facts, result)
        return result

    def _keep(self, facts: bytes, view: RoutingView) -> None:
        if len(facts) <= _KEPT_BYTES:
            if len(self._known) >= _KEPT_VIEWS:
                self._known.clear()  # names come from strangers
            self._known[facts] = view

    def __repr__(self) -> str:
        return f"Results({len(self._known)} views known)"


def decode_result(data: memoryview) -> RoutingView | Answer | MeshError:
    """Return the result that ``data``, exactly one record, holds; nothing returned points into ``data``.

    Raises ``CodecFault`` for anything that the encoders above do not write.
    """
    length = len(data)
    if length < HEAD_BYTES:
        raise CodecFault(f"a result of {length} bytes is shorter than its head")
    keys: tuple[int, int, int, int] = _KEYS.unpack_from(data, 0)
    key_position, text_bytes, name_bytes, tail_bytes = keys
    facts: tuple[int, int, int, int, int] = _FACTS.unpack_from(data, FACTS_AT)
    check, kind, flags, pieces, batch_size = facts
    names_end = HEAD_BYTES + name_bytes
    if check != _CHECK or flags > _ALL_FLAGS or names_end + tail_bytes != length:
        raise CodecFault(f"the head of a result of {length} bytes is not one of this layout")
    name = _name(data[HEAD_BYTES:names_end])
    is_plain = not (key_position or text_bytes or tail_bytes or pieces)
    if (kind == _PLAIN and is_plain) or (kind == _KEYED and not pieces) or (kind == _RANKED and pieces):
        keys_at = names_end + (pieces - 1) * _PIECE_BYTES if pieces else names_end
        if keys_at <= length and (length - keys_at) % 8 == 0:
            view = _view_of_flags(name, flags, batch_size)
            view.key_position, view.text_bytes = key_position, text_bytes
            view.block_keys = bytes(data[keys_at:])
            if pieces:
                view.rank_free = struct.unpack_from(f"<{2 * (pieces - 1)}Q", data, names_end)
            return view
    if kind == _REFUSAL and not pieces and name in CODES:
        return MeshError(name, str(data[names_end:], "utf-8", "ignore"))
    if kind == _ANSWER and not pieces and (text_bytes == length or (text_bytes > length and not tail_bytes)):
        return Answer(name, names_end, tail_bytes, text_bytes)
    raise CodecFault(f"a result of kind {kind} is not one of this layout")


def _name(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as fault:
        raise CodecFault("the name in a result is not UTF-8") from fault


def _view_of_flags(model: str, flags: int, batch_size: int) -> RoutingView:
    return RoutingView(
        model,
        flags & _STREAM != 0,
        batch_size,
        flags & _LOGPROBS != 0,
        flags & _HAS_STATE != 0,
        flags & _CREATES_STATE != 0,
    )
