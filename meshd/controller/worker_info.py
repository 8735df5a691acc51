"""Tell of the upstreams: ``GET /workers``, ``/workers/{id}`` and the old ``/list_workers``."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any, Protocol

from meshd.controller.admin import AdminRoute
from meshd.controller.answers import json_answer, worker_error
from meshd.controller.http_server import Request, Response
from meshd.controller.jobs import Job
from meshd.controller.registry_keeper import RegistryKeeper
from meshd.routing.load import LoadTable
from meshd.routing.registry import Upstream
from meshd.routing.upstream import UNKNOWN_MODEL


class KnownConditions(Protocol):
    """What traffic has taught of upstreams: ``Conditions``."""

    def breaker_of(self, number: int) -> str: ...

    def cooldown_s(self, number: int) -> float: ...

    def is_available(self, upstream: Upstream) -> bool: ...


class WorkerInfo:
    """Answers the reading routes. No answer has a key in it: each member is named here.

    What is told is in force at every front door: a change that is not yet published is waited for.
    ``is_probing_disabled``: by the settings, for upstreams that say nothing of it.
    """

    def __init__(
        self,
        keeper: RegistryKeeper,
        loads: LoadTable,
        conditions: KnownConditions,
        is_probing_disabled: bool,
    ) -> None:
        self._keeper = keeper
        self._loads = loads
        self._conditions = conditions
        self._is_probing_disabled = is_probing_disabled

    def routes(self) -> list[AdminRoute]:
        return [
            AdminRoute("GET", "/workers", self._list),
            AdminRoute("GET", "/workers/{id}", self._one),
            AdminRoute("GET", "/list_workers", self._urls),
        ]

    async def _list(self, request: Request, _segment: str) -> Response:
        await self._keeper.publisher.published()
        upstreams = self._keeper.upstreams
        kinds = Counter(upstream.worker_type for upstream in upstreams)
        stats = {f"{kind}_count": kinds[kind] for kind in ("prefill", "decode", "regular")}
        infos = [self._info(upstream) for upstream in upstreams]
        return json_answer(request, {"workers": infos, "total": len(infos), "stats": stats})

    async def _one(self, request: Request, text: str) -> Response:
        await self._keeper.publisher.published()
        found = resolve(self._keeper, request, text)
        if isinstance(found, Response):
            return found
        infos = [self._info(upstream) for upstream in found]
        if len(infos) == 1 and infos[0]["id"] == str(uuid.UUID(text)):
            return json_answer(request, infos[0])
        first = found[0]
        return json_answer(request, {"id": first.origin_id, "url": first.base_url, "ranks": infos})

    async def _urls(self, request: Request, _segment: str) -> Response:
        await self._keeper.publisher.published()
        return json_answer(request, {"urls": [upstream.url for upstream in self._keeper.upstreams]})

    def _info(self, upstream: Upstream) -> dict[str, Any]:
        is_starting = upstream.state == "starting"
        models = [] if is_starting else list(upstream.models)
        job = self._keeper.job(upstream)
        conditions, number = self._conditions, upstream.number
        return {
            "id": upstream.id,
            "url": upstream.url,
            "model_id": models[0] if models else UNKNOWN_MODEL,
            "models": models,
            "priority": upstream.priority,
            "cost": upstream.cost,
            "worker_type": upstream.worker_type,
            "is_healthy": upstream.is_healthy,
            "load": self._loads.load(number),
            "connection_mode": "HTTP",
            "runtime_type": upstream.runtime,
            "bootstrap_port": upstream.bootstrap_port,
            "metadata": dict(upstream.labels),
            "disable_health_check": bool(
                upstream.probing.get("disable_health_check", self._is_probing_disabled)
            ),
            "state": upstream.state,
            "available": conditions.is_available(upstream),
            "breaker": conditions.breaker_of(number),
            "cooldown_secs": round(conditions.cooldown_s(number), 3),
            "dp_rank": upstream.dp_rank,
            "dp_size": upstream.dp_size,
            "job_status": None if job is None else _job_status(job),
        }


def resolve(keeper: RegistryKeeper, request: Request, text: str) -> list[Upstream] | Response:
    """Return the upstream with the id ``text``, or all ranks of the server with it, or the error."""
    try:
        wanted = str(uuid.UUID(text))
    except ValueError:
        return worker_error(request, 400, "BAD_REQUEST", "The id of a worker is a UUID.")
    found = keeper.find(wanted)
    return found or worker_error(request, 404, "WORKER_NOT_FOUND", "There is no worker with this id.")


def _job_status(job: Job) -> dict[str, Any]:
    return {
        "job_type": job.job_type,
        "worker_url": job.worker_url,
        "status": job.status,
        "message": job.message,
        "timestamp": job.timestamp,
    }
