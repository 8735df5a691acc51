"""What an upstream tells about itself when it is registered: its models, from ``GET /v1/models``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from meshd.controller.http_client import FetchError, UpstreamClient
from meshd.routing.registry import Upstream
from meshd.routing.upstream import UNKNOWN_MODEL

DISCOVERY_TIMEOUT_S: Final = 5.0
MAX_BODY_BYTES: Final = 1 << 20
MAX_MODELS: Final = 256
MAX_ID_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Discovered:
    """Facts found at an upstream. ``problem``: why there are none, for the log."""

    models: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


async def discover(client: UpstreamClient, upstream: Upstream) -> Discovered:
    """Ask an upstream for its models; every failure is a ``problem``, none is raised."""
    try:
        answer = await client.get(upstream, "/v1/models", DISCOVERY_TIMEOUT_S, MAX_BODY_BYTES)
    except FetchError as exc:
        return Discovered(problem=str(exc))
    if not answer.is_success:
        return Discovered(problem=f"/v1/models answered {answer.status}")
    return read_models(answer.body)


def read_models(body: bytes) -> Discovered:
    """Read a model list: all ids, at most 256, and the ``root`` of the first as label ``model_path``."""
    try:
        listed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return Discovered(problem="/v1/models answered no JSON")
    data = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(data, list):
        return Discovered(problem="/v1/models answered no list of models")
    entries = [entry for entry in data if isinstance(entry, dict) and _is_id(entry.get("id"))][:MAX_MODELS]
    root = entries[0].get("root") if entries else None
    labels = {"model_path": str(root)} if _is_id(root) else {}
    return Discovered(tuple(dict.fromkeys(entry["id"] for entry in entries)), labels)


def settled_labels(discovered: Discovered, configured: Mapping[str, str]) -> dict[str, str]:
    """Join labels; configured ones win."""
    return {**discovered.labels, **configured}


def settled_models(
    discovered: Discovered, configured: tuple[str, ...], labels: Mapping[str, str]
) -> tuple[str, ...]:
    """Choose the models of an upstream, its ``model_id`` first.

    ``model_id`` = configured, else label ``served_model_name``, else the first listed id, else label
    ``model_path``, else ``unknown``.
    """
    named = configured or tuple(filter(None, [labels.get("served_model_name")]))
    models = tuple(dict.fromkeys([*named, *discovered.models]))
    return models or (labels.get("model_path") or UNKNOWN_MODEL,)


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value.encode("utf-8", "replace")) <= MAX_ID_BYTES
