"""A job's result as bytes in the view area of its slot: a routing view, a whole answer, or a refusal.

    0            8            16           24           32           40
    ┌────────────┬────────────┬────────────┬────────────┬────────────┐
    │ json_parse │ template   │ encode     │ view       │ decode     │ stage times, ns, u64 each
    ├────────┬──────┬───────┬─┴──────┬─────┴──────┬─────┴──────┬─────┘
    │ check  │ kind │ flags │ pieces │ name       │ batch_size │         40 … 56
    │ u32    │ u8   │ u8    │ u16    │ u32        │ u32        │
    ├────────┴──────┴───────┴────────┴────────────┴────────────┤
    │ name bytes: model                                        │         a *plain* view ends here
    └──────────────────────────────────────────────────────────┘
    any other result, from 56 on
    ┌────────┬───────────┬────────────────┬──────────────────┬────────────────┐
    │ tail   │ key bytes │ prefix_key u64 │ key_position u64 │ text_bytes u64 │     56 … 88
    │ u32    │ u32       │                │                  │                │
    ├────────┴───────────┴────────────────┴──────────────────┴────────────────┤
    │ name bytes: model, or error code │ tail bytes: ids, answer, or message   │
    ├─────────────────────────────────────────────────────────────────────────┤
    │ rank-free body: start u64 │ end u64 of each piece that stays             │
    ├─────────────────────────────────────────────────────────────────────────┤
    │ block keys: u64 each                                                     │
    └─────────────────────────────────────────────────────────────────────────┘

Everything is little-endian. The record has no length: its reader is told one, and all the parts together
must have it. ``pieces`` is one more than there are, and 0 for a view that was not asked for them. Token ids
and keys stay packed: an I/O process hands them on and never walks the ids.

A plain view is one that has nothing after ``batch_size`` but the name. All requests of a client that asks
one model for one thing have the same one, byte for byte from 40 on, so `Results` knows it by its bytes:
decoding one took 16,000 instructions of a compiled build, looking it up takes 1,600. The times, which differ,
stay packed until they are counted.

An answer, which can be megabytes, is not copied out; one that does not fit is left out, and its record has
in ``text_bytes`` the length of the view area that it needs.
"""

from __future__ import annotations

import struct
from typing import Final

from meshd.api.answer import Answer
from meshd.api.view import NO_STAGES, RoutingView, StageTimes
from meshd.errors import CODES, MeshError
from meshd.slab import BodySlab

_CHECK: Final = 0x4D565735  # "MVW5": magic and version of this layout in one word
_PLAIN: Final = 1
_VIEW: Final = 2
_REFUSAL: Final = 3
_ANSWER: Final = 4
_STREAM: Final = 1
_LOGPROBS: Final = 2
_HAS_STATE: Final = 4
_CREATES_STATE: Final = 8
_ALL_FLAGS: Final = 15
_U32_MAX: Final = 0xFFFF_FFFF
_PIECE_BYTES: Final = 16

_TIMES: Final = struct.Struct("<5Q")
_PLAIN_HEAD: Final = struct.Struct("<5QIBBHII")
_HEAD: Final = struct.Struct("<5QIBBHIIIIQQQ")
_FACTS: Final = struct.Struct("<IBBHII")
_REST: Final = struct.Struct("<IIQQQ")
TIMES_BYTES: Final = _TIMES.size
PLAIN_HEAD_BYTES: Final = _PLAIN_HEAD.size
HEAD_BYTES: Final = _HEAD.size

_KEPT_BYTES: Final = 256  # of a view that is kept: the longest names, which strangers choose, are not
_KEPT_VIEWS: Final = 256


class ViewTooLarge(Exception):
    """The view does not fit its area; the job answers with a refusal, which always fits."""


class CodecFault(Exception):
    """The bytes are no result of a prepare job: a fault of the shared layout, not of a request."""


# ------------------------------------------------------------------------------------- the worker writes


