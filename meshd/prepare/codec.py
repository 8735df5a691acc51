"""A job's result as bytes in the view area of its slot: a routing view, a whole answer, or a refusal.

    0        4      5       6      8        12       16        20           24
    ┌────────┬──────┬───────┬──────┬────────┬────────┬─────────┬────────────┐
    │ check  │ kind │ flags │pieces│ length │ name   │ tail    │ batch_size │
    │ u32    │ u8   │ u8    │ u16  │ u32    │ u32    │ u32     │ u32        │
    ├────────┴──────┴───────┴──────┴────────┴────────┴─────────┴────────────┤ 24
    │ prefix_key u64 │ key_position u64 │ text_bytes u64 │ key bytes u64     │
    ├───────────────────────────────────────────────────────────────────────┤ 56
    │ json_parse u64 │ template u64 │ encode u64 │ view u64 │ decode u64  ns  │
    ├───────────────────────────────────────────────────────────────────────┤ 96
    │ name bytes: model, or error code │ tail bytes: ids, answer, or message │
    ├───────────────────────────────────────────────────────────────────────┤
    │ rank-free body: start u64 │ end u64 of each piece that stays           │
    ├───────────────────────────────────────────────────────────────────────┤
    │ block keys: u64 each                                                   │
    └───────────────────────────────────────────────────────────────────────┘

Everything is little-endian. ``length`` is the whole record. ``pieces`` is one more than there are, and 0 for
a view that was not asked for them. Token ids and keys stay packed: an I/O process
hands them on and never walks the ids.
An answer, which can be megabytes, is not copied out; one that does not fit is left out, and its record has
in ``text_bytes`` the length of the view area that it needs.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from meshd.api.answer import Answer
from meshd.api.view import NO_STAGES, RoutingView, StageTimes
from meshd.errors import CODES, MeshError

_CHECK: Final = 0x4D565734  # "MVW4": magic and version of this layout in one word
_VIEW: Final = 1
_REFUSAL: Final = 2
_ANSWER: Final = 3
_STREAM: Final = 1
_LOGPROBS: Final = 2
_HAS_STATE: Final = 4
_CREATES_STATE: Final = 8
_ALL_FLAGS: Final = 15
_U32_MAX: Final = 0xFFFF_FFFF

_HEAD: Final = struct.Struct("<IBBHIIIIQQQQQQQQQ")
HEAD_BYTES: Final = _HEAD.size
_PIECE_BYTES: Final = 16


class ViewTooLarge(Exception):
    """The view does not fit its area; the job answers with a refusal, which always fits."""


class CodecFault(Exception):
    """The bytes are no result of a prepare job: a fault of the shared layout, not of a request."""


class Refusal(NamedTuple):
    """A request that the job refused, and the time it spent on it."""

    error: MeshError
    stage_ns: StageTimes


def encode_view(view: RoutingView, out: memoryview) -> int:
    """Write ``view`` at the start of ``out`` and return the bytes written.

    Raises ``ViewTooLarge`` and leaves ``out`` as it was if the view does not fit.
    """
    model = view.model.encode()
    token_ids = view.token_ids
    rank_free = view.rank_free
    names_end = HEAD_BYTES + len(model)
    ids_end = pieces_end = names_end + len(token_ids)
    if rank_free:
        pieces_end += len(rank_free) * 8
    length = pieces_end + len(view.block_keys)
    if length > len(out):
        raise ViewTooLarge(f"a view of {length} bytes does not fit {len(out)}")
    flags = (
        (_STREAM if view.wants_stream else 0)
        | (_LOGPROBS if view.wants_logprobs else 0)
        | (_HAS_STATE if view.has_state else 0)
        | (_CREATES_STATE if view.creates_state else 0)
    )
    _HEAD.pack_into(
        out,
        0,
        _CHECK,
        _VIEW,
        flags,
        0 if rank_free is None else 1 + len(rank_free) // 2,
        length,
        len(model),
        len(token_ids),
        min(view.batch_size, _U32_MAX),
        view.prefix_key,
        view.key_position,
        view.text_bytes,
        len(view.block_keys),
        *view.stage_ns,
    )
    out[HEAD_BYTES:names_end] = model
    if token_ids:
        out[names_end:ids_end] = token_ids
    if rank_free:
        struct.pack_into(f"<{len(rank_free)}Q", out, ids_end, *rank_free)
    if view.block_keys:
        out[pieces_end:length] = view.block_keys
    return length


def encode_refusal(code: str, message: str, out: memoryview, stages: StageTimes = NO_STAGES) -> int:
    """Write a refusal at the start of ``out`` and return the bytes written; a long message is cut."""
    name = code.encode()
    names_end = HEAD_BYTES + len(name)
    text = message.encode(errors="replace")[: len(out) - names_end]
    length = names_end + len(text)
    _HEAD.pack_into(out, 0, _CHECK, _REFUSAL, 0, 0, length, len(name), len(text), 0, 0, 0, 0, 0, *stages)
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
    _HEAD.pack_into(out, 0, _CHECK, _ANSWER, 0, 0, length, len(name), tail, 0, 0, 0, needed, 0, *stages)
    out[HEAD_BYTES:names_end] = name
    if tail:
        out[names_end:length] = body
    return length


def decode_result(data: memoryview) -> RoutingView | Answer | Refusal:
    """Return the result that ``data``, exactly one record, holds; nothing returned points into ``data``.

    Raises ``CodecFault`` for anything that the encoders above do not write.
    """
    try:
        (
            check,
            kind,
            flags,
            pieces,
            length,
            name_bytes,
            tail_bytes,
            batch_size,
            prefix_key,
            key_position,
            text_bytes,
            key_bytes,
            *stages,
        ) = _HEAD.unpack_from(data)
    except struct.error as error:
        raise CodecFault(f"a result of {len(data)} bytes is shorter than its head") from error
    names_end = HEAD_BYTES + name_bytes
    tail_end = names_end + tail_bytes
    pieces_bytes = (pieces - 1) * _PIECE_BYTES if pieces else 0
    pieces_end = tail_end + pieces_bytes
    if check != _CHECK or length != len(data) or pieces_end + key_bytes != length:
        raise CodecFault(f"the head of a result of {len(data)} bytes is not one of this layout")
    try:
        name = str(data[HEAD_BYTES:names_end], "utf-8")
    except UnicodeDecodeError as fault:
        raise CodecFault("the name in a result is not UTF-8") from fault
    if kind == _VIEW and flags <= _ALL_FLAGS and tail_bytes % 4 == 0 and key_bytes % 8 == 0:
        return RoutingView(
            name,
            flags & _STREAM != 0,
            batch_size,
            flags & _LOGPROBS != 0,
            flags & _HAS_STATE != 0,
            flags & _CREATES_STATE != 0,
            bytes(data[names_end:tail_end]) if tail_bytes else b"",
            prefix_key,
            key_position,
            text_bytes,
            StageTimes._make(stages),
            struct.unpack_from(f"<{2 * (pieces - 1)}Q", data, tail_end) if pieces else None,
            bytes(data[pieces_end:]) if key_bytes else b"",
        )
    if kind == _REFUSAL and not pieces and name in CODES:
        message = str(data[names_end:length], "utf-8", "ignore")
        return Refusal(MeshError(name, message), StageTimes._make(stages))
    if kind == _ANSWER and not pieces and (text_bytes == length or (text_bytes > length and not tail_bytes)):
        return Answer(name, names_end, tail_bytes, text_bytes, StageTimes._make(stages))
    raise CodecFault(f"a result of kind {kind} is not one of this layout")
