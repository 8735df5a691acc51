"""Ask all upstreams at once: ``/flush_cache``, ``/get_loads``, ``/engine_metrics``.

Each origin is asked once, with its own key, 32 at a time. All of it ends before the front door that relays
the request gives up: origins whose turn does not come until then have failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import orjson

from meshd.controller.admin import AdminRoute
from meshd.controller.answers import json_answer, request_id
from meshd.controller.engine_metrics import merge
from meshd.controller.http_client import Answer, FetchError, Room, UpstreamClient
from meshd.controller.http_server import Request, Response
from meshd.controller.registry_keeper import RegistryKeeper
from meshd.errors import MeshError
from meshd.metrics.render import CONTENT_TYPE
from meshd.routing.load import LoadTable
from meshd.routing.registry import Upstream

MAX_ASKED: Final = 32
ASK_S: Final = 5.0
ALL_S: Final = 9.0  # a front door waits for 10 s
MAX_ANSWER_BYTES: Final = 1 << 20
MAX_METRICS_BYTES: Final = 16 << 20
MAX_MERGED_BYTES: Final = 32 << 20
"""Of all origins together; what does not fit is left out. So much takes 5 s and 250 MiB to merge."""
_INT64: Final = range(-(1 << 63), 1 << 63)


class Fleet:
    """``forget``: drops what the prefix index holds of the upstreams with these numbers."""

    def __init__(
        self,
        keeper: RegistryKeeper,
        loads: LoadTable,
        client: UpstreamClient,
        forget: Callable[[Collection[int]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keeper = keeper
        self._loads = loads
        self._client = client
        self._forget = forget
        self._clock = clock
        self._merging: asyncio.Task[bytes] | None = None

    def routes(self) -> list[AdminRoute]:
        return [
            AdminRoute("POST", "/flush_cache", self._flush),
            AdminRoute("GET", "/get_loads", self._get_loads),
            AdminRoute("GET", "/engine_metrics", self._engine_metrics),
        ]

    async def _flush(self, request: Request, _segment: str) -> Response:
        origins = self._origins()
        answers = await self._ask_all(origins, "POST", "/flush_cache", MAX_ANSWER_BYTES)
        failed = {url: answer for url, answer in answers.items() if isinstance(answer, str)}
        flushed = [url for url in origins if url not in failed]
        self._forget([upstream.number for url in flushed for upstream in origins[url]])
        if failed and not flushed:
            raise MeshError("no_worker_response", "No server has flushed its cache.")
        told: dict[str, Any] = {
            "status": "partial_success" if failed else "success",
            "message": f"flushed {len(flushed)} of {len(origins)}",
            "workers_flushed": len(flushed),
            "total_http_workers": len(origins),
            "total_workers": len(origins),
        }
        if failed:
            told["successful"] = flushed
            told["failed"] = [{"worker": url, "error": reason} for url, reason in failed.items()]
        return json_answer(request, told, 206 if failed else 200)

    async def _get_loads(self, request: Request, _segment: str) -> Response:
        origins = self._origins()
        answers = await self._ask_all(origins, "GET", "/get_load", MAX_ANSWER_BYTES)
        workers = [
            {
                "worker": url,
                "load": _tokens(answers[url]),
                "in_flight": sum(self._loads.loads(upstream.number for upstream in upstreams)),
            }
            for url, upstreams in origins.items()
        ]
        return json_answer(request, {"workers": workers})

    async def _engine_metrics(self, request: Request, _segment: str) -> Response:
        """One merging runs at a time, for its memory; who asks meanwhile gets the same answer."""
        if not self._origins():
            raise MeshError("no_workers", "No server is registered.")
        if self._merging is None:
            self._merging = asyncio.create_task(self._merged_metrics())
            self._merging.add_done_callback(self._merged)
        text = await asyncio.shield(self._merging)  # one that stops waiting does not end it for the others
        return Response(200, text, CONTENT_TYPE, (("x-request-id", request_id(request)),))

    def _merged(self, task: asyncio.Task[bytes]) -> None:
        self._merging = None
        if not task.cancelled():
            task.exception()  # perhaps nobody waits for it any more

    async def _merged_metrics(self) -> bytes:
        room = Room(MAX_MERGED_BYTES)
        answers = await self._ask_all(self._origins(), "GET", "/metrics", MAX_METRICS_BYTES, room)
        failures = {url: answer for url, answer in answers.items() if isinstance(answer, str)}
        texts = {url: answer.body for url, answer in answers.items() if isinstance(answer, Answer)}
        del answers  # merging lets go of each text when it has read it
        text, count = await asyncio.to_thread(merge, texts, failures)  # seconds, for a large fleet
        if not count:
            raise MeshError("no_worker_response", "No server answered with metrics.")
        return text

    def _origins(self) -> dict[str, list[Upstream]]:
        """Return the upstreams of each origin, in registration order; draining ones are left out."""
        origins: dict[str, list[Upstream]] = {}
        for upstream in self._keeper.upstreams:
            if upstream.state != "draining":
                origins.setdefault(upstream.base_url, []).append(upstream)
        return origins

    async def _ask_all(
        self,
        origins: Mapping[str, list[Upstream]],
        method: str,
        path: str,
        most_bytes: int,
        room: Room | None = None,
    ) -> dict[str, Answer | str]:
        """Return the 2xx answer of each origin, or why there is none, in the order of ``origins``."""
        deadline_s = self._clock() + ALL_S
        running = asyncio.Semaphore(MAX_ASKED)

        async def ask(upstream: Upstream) -> Answer | str:
            async with running:
                left_s = deadline_s - self._clock()
                if left_s <= 0:
                    return "not asked: the others took too long"
                try:
                    answer = await self._client.send(
                        method, upstream, path, min(ASK_S, left_s), most_bytes, room
                    )
                except FetchError as fault:
                    return str(fault)
                if answer.is_success:
                    return answer
                if room is not None:
                    room.give_back(len(answer.body))
                return f"HTTP {answer.status}"

        answers = await asyncio.gather(*(ask(upstreams[0]) for upstreams in origins.values()))
        return dict(zip(origins, answers, strict=True))

    def __repr__(self) -> str:
        return f"Fleet({len(self._origins())} origins)"


def _tokens(answer: Answer | str) -> int:
    """Return the sum of ``num_tokens`` over the array that was answered, −1 if it is none."""
    if isinstance(answer, str):
        return -1
    try:
        tokens = int(sum(each["num_tokens"] for each in orjson.loads(answer.body)))
    except (ValueError, TypeError, KeyError, OverflowError):
        return -1
    return tokens if tokens in _INT64 else -1  # JSON of ours has no longer numbers
