"""Requests whose only right answer is known to the byte, and the verdict on what came back.

The bundled upstream is deterministic and makes the id of an answer from the SHA-256 of the request's body, so
the expected bytes of an answer tell apart a response that was mixed up, altered, cut short or made for a body
that arrived damaged. Whatever comes of a request, what was received must be the beginning of that answer.
"""

from __future__ import annotations

import json
import random
import uuid
from dataclasses import dataclass, field
from typing import Any, Final

from meshd.backend.reply import Reply
from meshd.backend.service import Options, Service
from meshd.backend.state import Request

MODEL: Final = "m1"
PATHS: Final = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "generate": "/generate",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
BROKEN: Final = "broken"  # a body that is no JSON
WORDS: Final = ("amber", "brook", "cedar", "delta", "ember", "fjord", "grove", "heath", "isle", "jetty")
UPSTREAM_FAULTS: Final = (
    "status=500", "status=503,times=1", "status=429,retry-after=1,times=1", "status=502,times=2",
    "status=400", "reset,times=1", "close,times=2", "reset", "cut=300", "reset-at=200", "cut=40", "stall=250",
    "error-event=3", "no-done", "split=1", "split=7", "token-delay-ms=15", "delay-head-ms=200",
    "malformed-head,times=1", "delay-head-ms=4000,times=1",
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One request. ``answer``: every byte of the body of the only right answer; empty: it must be refused."""

    id: str
    api: str
    body: bytes = field(repr=False)
    is_stream: bool
    answer: bytes = field(repr=False)
    is_stateful: bool = False
    fault: str = ""

    @property
    def path(self) -> str:
        return PATHS.get(self.api, PATHS["chat"])

    @property
    def key(self) -> str:
        return key_of(self.id)


def key_of(name: str) -> str:
    """Return the credential of the client of one request."""
    return f"key-of-{name}"


class Asks:
    """Makes requests out of ``rng``; ids cannot be guessed, so they are not part of the replay."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._service = Service(Options(models=(MODEL,)))

    def make(self, *, is_calm: bool = False) -> Ask:
        """``is_calm``: nothing that asks for a failure or for much work."""
        rng = self._rng
        name = uuid.uuid4().hex
        api = rng.choice(tuple(PATHS))
        is_stream = rng.random() < 0.5
        members = self._members(api, name, 0 if is_calm else self._padding())
        if is_stream:
            members["stream"] = True
        is_stateful = api == "responses" and rng.random() < 0.5
        if api == "responses" and not is_stateful:
            members["store"] = False
        is_long = not is_calm and rng.random() < 0.04
        if is_long:
            self._lengthen(api, members)
        body = json.dumps(members).encode()
        if not is_calm and rng.random() < 0.02:
            return Ask(name, BROKEN, body[:-1], False, b"")
        fault = rng.choice(UPSTREAM_FAULTS) if not is_calm and not is_long and rng.random() < 0.12 else ""
        answer = render(reply_to(self._service, PATHS[api], body))
        return Ask(name, api, body, is_stream, answer, is_stateful, fault)

    def _padding(self) -> int:
        return self._rng.choice((0,) * 28 + (2_000,) * 8 + (40_000,) * 3 + (300_000,))

    def _members(self, api: str, name: str, padding: int) -> dict[str, Any]:
        rng = self._rng
        prompt = " ".join((name, *rng.choices(WORDS, k=rng.randint(1, 12))))
        padded = " ".join((prompt, *rng.choices(WORDS, k=padding // 6)))
        message = {"role": "user", "content": padded}
        match api:
            case "chat":
                return {"model": MODEL, "messages": [{"role": "system", "content": prompt}, message]}
            case "messages":
                return {"model": MODEL, "max_tokens": 200, "messages": [message]}
            case "completions":
                return {"model": MODEL, "prompt": padded}
            case "responses":
                return {"model": MODEL, "input": padded}
        return {"model": MODEL, "text": padded}

    def _lengthen(self, api: str, members: dict[str, Any]) -> None:
        """Ask for an answer that fills more than one buffer."""
        if api == "generate":  # its stream repeats the text with every word
            members["sampling_params"] = {"max_new_tokens": 400, "ignore_eos": True}
        else:
            name = "max_output_tokens" if api == "responses" else "max_tokens"
            members |= {name: self._rng.choice((500, 3_000)), "ignore_eos": True}


def reply_to(service: Service, path: str, body: bytes) -> Reply:
    exchange = service.begin(Request("POST", path, (), body, 0))
    service.end(exchange, is_aborted=False)
    return exchange.reply


def render(reply: Reply) -> bytes:
    """Return the bytes of a reply's body without its framing."""
    if reply.events is None:
        return reply.body
    return b"".join(event.render() for event in reply.events)


class WrongAnswer(Exception):
    """What a client must never see."""


def judge_whole(ask: Ask, status: int, body: bytes) -> str:
    """Say what a response is that ended as its framing said: `complete`, `refused` or `told`.

    `told`: a stream with an error event at its end. Raises ``WrongAnswer``.
    """
    if status >= 400:
        return judge_error(ask, status, body)
    if status != 200 or not ask.answer:
        raise WrongAnswer(f"status {status}: {body[:200]!r}")
    if body == ask.answer:
        return "complete"
    if ask.api == "generate" and ask.is_stream and ask.answer == body + b"data: [DONE]\n\n":
        return "complete"  # this API knows no rule of its end
    if ask.is_stream:
        same = _common(body, ask.answer)
        start = same.rfind(b"\n\n") + 2 if b"\n\n" in same else 0
        check_error_event(body[start:])
        return "told"
    raise WrongAnswer(f"silently altered or cut: {len(body)} of {len(ask.answer)} bytes, {body[-200:]!r}")


def judge_error(ask: Ask, status: int, body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError) as fault:
        raise WrongAnswer(f"status {status} without a JSON error: {body[:200]!r}") from fault
    if not isinstance(error, dict) or "message" not in error or b"127.0.0.1" in body:
        raise WrongAnswer(f"status {status}: {body[:200]!r}")
    if 400 <= status < 500 and status not in (408, 429) and ask.answer and "status=400" not in ask.fault:
        raise WrongAnswer(f"a good request was refused with {status}: {body[:200]!r}")
    return "refused"


def check_error_event(tail: bytes) -> None:
    """Check that the tail of a stream is one error event."""
    lines = tail.split(b"\n")
    data = [line[6:] for line in lines if line.startswith(b"data: ")]
    if not tail.endswith(b"\n\n") or len(data) != 1:
        raise WrongAnswer(f"a stream ended silently: {tail[-300:]!r}")
    event = json.loads(data[0])
    if "error" not in event and event.get("type") != "error":
        raise WrongAnswer(f"a stream ended without its end or an error: {tail[-300:]!r}")


def judge_part(ask: Ask, status: int, body: bytes) -> None:
    """Check what came of a response that was cut. Raises ``WrongAnswer``."""
    if status == 200 and not ask.answer.startswith(body):
        same = len(_common(body, ask.answer))
        raise WrongAnswer(f"a cut answer is not the beginning of the right one: {body[same - 50 :][:200]!r}")


def _common(left: bytes, right: bytes) -> bytes:
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return left[:low]
