"""One line of the log: key=value or JSON, on one line whatever a client wrote, and never too long."""

from __future__ import annotations

import json
import re
import select
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

MAX_LINE_BYTES: Final = select.PIPE_BUF  # 4096 on Linux
_MAX_PATH_BYTES: Final = 256
_MAX_MODEL_BYTES: Final = 128
# Lengths to which texts are cut, in turn, when a line is longer than a pipe takes at once.
_CUTS: Final = (1500, 400, 100, 20)
_PLAIN: Final = re.compile(r"[^\s=\"\\]+")  # text that needs no quotes as a value

Fields = Mapping[str, Any]
Encode = Callable[[Fields], bytes]


class Timestamp:
    """RFC 3339 in UTC with milliseconds; the part to the second is made once a second."""

    __slots__ = ("_prefix", "_second")

    def __init__(self) -> None:
        self._second = -1
        self._prefix = ""

    def text(self, at_ns: int) -> str:
        milliseconds = at_ns // 1_000_000
        second = milliseconds // 1000
        if second != self._second:
            self._second = second
            self._prefix = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._prefix}.{milliseconds % 1000:03d}Z"


def tidy(fields: Fields) -> dict[str, Any]:
    """Leave out what has no value; cut what a client may choose freely."""
    kept = {name: value for name, value in fields.items() if value is not None and value != ""}
    path = kept.get("path")
    if path:
        kept["path"] = _cut(path.partition("?")[0], _MAX_PATH_BYTES)
    model = kept.get("model")
    if model:
        kept["model"] = _cut(model, _MAX_MODEL_BYTES)
    return kept


def _cut(text: str, max_bytes: int) -> str:
    if len(text) * 4 <= max_bytes:  # at most four bytes a character
        return text
    return text.encode("utf-8", "surrogatepass")[:max_bytes].decode("utf-8", "ignore")


def fit(fields: Fields, encode: Encode) -> bytes:
    """Encode a line that is not longer than MAX_LINE_BYTES, by cutting its texts if need be."""
    line = encode(fields)
    for length in _CUTS:
        if len(line) <= MAX_LINE_BYTES:
            return line
        fields = {name: _shortened(value, length) for name, value in fields.items()}
        line = encode(fields)
    if len(line) > MAX_LINE_BYTES:  # hundreds of fields: nobody's line
        line = encode({name: fields[name] for name in ("ts", "level", "event")})
    return line


def _shortened(value: Any, length: int) -> Any:
    if isinstance(value, str | list | tuple | dict):
        text = value if isinstance(value, str) else str(value)
        return text if len(text) <= length else text[: length - 1] + "…"
    return value


def encode_text(fields: Fields) -> bytes:
    return (" ".join([f"{name}={_text_value(value)}" for name, value in fields.items()]) + "\n").encode()


def _text_value(value: Any) -> str:
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"{value:.3f}"
    text = value if isinstance(value, str) else str(value)
    if text.isprintable():
        return text if _PLAIN.fullmatch(text) else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return _escaped(text)


def encode_json(fields: Fields) -> bytes:
    rounded = {name: round(item, 3) if isinstance(item, float) else item for name, item in fields.items()}
    try:
        text = orjson.dumps(rounded, default=str).decode()
    except orjson.JSONEncodeError:  # lone surrogates, and numbers beyond 64 bits
        return (_escaped(rounded) + "\n").encode()
    # orjson escapes only what JSON demands; DEL, C1 and line separators can still upset a terminal.
    return ((text if text.isprintable() else _escaped(rounded)) + "\n").encode()


def _escaped(value: Any) -> str:
    return json.dumps(value, default=str, separators=(",", ":")).replace("\x7f", "\\u007f")
