"""What an upstream tells about itself when it is registered: its models, its names and its ranks.

Models come from ``GET /v1/models``; names, paths and ``dp_size`` from ``/server_info`` and ``/model_info``,
or from their older spellings where those are missing. A server that has neither is no fault of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from meshd.controller.http_client import FetchError, UpstreamClient
from meshd.routing.load import MAX_UPSTREAMS
from meshd.routing.registry import Upstream
from meshd.routing.upstream import UNKNOWN_MODEL

DISCOVERY_TIMEOUT_S: Final = 5.0
MAX_BODY_BYTES: Final = 1 << 20
MAX_MODELS: Final = 256
MAX_ID_BYTES: Final = 512
MAX_DP_SIZE: Final = MAX_UPSTREAMS

_LABELS: Final = ("served_model_name", "model_path", "tokenizer_path")
_NOT_FOUND: Final = 404


@dataclass(frozen=True, slots=True)
class Discovered:
    """Facts found at an upstream. ``problem``: why some are missing, for the log.

    ``dp_size``: its number of data-parallel ranks, ``None`` if it did not say.
    """

    models: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    dp_size: int | None = None


async def discover(client: UpstreamClient, upstream: Upstream) -> Discovered:
    """Ask an upstream what it serves; every failure is a ``problem``, none is raised."""
    models, server, model = await asyncio.gather(
        _models(client, upstream),
        _information(client, upstream, "/server_info", "/get_server_info"),
        _information(client, upstream, "/model_info", "/get_model_info"),
    )
    return Discovered(
        models.models,
        {**models.labels, **model.labels, **server.labels},
        "; ".join(found.problem for found in (models, server, model) if found.problem),
        server.dp_size,
    )


async def _models(client: UpstreamClient, upstream: Upstream) -> Discovered:
    try:
        answer = await client.get(upstream, "/v1/models", DISCOVERY_TIMEOUT_S, MAX_BODY_BYTES)
    except FetchError as exc:
        return Discovered(problem=str(exc))
    if not answer.is_success:
        return Discovered(problem=f"/v1/models answered {answer.status}")
    return read_models(answer.body)


async def _information(client: UpstreamClient, upstream: Upstream, *paths: str) -> Discovered:
    """Read the first of ``paths`` that the upstream has."""
    for path in paths:
        try:
            answer = await client.get(upstream, path, DISCOVERY_TIMEOUT_S, MAX_BODY_BYTES)
        except FetchError as exc:
            return Discovered(problem=f"{path}: {exc}")
        if answer.is_success:
            return read_information(path, answer.body)
        if answer.status != _NOT_FOUND:
            return Discovered(problem=f"{path} answered {answer.status}")
    return Discovered()


def read_information(path: str, body: bytes) -> Discovered:
    """Read server or model information: names and paths as labels, and ``dp_size``."""
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        told = None
    if not isinstance(told, dict):
        return Discovered(problem=f"{path} answered no JSON object")
    dp_size = told.get("dp_size")
    is_count = type(dp_size) is int and 0 < dp_size <= MAX_DP_SIZE
    labels = {name: told[name] for name in _LABELS if _is_id(told.get(name))}
    return Discovered(labels=labels, dp_size=dp_size if is_count else None)


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
