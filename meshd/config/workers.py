"""One upstream as it is described: a ``[[workers]]`` table of the file, or the body of ``POST /workers``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from meshd.config.checks import check_header_value
from meshd.config.declaration import MAX_INTEGER, MAX_NUMBER
from meshd.config.names import unknown
from meshd.config.urls import normalize_url

RUNTIMES: Final = ("sglang", "vllm", "trtllm", "atom")
RUNTIME_ALIASES: Final = (("tensorrt-llm", "trtllm"),)
WORKER_TYPES: Final = ("regular", "prefill", "decode")
PROBING: Final = (
    "health_check_interval_secs",
    "health_check_timeout_secs",
    "health_success_threshold",
    "health_failure_threshold",
    "disable_health_check",
)
"""The members that say how an upstream is probed."""
IGNORED: Final = ("reasoning_parser", "tool_parser", "dp_aware", "max_connection_attempts")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One upstream; None or empty: not given. Then the key and the probing are those of the settings, the
    model is discovered, priority and cost are those of its labels, else 50 and 1.0.
    """

    url: str
    api_key: str = field(default="", repr=False)
    model_id: str = ""
    priority: int | None = None
    cost: float | None = None
    worker_type: str = "regular"
    bootstrap_port: int | None = None
    runtime: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    tokenizer_path: str = ""
    chat_template: str = ""
    health_check_interval_secs: float | None = None
    health_check_timeout_secs: float | None = None
    health_success_threshold: int | None = None
    health_failure_threshold: int | None = None
    disable_health_check: bool | None = None

    @property
    def probing(self) -> dict[str, float]:
        """The members of ``PROBING`` that were given."""
        values = ((name, getattr(self, name)) for name in PROBING)
        return {name: value for name, value in values if value is not None}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, members: Mapping[str, Any]) -> WorkerSpec:
        return cls(**members)


def read_worker(table: object) -> WorkerSpec:
    """Check one description, from TOML or JSON. Raises ``ValueError`` for the first fault in it."""
    if not isinstance(table, dict):
        raise ValueError("must be a table, written [[workers]]")
    members = read_members(table, tuple(each.name for each in fields(WorkerSpec)))
    if "url" not in members:
        raise ValueError("needs a url")
    spec = WorkerSpec(**members)
    if spec.bootstrap_port is not None and spec.worker_type != "prefill":
        raise ValueError("bootstrap_port: only a prefill server has one")
    return spec


def read_members(table: Mapping[Any, object], known: tuple[str, ...]) -> dict[str, Any]:
    """Check each member of ``table`` and return those of ``known``; ignored ones are left out.

    Raises ``ValueError`` for an unknown one, naming the nearest, or for one with a fault.
    """
    members = {str(key).replace("-", "_"): value for key, value in table.items()}
    for name in members:
        if name not in known and name not in IGNORED:
            raise ValueError(unknown("member", name, known, otherwise=f"it is none of {', '.join(known)}"))
    checked = {name: _member(name, value) for name, value in members.items() if name in known}
    timeout, interval = (checked.get(name) for name in PROBING[1::-1])
    if timeout is not None and interval is not None and timeout > interval:
        raise ValueError("health_check_timeout_secs: is above health_check_interval_secs")
    return checked


def _member(name: str, value: object) -> Any:
    try:
        return _MEMBERS[name](value)
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}") from exc


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return value


def _key(value: object) -> str:
    return check_header_value(_text(value))


def _url(value: object) -> str:
    return normalize_url(_text(value))


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > MAX_INTEGER:
        raise ValueError("must be a whole number")
    return value


def _cost(value: object) -> float:
    return _number(value, 0)


def _seconds(value: object) -> float:
    seconds = _number(value, 0)
    if not seconds:
        raise ValueError("must be above 0")
    return seconds


def _number(value: object, least: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= MAX_NUMBER:
        raise ValueError(f"must be a number from {least:g} to {MAX_NUMBER:.0f}")
    return float(value)


def _threshold(value: object) -> int:
    if _integer(value) < 1:
        raise ValueError("must be at least 1")
    return _integer(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _port(value: object) -> int | None:
    if value is not None and not 1 <= _integer(value) <= 65535:
        raise ValueError("must be a number from 1 to 65535")
    return None if value is None else _integer(value)


def _worker_type(value: object) -> str:
    return _one_of(_text(value), WORKER_TYPES)


def _runtime(value: object) -> str:
    return _one_of(dict(RUNTIME_ALIASES).get(_text(value), _text(value)), RUNTIMES)


def _one_of(value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"must be one of {', '.join(choices)}")
    return value


def _labels(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("must be a table of strings")
    return dict(value)


_MEMBERS: Final[Mapping[str, Callable[[object], Any]]] = {
    "url": _url,
    "api_key": _key,
    "model_id": _text,
    "priority": _integer,
    "cost": _cost,
    "worker_type": _worker_type,
    "bootstrap_port": _port,
    "runtime": _runtime,
    "labels": _labels,
    "tokenizer_path": _text,
    "chat_template": _text,
    "health_check_interval_secs": _seconds,
    "health_check_timeout_secs": _seconds,
    "health_success_threshold": _threshold,
    "health_failure_threshold": _threshold,
    "disable_health_check": _flag,
}
