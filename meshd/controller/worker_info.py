"""Tell of the upstreams: ``GET /workers``, ``/workers/{id}`` and the old ``/list_workers`` (admin.md §3)."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any, Final

from meshd.controller.admin import AdminRoute
from meshd.controller.answers import json_answer, worker_error
from meshd.controller.http_server import Request, Response
from meshd.controller.jobs import Job
from meshd.controller.registry_keeper import RegistryKeeper
from meshd.routing.load import LoadTable
from meshd.routing.registry import Upstream
from meshd.routing.upstream import UNKNOWN_MODEL, is_available

_RUNTIME: Final = "sglang"  # what every upstream is taken for


class WorkerInfo:
    """Answers the reading routes. No answer has a key in it: each member is named here."""

    def __init__(self, keeper: RegistryKeeper, loads: LoadTable, is_probing_disabled: bool) -> None:
        self._keeper = keeper
        self._loads = loads
        self._is_probing_disabled = is_probing_disabled

    def routes(self) -> list[AdminRoute]:
        return [
            AdminRoute("GET", "/workers", self._list),
            AdminRoute("GET", "/workers/{id}", self._one),
        ]

    async def _list(self, request: Request, _segment: str) -> Response:
        upstreams = self._keeper.upstreams
        kinds = Counter(upstream.worker_type for upstream in upstreams)
        stats = {f"{kind}_count": kinds[kind] for kind in ("prefill", "decode", "regular")}
        infos = [self._info(upstream) for upstream in upstreams]
        return json_answer(request, {"workers": infos, "total": len(infos), "stats": stats})

    async def _one(self, request: Request, text: str) -> Response:
        try:
            wanted = str(uuid.UUID(text))
        except ValueError:
            return worker_error(request, 400, "BAD_REQUEST", "The id of a worker is a UUID.")
        upstreams = self._keeper.upstreams
        for upstream in upstreams:
            if upstream.id == wanted:
                return json_answer(request, self._info(upstream))
        ranks = [upstream for upstream in upstreams if upstream.origin_id == wanted]
        if ranks:
            infos = [self._info(rank) for rank in ranks]
            return json_answer(request, {"id": wanted, "url": ranks[0].base_url, "ranks": infos})
        return worker_error(request, 404, "WORKER_NOT_FOUND", "There is no worker with this id.")

    def _info(self, upstream: Upstream) -> dict[str, Any]:
        is_starting = upstream.state == "starting"
        models = [] if is_starting else list(upstream.models)
        job = self._keeper.job(upstream)
        return {
            "id": upstream.id,
            "url": upstream.url,
            "model_id": models[0] if models else UNKNOWN_MODEL,
            "models": models,
            "priority": upstream.priority,
            "cost": upstream.cost,
            "worker_type": upstream.worker_type,
            "is_healthy": upstream.is_healthy,
            "load": self._loads.load(upstream.number),
            "connection_mode": "HTTP",
            "runtime_type": _RUNTIME,
            "bootstrap_port": None,
            "metadata": dict(upstream.labels),
            "disable_health_check": self._is_probing_disabled,
            "state": upstream.state,
            "available": is_available(upstream),
            "breaker": "closed",
            "cooldown_secs": 0.0,
            "dp_rank": upstream.dp_rank,
            "dp_size": upstream.dp_size,
            "job_status": None if job is None else _job_status(job),
        }


def _job_status(job: Job) -> dict[str, Any]:
    return {
        "job_type": "register",
        "worker_url": job.worker_url,
        "status": job.status,
        "message": job.message,
        "timestamp": job.timestamp,
    }
