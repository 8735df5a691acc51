"""Fault specifications: text such as ``status=503,retry-after=2,times=1``, and what they do to a reply.

Two kinds of item. Those that change *what* is answered act here, on the reply (``shape``). Those that
change *how* it is sent (delays, cuts, pieces) are only carried here; ``sending`` acts on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from meshd.backend.reply import (
    DONE,
    Dialect,
    Event,
    Reply,
    RequestError,
    error_event,
    error_reply,
)

FLAGS: Final = ("close", "reset", "no-done", "no-usage", "malformed-head", "bad-json")
NUMBERS: Final = {
    "status": (200, 599),
    "delay-head-ms": (0, 10**9),
    "token-delay-ms": (0, 10**9),
    "cut": (0, 2**63),
    "reset-at": (0, 2**63),
    "stall": (0, 2**63),
    "error-event": (0, 2**63),
    "split": (1, 2**31),
    "times": (0, 2**63),
}

NAMES: Final = ("retry-after", *NUMBERS, *FLAGS)

_RETRY_AFTER = re.compile(r"[\x21-\x7e]+")
_BODILESS = (204, 304)


@dataclass(frozen=True, slots=True)
class Faults:
    """The items of one specification; ``None`` and false mean that the item is absent."""

    status: int | None = None
    retry_after: str | None = None
    delay_head_ms: int = 0
    token_delay_ms: int | None = None
    close: bool = False
    reset: bool = False
    cut: int | None = None
    reset_at: int | None = None
    stall: int | None = None
    error_event: int | None = None
    no_done: bool = False
    no_usage: bool = False
    split: int | None = None
    malformed_head: bool = False
    bad_json: bool = False
    times: int | None = None


NO_FAULTS: Final = Faults()


def parse_faults(spec: str) -> Faults:
    """Read ``spec``, empty for no fault; raises ``ValueError`` that names the item that is wrong."""
    found: dict[str, int | str | bool] = {}
    for item in filter(None, map(str.strip, spec.split(","))):
        name, has_value, value = item.partition("=")
        found[name.replace("-", "_")] = _value(name, value if has_value else None)
    return replace(NO_FAULTS, **found)  # type: ignore[arg-type]  # names and kinds were checked above


def _value(name: str, value: str | None) -> int | str | bool:
    if name in FLAGS:
        if value is not None:
            raise ValueError(f"fault '{name}' takes no value")
        return True
    if name == "retry-after":
        if value is None or not _RETRY_AFTER.fullmatch(value):
            raise ValueError("fault 'retry-after' needs a value")
        return value
    if name not in NUMBERS:
        raise ValueError(f"unknown fault '{name}'; there are {', '.join(NAMES)}")
    low, high = NUMBERS[name]
    if value is None or not value.isascii() or not value.isdigit() or not low <= int(value) <= high:
        raise ValueError(f"fault '{name}' needs an integer from {low} to {high}")
    return int(value)


class StandingFaults:
    """The faults in force for all requests; ``times`` counts requests since they were set."""

    def __init__(self, faults: Faults = NO_FAULTS) -> None:
        self.set(faults)

    def set(self, faults: Faults) -> None:
        self._faults = faults
        self._left = faults.times

    def take(self) -> Faults:
        """Return the faults of the next request."""
        if self._left is None:
            return self._faults
        if self._left == 0:
            return NO_FAULTS
        self._left -= 1
        return self._faults


def status_reply(faults: Faults, dialect: Dialect) -> Reply | None:
    """Return the JSON error that ``status`` asks for."""
    if faults.status is None:
        return None
    error = RequestError(faults.status, "backend_fault", "The backend answers this status on request.")
    reply = error_reply(error, dialect)
    return replace(reply, body=b"") if faults.status in _BODILESS else reply


def shape(reply: Reply, faults: Faults, dialect: Dialect) -> Reply:
    """Apply what changes the content of ``reply``."""
    if faults.retry_after is not None:
        reply = replace(reply, headers=(*reply.headers, (b"retry-after", faults.retry_after.encode())))
    if reply.events is not None:
        return replace(reply, events=_shape_events(reply.events, faults, dialect))
    return replace(reply, body=reply.body[:-1]) if faults.bad_json else reply


def _shape_events(events: Iterator[Event], faults: Faults, dialect: Dialect) -> Iterator[Event]:
    for number, event in enumerate(events):
        if number == faults.error_event:
            yield error_event(dialect, number)
            return
        if faults.no_done and event.is_terminal:
            continue
        if faults.bad_json and event.data != DONE:
            event = event._replace(data=event.data[:-1])
        yield event