def encode_view(view: RoutingView, out: memoryview) -> int:
    """Write ``view`` and its stage times at the start of ``out`` and return the bytes written.

    Raises ``ViewTooLarge`` and leaves ``out`` as it was if the view does not fit.
    """
    model = view.model.encode()
    flags = (
        (_STREAM if view.wants_stream else 0)
        | (_LOGPROBS if view.wants_logprobs else 0)
        | (_HAS_STATE if view.has_state else 0)
        | (_CREATES_STATE if view.creates_state else 0)
    )
    rank_free = view.rank_free
    if rank_free is not None or view.text_bytes or view.prefix_key or view.key_position:
        return _encode_full(view, model, flags, out)
    if view.token_ids or view.block_keys:
        return _encode_full(view, model, flags, out)
    length = PLAIN_HEAD_BYTES + len(model)
    _check_room(length, out)
    json_parse, template, encode, facts, decode = view.stage_ns
    _PLAIN_HEAD.pack_into(
        out,
        0,
        json_parse,
        template,
        encode,
        facts,
        decode,
        _CHECK,
        _PLAIN,
        flags,
        0,
        len(model),
        min(view.batch_size, _U32_MAX),
    )
    out[PLAIN_HEAD_BYTES:length] = model
    return length


def _encode_full(view: RoutingView, model: bytes, flags: int, out: memoryview) -> int:
    token_ids, rank_free, block_keys = view.token_ids, view.rank_free, view.block_keys
    names_end = HEAD_BYTES + len(model)
    ids_end = pieces_end = names_end + len(token_ids)
    if rank_free:
        pieces_end += len(rank_free) * 8
    length = pieces_end + len(block_keys)
    _check_room(length, out)
    _HEAD.pack_into(
        out,
        0,
        *view.stage_ns,
        _CHECK,
        _VIEW,
        flags,
        0 if rank_free is None else 1 + len(rank_free) // 2,
        len(model),
        min(view.batch_size, _U32_MAX),
        len(token_ids),
        len(block_keys),
        view.prefix_key,
        view.key_position,
        view.text_bytes,
    )
    out[HEAD_BYTES:names_end] = model
    if token_ids:
        out[names_end:ids_end] = token_ids
    if rank_free:
        struct.pack_into(f"<{len(rank_free)}Q", out, ids_end, *rank_free)
    if block_keys:
        out[pieces_end:length] = block_keys
    return length


def _check_room(length: int, out: memoryview) -> None:
    if length > len(out):
        raise ViewTooLarge(f"a view of {length} bytes does not fit {len(out)}")


def encode_refusal(code: str, message: str, out: memoryview, stages: StageTimes = NO_STAGES) -> int:
    """Write a refusal at the start of ``out`` and return the bytes written; a long message is cut."""
    name = code.encode()
    names_end = HEAD_BYTES + len(name)
    text = message.encode(errors="replace")[: len(out) - names_end]
    length = names_end + len(text)
    _HEAD.pack_into(out, 0, *stages, _CHECK, _REFUSAL, 0, 0, len(name), 0, len(text), 0, 0, 0, 0)
    out[HEAD_BYTES:names_end] = name
    out[names_end:length] = text
    return length


def encode_answer(model: str, body: bytes, stages: StageTimes, out: memoryview) -> int:
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
    _HEAD.pack_into(out, 0, *stages, _CHECK, _ANSWER, 0, 0, len(name), 0, tail, 0, 0, 0, needed)
    out[HEAD_BYTES:names_end] = name
    if tail:
        out[names_end:length] = body
    return length


# --------------------------------------------------------------------------------- the I/O process reads


