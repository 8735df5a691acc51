"""The ``[[workers]]`` tables of the file: upstreams with a key, a model name or labels of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from meshd.config.checks import check_header_value
from meshd.config.declaration import MAX_INTEGER, MAX_NUMBER
from meshd.config.names import unknown
from meshd.config.urls import normalize_url


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One upstream. No ``api_key``: that of the settings; no ``model_id``: discovered."""

    url: str
    api_key: str = field(default="", repr=False)
    model_id: str = ""
    priority: int = 50
    cost: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, members: Mapping[str, Any]) -> WorkerSpec:
        return cls(**members)


def read_worker(table: object) -> WorkerSpec:
    """Check one table of the file. Raises ``ValueError`` for the first fault in it."""
    if not isinstance(table, dict):
        raise ValueError("must be a table, written [[workers]]")
    members = {str(key).replace("-", "_"): value for key, value in table.items()}
    known = [each.name for each in fields(WorkerSpec)]
    for name in members:
        if name not in known:
            raise ValueError(unknown("member", name, known))
    if "url" not in members:
        raise ValueError("needs a url")
    return WorkerSpec(**{name: _member(name, value) for name, value in members.items()})


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
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"must be a number from 0 to {MAX_NUMBER:.0f}")
    return float(value)


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
    "labels": _labels,
}
