"""Watch a server-sent-event stream as its bytes pass. Pure.

`SseRelay.feed(data)` returns the bytes that may go to the client now: complete events, unchanged. The
bytes of an incomplete event are held, so that an upstream that breaks never leaves half an event in the
client's parser; past 64 KiB they flow through unheld, and ``has_sent_partial`` says so.

Observation sees whole events only, so it cannot depend on how the bytes were cut. Most events are not
parsed: before the first token every event is, afterwards only blocks that contain a marker of interest
(`usage`, `error`, a terminal event). JSON with these names written as escapes is not counted, only
relayed. An event over 1 MiB switches observation off.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from meshd.io.usage import Usage

MAX_HELD_BYTES: Final = 65536
MAX_EVENT_BYTES: Final = 1 << 20

# What makes an event worth a look. Plain substrings: six searches of 160 bytes cost 0.3 µs, one regular
# expression with the same alternatives 2.7 µs. Sought with `find`: `in` first tries the mark as a number, and
# makes and drops an exception, 600 instructions.
_USAGE: Final = b'"usage"'
_NO_USAGE: Final = (b":null", b": null")  # what all events but one say of it with `include_usage`
_COMMON_MARKS: Final = (b'"error"', b'"meta_info"')
_MARKS: Final = {
    "openai": (*_COMMON_MARKS, b"[DONE]"),
    "messages": (*_COMMON_MARKS, b"message_stop"),
    "responses": (*_COMMON_MARKS, b"response.completed", b"response.failed", b"response.incomplete"),
}
_BACKSLASH: Final = 0x5C
_SEQUENCE: Final = re.compile(rb'"sequence_number"\s*:\s*(\d{1,18})')


class SseRelay:
    """One SSE response of one endpoint: what to relay now, and what was seen.

    ``api``: `openai` (chat, completions, generate), `messages`, `responses`, or empty for a stream that
    is relayed but has no end of its own.
    """

    __slots__ = (
        "_api",
        "_at_terminal",
        "_carry",
        "_held",
        "_last_number",
        "_marks",
        "_passed",
        "has_ended",
        "has_error_event",
        "has_first_token",
        "has_sent_partial",
        "is_observing",
        "is_success",
        "usage",
    )

    def __init__(self, api: str) -> None:
        self._api = api
        self._marks = _MARKS.get(api, _COMMON_MARKS)
        self._held = b""  # not sent yet: the beginning of an incomplete event
        self._carry = b""  # sent already, but needed to observe the event it began
        self.is_observing = bool(api)
        self.has_sent_partial = False
        self.has_first_token = False
        self.has_ended = False  # the API's own end of stream was seen
        self.is_success = False
        self.has_error_event = False
        self._last_number = -1
        self._passed = b""  # the last block that was not looked into
        self.usage = Usage()

    def __repr__(self) -> str:
        return (
            f"SseRelay({self._api or '-'} held={len(self._held)} ended={self.has_ended} "
            f"success={self.is_success} {self.usage!r})"
        )

    @property
    def last_sequence_number(self) -> int:
        """The last ``sequence_number`` of a Responses stream, -1 before the first."""
        if self._passed:
            self._note_sequence(self._passed)
        return self._last_number

    def _note_sequence(self, block: bytes) -> None:
        self._passed = b""
        numbers = _SEQUENCE.findall(block)
        if numbers:
            self._last_number = int(numbers[-1])

    def may_pass(self, data: bytes) -> bool:
        """Whether whole events may pass unseen: nothing is held, and nothing in ``data`` is of interest.

        ``data`` may still have its chunk framing, if every chunk holds whole events.
        """
        if self._held or self.has_sent_partial:
            return False
        if not self.is_observing:
            return True
        if self.has_ended or not self.has_first_token:
            return False
        return not self._is_marked(data)

    def _is_marked(self, block: bytes) -> bool:
        if _has_usage(block):
            return True
        for mark in self._marks:  # noqa: SIM110 (`any` would make a generator for each event)
            if block.find(mark) >= 0:
                return True
        return False

    def passed(self, data: bytes) -> None:
        """Note that ``data`` was relayed unseen."""
        if self._api == "responses":
            self._passed = data

    def feed(self, data: bytes) -> bytes:
        """Return what may be relayed now; bytes of an incomplete event stay here."""
        pending = self._held + data if self._held else data
        end = _last_boundary(pending)
        if end < 0:
            return self._hold(pending)
        block, self._held = (pending, b"") if end == len(pending) else (pending[:end], pending[end:])
        if self.is_observing and not self.has_ended:
            self._observe(self._carry + block if self._carry else block)
        self._carry = b""
        self.has_sent_partial = False
        if len(self._held) > MAX_HELD_BYTES:
            block += self._hold(self._held)
        return block

    def _hold(self, pending: bytes) -> bytes:
        if not self.has_sent_partial and len(pending) <= MAX_HELD_BYTES:
            self._held = pending
            return b""
        # Too long to hold: it flows. A boundary may straddle pieces, so the last 3 bytes stay behind.
        self.has_sent_partial = True
        keep = pending[-3:]
        flow = pending[:-3]
        self._held = keep
        if self.is_observing:
            self._carry += flow
            if len(self._carry) > MAX_EVENT_BYTES:
                self.is_observing = False
                self._carry = b""
        return flow

    def finish(self) -> bytes:
        """Return the bytes still held at a clean end of the body; they are the client's too."""
        rest, self._held = self._held, b""
        if rest and self.is_observing and not self.has_ended:
            self._observe(self._carry + rest)
        return rest

    def _observe(self, block: bytes) -> None:
        needs_parse = not self.has_first_token or self._is_marked(block)
        if self._api == "responses":
            if self._passed:
                self._note_sequence(self._passed)
            self._note_sequence(block)
        if not needs_parse:
            return
        for event in split_events(block):
            if self.has_ended:
                return
            self._observe_event(event)

    def _observe_event(self, data: bytes) -> None:
        if not data:
            return
        if data == b"[DONE]":
            if self._api == "openai":
                self.has_ended = self.is_success = True
            return
        try:
            payload = orjson.loads(data)
        except orjson.JSONDecodeError:
            return
        if not isinstance(payload, dict):
            return
        self.usage.merge_payload(payload, self._api == "messages")
        if not self.has_first_token and carries_output(self._api, payload):
            self.has_first_token = True
        self._note_end(payload)

    def _note_end(self, payload: dict[str, Any]) -> None:
        kind = payload.get("type")
        if self._api == "openai":
            if payload.get("error") is not None:
                self.has_ended = self.has_error_event = True
        elif kind == "error":
            self.has_ended = self.has_error_event = True
        elif (self._api == "messages" and kind == "message_stop") or (
            self._api == "responses" and kind in ("response.completed", "response.incomplete")
        ):
            self.has_ended = self.is_success = True
        elif self._api == "responses" and kind == "response.failed":
            self.has_ended = self.has_error_event = True