class Results:
    """Reads the results in the slab of one I/O process, and keeps the stage times that stand in them.

    The views that it returns are shared by all requests of equal facts, and never changed.
    """

    __slots__ = ("_known", "_memory", "_timed")

    def __init__(self, slab: BodySlab) -> None:
        self._memory = slab.memory
        self._known: dict[bytes, RoutingView] = {}
        self._timed: list[bytes] = []  # records, or the beginnings of long ones

    def read(self, offset: int, area: memoryview, length: int) -> RoutingView | Answer | MeshError:
        """Return the result in the first ``length`` bytes of ``area``, which lies at ``offset``.

        Nothing returned points into it. Raises ``CodecFault`` for what is no result.
        """
        if length > _KEPT_BYTES:
            result = decode_result(area[:length])
            self._timed.append(self._memory[offset : offset + TIMES_BYTES])
            return result
        record: bytes = self._memory[offset : offset + length]
        facts = record[TIMES_BYTES:]
        view = self._known.get(facts)
        if view is not None:
            self._timed.append(record)
            return view
        result = decode_result(area[:length])
        self._timed.append(record)
        if facts[4] == _PLAIN and isinstance(result, RoutingView):
            if len(self._known) >= _KEPT_VIEWS:
                self._known.clear()  # names come from strangers
            self._known[facts] = result
        return result

    def take_seconds(self) -> list[tuple[str, list[float]]]:
        """Return each stage that ran, with the seconds that it took in the jobs read since the last call."""
        timed, self._timed = self._timed, []
        return stage_seconds(timed) if timed else []

    def __repr__(self) -> str:
        return f"Results({len(self._known)} views known)"


def stage_seconds(records: list[bytes]) -> list[tuple[str, list[float]]]:
    """Return each stage that ran, with the seconds that it took in these records."""
    words = memoryview(b"".join([record[:TIMES_BYTES] for record in records])).cast("Q").tolist()
    stages = StageTimes._fields
    columns = [(name, words[place :: len(stages)]) for place, name in enumerate(stages)]
    return [(name, [ns * 1e-9 for ns in column if ns]) for name, column in columns if any(column)]


def decode_result(data: memoryview) -> RoutingView | Answer | MeshError:
    """Return the result that ``data``, exactly one record, holds; nothing returned points into ``data``.

    Raises ``CodecFault`` for anything that the encoders above do not write.
    """
    if len(data) < PLAIN_HEAD_BYTES:
        raise CodecFault(f"a result of {len(data)} bytes is shorter than its head")
    head: tuple[int, int, int, int, int, int] = _FACTS.unpack_from(data, TIMES_BYTES)
    check, kind, flags, pieces, name_bytes, batch_size = head
    if check != _CHECK or flags > _ALL_FLAGS:
        raise CodecFault(f"the head of a result of {len(data)} bytes is not one of this layout")
    if kind != _PLAIN:
        return _decode_full(data, kind, flags, pieces, name_bytes, batch_size)
    if PLAIN_HEAD_BYTES + name_bytes != len(data) or pieces:
        raise CodecFault(f"a plain view of {len(data)} bytes is not one of this layout")
    return _view_of_flags(_name(data[PLAIN_HEAD_BYTES:]), flags, batch_size)


def _decode_full(
    data: memoryview, kind: int, flags: int, pieces: int, name_bytes: int, batch_size: int
) -> RoutingView | Answer | MeshError:
    length = len(data)
    if length < HEAD_BYTES:
        raise CodecFault(f"a result of {length} bytes is shorter than its head")
    rest: tuple[int, int, int, int, int] = _REST.unpack_from(data, PLAIN_HEAD_BYTES)
    tail_bytes, key_bytes, prefix_key, key_position, text_bytes = rest
    names_end = HEAD_BYTES + name_bytes
    tail_end = names_end + tail_bytes
    pieces_end = tail_end + (pieces - 1) * _PIECE_BYTES if pieces else tail_end
    if pieces_end + key_bytes != length:
        raise CodecFault(f"the head of a result of {length} bytes is not one of this layout")
    name = _name(data[HEAD_BYTES:names_end])
    if kind == _VIEW and tail_bytes % 4 == 0 and key_bytes % 8 == 0:
        view = _view_of_flags(name, flags, batch_size)
        view.prefix_key, view.key_position, view.text_bytes = prefix_key, key_position, text_bytes
        if tail_bytes:
            view.token_ids = bytes(data[names_end:tail_end])
        if pieces:
            view.rank_free = struct.unpack_from(f"<{2 * (pieces - 1)}Q", data, tail_end)
        if key_bytes:
            view.block_keys = bytes(data[pieces_end:])
        return view
    if kind == _REFUSAL and not pieces and name in CODES:
        return MeshError(name, str(data[names_end:length], "utf-8", "ignore"))
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
