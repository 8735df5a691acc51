"""What an upstream tells about itself when it is registered: its models, its names and its ranks.

Models come from ``GET /v1/models``; what else is asked depends on the runtime. A server that has none of it
is no fault of its own. Everything taken over is bounded: it goes into the shared registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import orjson

from meshd.api.endpoints import ENDPOINTS
from meshd.config.declaration import MAX_NUMBER
from meshd.controller.http_client import FetchError, UpstreamClient
from meshd.log import Log
from meshd.routing.load import MAX_UPSTREAMS
from meshd.routing.policies.table import NAMES, labelled_policy
from meshd.routing.registry import Upstream
from meshd.routing.upstream import APIS_LABEL, UNKNOWN_MODEL

DISCOVERY_TIMEOUT_S: Final = 5.0
MAX_BODY_BYTES: Final = 1 << 20
MAX_MODELS: Final = 256
MAX_ID_BYTES: Final = 512
MAX_DP_SIZE: Final = MAX_UPSTREAMS

MAX_MODELS_BYTES: Final = 16384
MAX_ENTRIES_BYTES: Final = 8192

_INFORMATION: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "sglang": (("/model_info", "/get_model_info"), ("/server_info", "/get_server_info")),
    "vllm": (),
    "trtllm": (),
    "atom": (("/kv_transfer_info",),),
}
"""By runtime, what else is asked: each a path and its older spellings. The last one's facts win."""
_FIELDS: Final = {"priority": 50, "cost": 1.0}
_LABELS: Final = ("served_model_name", "model_path", "tokenizer_path")
_NOT_FOUND: Final = 404


@dataclass(frozen=True, slots=True)
class Discovered:
    """Facts found at an upstream. ``problem``: why some are missing, for the log.

    ``dp_size``: its number of data-parallel ranks, ``None`` if it did not say. ``entries``: the texts of its
    model list.
    """

    models: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""
    dp_size: int | None = None
    entries: tuple[str, ...] = ()


async def discover(client: UpstreamClient, upstream: Upstream) -> Discovered:
    """Ask an upstream what it serves; every failure is a ``problem``, none is raised."""
    models, *others = await asyncio.gather(
        _models(client, upstream),
        *(_information(client, upstream, *paths) for paths in _INFORMATION[upstream.runtime]),
    )
    labels = [found.labels for found in (models, *others)]
    return Discovered(
        models.models,
        {name: value for found in labels for name, value in found.items()},
        "; ".join(found.problem for found in (models, *others) if found.problem),
        next((found.dp_size for found in reversed(others) if found.dp_size is not None), None),
        models.entries,
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
    entries: dict[str, dict[str, Any]] = {}
    for entry in data:
        if isinstance(entry, dict) and _is_id(entry.get("id")):
            entries.setdefault(entry["id"], entry)
    ids = _within(list(entries), MAX_MODELS_BYTES)[:MAX_MODELS]
    root = entries[ids[0]].get("root") if ids else None
    labels = {"model_path": str(root)} if _is_id(root) else {}
    texts = _within([text for name in ids if (text := _text_of(entries[name]))], MAX_ENTRIES_BYTES)
    return Discovered(tuple(ids), labels, entries=tuple(texts))


def _text_of(entry: dict[str, Any]) -> str:
    try:
        return orjson.dumps(entry).decode()
    except orjson.JSONEncodeError:  # nested too deep; it is shown with its id alone
        return ""


def _within(texts: list[str], most_bytes: int) -> list[str]:
    """Return the first of ``texts`` that have ``most_bytes`` together."""
    sizes = accumulate(len(text.encode("utf-8", "replace")) for text in texts)
    return [text for text, size in zip(texts, sizes, strict=True) if size <= most_bytes]


def filled_fields(labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields ``priority`` and ``cost`` as labels of these names say, else their defaults."""
    return {name: _number_of(labels.get(name, ""), default) for name, default in _FIELDS.items()}


def _number_of(text: str, default: float) -> float:
    try:
        number = type(default)(text)
    except ValueError:
        return default
    return number if abs(number) <= MAX_NUMBER else default


def unknown_apis(labels: Mapping[str, str], passthrough_paths: Iterable[str]) -> list[str]:
    """Return the paths of label ``mesh.apis`` at which meshd serves nothing."""
    known = {endpoint.capability for endpoint in ENDPOINTS}
    paths = [path.strip() for path in labels.get(APIS_LABEL, "").split(",")]
    return [
        path
        for path in paths
        if path
        and path not in known
        and not any(path == p or (p.endswith("*") and path.startswith(p[:-1])) for p in passthrough_paths)
    ]


def unknown_policy(labels: Mapping[str, str]) -> str:
    """Return what label ``policy`` names if there is no such policy; the label is then not heeded."""
    name = labelled_policy(labels)
    return "" if name in NAMES else name


def warn_of_labels(log: Log, url: str, labels: Mapping[str, str], passthrough_paths: Iterable[str]) -> None:
    """Tell the operator of what labels ask for and do not get."""
    unknown = unknown_apis(labels, passthrough_paths)
    if unknown:
        log.warning("unknown_apis", upstream=url, apis=", ".join(unknown))
    policy = unknown_policy(labels)
    if policy:
        log.warning("unknown_policy", upstream=url, policy=policy)


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