def _has_usage(block: bytes) -> bool:
    """Whether a member `usage` of ``block`` has a value that is worth a look."""
    at = block.find(_USAGE)
    while at >= 0:
        at += len(_USAGE)
        if not block.startswith(_NO_USAGE, at):
            return True
        at = block.find(_USAGE, at)
    return False


def _last_boundary(data: bytes) -> int:
    """Return the offset just past the last blank line of ``data``, or -1."""
    plain = data.rfind(b"\n\n")
    crlf = data.rfind(b"\n\r\n")
    return max(plain + 2 if plain >= 0 else -1, crlf + 3 if crlf >= 0 else -1)


def split_events(block: bytes) -> list[bytes]:
    """Return the joined data of each event in ``block`` (whole events; LF or CRLF)."""
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
    events = []
    for event in block.split(b"\n\n"):
        lines = []
        for line in event.split(b"\n"):
            if line.startswith(b"data:"):
                lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line == b"data":
                lines.append(b"")
        if lines:
            events.append(lines[0] if len(lines) == 1 else b"\n".join(lines))
    return events


def carries_output(api: str, payload: dict[str, Any]) -> bool:
    """Say whether an event carries output of the model (the first one stops the TTFT clock)."""
    if api == "messages":
        return _messages_output(payload)
    if api == "responses":
        return _responses_output(payload)
    return _openai_output(payload)


_DELTA_TEXTS: Final = ("content", "reasoning_content", "reasoning", "refusal")


def _openai_output(payload: dict[str, Any]) -> bool:
    if payload.get("text") or payload.get("output_ids"):
        return True
    choices = payload.get("choices")
    if not isinstance(choices, list):
        return False
    for choice in choices:
        if not isinstance(choice, dict):
            continue
        if choice.get("text"):
            return True
        delta = choice.get("delta")
        if not isinstance(delta, dict):
            continue
        if any(delta.get(name) for name in _DELTA_TEXTS):
            return True
        calls = delta.get("tool_calls")
        functions = (
            [c.get("function") for c in calls if isinstance(c, dict)] if isinstance(calls, list) else []
        )
        functions.append(delta.get("function_call"))
        if any(isinstance(f, dict) and (f.get("name") or f.get("arguments")) for f in functions):
            return True
    return False


def _messages_output(payload: dict[str, Any]) -> bool:
    kind = payload.get("type")
    if kind == "content_block_delta":
        delta = payload.get("delta")
        return isinstance(delta, dict) and any(delta.get(n) for n in ("text", "thinking", "partial_json"))
    if kind == "content_block_start":
        block = payload.get("content_block")
        return isinstance(block, dict) and (
            block.get("type") == "tool_use" or bool(block.get("text") or block.get("thinking"))
        )
    return False


_RESPONSES_OUTPUT: Final = frozenset(
    (
        "response.output_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_summary_text.delta",
        "response.function_call_arguments.delta",
        "response.refusal.delta",
    )
)


def _responses_output(payload: dict[str, Any]) -> bool:
    kind = payload.get("type")
    if kind == "response.output_item.added":
        item = payload.get("item")
        return isinstance(item, dict) and item.get("type") == "function_call"
    return kind in _RESPONSES_OUTPUT
