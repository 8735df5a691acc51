"""Change the set of upstreams: POST, PUT and DELETE below ``/workers``, and their legacy forms.

A change is answered when it is published, so what was answered survives this process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qs

import orjson

from meshd.api.request_json import parse_body
from meshd.config.settings import Settings
from meshd.config.urls import normalize_url
from meshd.config.workers import PROBING, read_members, read_worker
from meshd.controller.admin import AdminRoute
from meshd.controller.announcement import Announcement
from meshd.controller.answers import json_answer, worker_error
from meshd.controller.http_server import Request, Response
from meshd.controller.registration import filled_fields, warn_of_labels
from meshd.controller.registry_keeper import MAX_DESCRIPTION_BYTES, Refusal, RegistryKeeper
from meshd.controller.worker_info import resolve
from meshd.errors import MeshError
from meshd.log import Log
from meshd.routing.registry import Upstream

MAX_PENDING: Final = 1000
_CHANGEABLE: Final = ("priority", "cost", "labels", "api_key", *PROBING)
_TRUTHS: Final = {"true": True, "1": True, "false": False, "0": False}
_REFUSALS: Final = {
    Refusal.EXISTS: (409, "WORKER_ALREADY_EXISTS", "A worker with this URL is registered already."),
    Refusal.FULL: (503, "SERVICE_UNAVAILABLE", "There is no room for another worker."),
    Refusal.TOO_LARGE: (
        400,
        "BAD_REQUEST",
        f"The description of a worker may have at most {MAX_DESCRIPTION_BYTES} bytes.",
    ),
}


@dataclass(frozen=True, slots=True)
class Changes:
    """What a PUT asks for. ``labels``: to be merged; None removes one. ``key``: to be set, if it is there."""

    fields: Mapping[str, Any]
    labels: Mapping[str, str | None]
    key: tuple[str | None, ...]
    probing: Mapping[str, float]

    @classmethod
    def read(cls, members: dict[str, Any]) -> Changes:
        """Check the members of a PUT. Raises ``ValueError`` for the first fault in them."""
        labels = members.get("labels", {})
        removed = [name for name, text in labels.items() if text is None] if isinstance(labels, dict) else []
        given = {**members}
        if removed:
            given["labels"] = {name: text for name, text in labels.items() if text is not None}
        if given.get("api_key", "") is None:
            given["api_key"] = ""
        checked = read_members(given, _CHANGEABLE)
        return cls(
            {name: checked[name] for name in ("priority", "cost") if name in checked},
            {**checked.get("labels", {}), **dict.fromkeys(removed)},
            (checked["api_key"] or None,) if "api_key" in checked else (),
            {name: checked[name] for name in PROBING if name in checked},
        )

    def of(self, upstream: Upstream) -> dict[str, Any]:
        """Return the fields of ``upstream`` as they are to be. ``ValueError``: they are too large."""
        labels = {**upstream.labels, **self.labels}
        kept = {name: text for name, text in labels.items() if text is not None}
        if len(orjson.dumps(kept)) > MAX_DESCRIPTION_BYTES:
            raise ValueError(f"labels: may have at most {MAX_DESCRIPTION_BYTES} bytes together")
        filled = {name: value for name, value in filled_fields(kept).items() if name in self.labels}
        changes: dict[str, Any] = {**filled, **self.fields, "labels": kept}
        changes["probing"] = {**upstream.probing, **self.probing}
        if self.key:
            changes["api_key"] = self.key[0]
        return changes


class WorkerChanges:
    """Answers the routes that change the set."""

    def __init__(self, keeper: RegistryKeeper, settings: Settings, log: Log) -> None:
        self._keeper = keeper
        self._settings = settings
        self._log = log

    def routes(self) -> list[AdminRoute]:
        return [
            AdminRoute("POST", "/workers", self._add),
            AdminRoute("PUT", "/workers/{id}", self._change),
            AdminRoute("DELETE", "/workers/{id}", self._remove),
            AdminRoute("POST", "/add_worker", self._add_by_url),
            AdminRoute("POST", "/remove_worker", self._remove_by_url),
        ]

    async def _add(self, request: Request, _segment: str) -> Response:
        try:
            given = {name: value for name, value in parse_body(request.body).items() if value is not None}
            spec = read_worker(given)
            if spec.worker_type != "regular":
                raise ValueError(f"worker_type: {spec.worker_type} needs prefill/decode topology")
        except (MeshError, ValueError) as fault:
            return _bad_request(request, fault)
        return await self._register(request, Announcement.of(spec, None, self._settings.backend))

    async def _add_by_url(self, request: Request, _segment: str) -> Response:
        try:
            url = normalize_url(_parameter(request, "url"))
        except ValueError as fault:
            return _bad_request(request, fault)
        return await self._register(request, Announcement(url, runtime=self._settings.backend))

    async def _register(self, request: Request, announcement: Announcement) -> Response:
        if self._keeper.jobs.pending > MAX_PENDING:
            return worker_error(request, 503, "SERVICE_UNAVAILABLE", "Too many registrations are running.")
        added = self._keeper.register(announcement)
        if isinstance(added, Refusal):
            status, code, message = _REFUSALS[added]
            return worker_error(request, status, code, message)
        self._warn_of(added.url, added.labels)
        await self._keeper.publisher.published()
        location = f"/workers/{added.id}"
        told = {
            "status": "accepted",
            "worker_id": added.id,
            "url": added.url,
            "location": location,
            "message": "The worker is registered; it is used after its first successful probe.",
        }
        return json_answer(request, told, 202, (("location", location),))

    async def _change(self, request: Request, text: str) -> Response:
        upstreams = resolve(self._keeper, request, text)
        if isinstance(upstreams, Response):
            return upstreams
        try:
            changes = Changes.read(parse_body(request.body))
            changed = [(upstream, changes.of(upstream)) for upstream in upstreams]
        except (MeshError, ValueError) as fault:
            return _bad_request(request, fault)
        for upstream, fields in changed:
            self._keeper.change(upstream, **fields)
        if changes.labels:
            self._warn_of(upstreams[0].base_url, changed[0][1]["labels"])
        return await self._accepted(request, text, "The worker is changed.")

    async def _remove(self, request: Request, text: str) -> Response:
        upstreams = resolve(self._keeper, request, text)
        if isinstance(upstreams, Response):
            return upstreams
        is_forced = _TRUTHS.get(_parameter(request, "force", "false").lower())
        if is_forced is None:
            return _bad_request(request, ValueError("force: must be true or false"))
        if is_forced:
            self._keeper.remove(upstreams, is_forced=True)
            return await self._accepted(request, text, "The worker is removed; its requests are cut.")
        self._keeper.drain(upstreams)
        return await self._accepted(request, text, "The worker drains; it leaves when its requests end.")

    async def _remove_by_url(self, request: Request, _segment: str) -> Response:
        try:
            url = normalize_url(_parameter(request, "url"))
        except ValueError as fault:
            return _bad_request(request, fault)
        found = [u for u in self._keeper.upstreams if url in (u.base_url, u.url)]
        if not found:
            return worker_error(request, 404, "WORKER_NOT_FOUND", "There is no worker with this URL.")
        self._keeper.drain(found)
        message = "The worker drains; it leaves when its requests end."
        return await self._accepted(request, found[0].registration, message)

    async def _accepted(self, request: Request, worker_id: str, message: str) -> Response:
        await self._keeper.publisher.published()
        told = {"status": "accepted", "worker_id": worker_id, "message": message}
        return json_answer(request, told, 202)

    def _warn_of(self, url: str, labels: Mapping[str, str]) -> None:
        warn_of_labels(self._log, url, labels, self._settings.passthrough_paths)


def _parameter(request: Request, name: str, default: str = "") -> str:
    """Return the first value of a parameter of the query."""
    values: Iterable[str] = parse_qs(request.query, keep_blank_values=True).get(name, ())
    return next(iter(values), default)


def _bad_request(request: Request, fault: MeshError | ValueError) -> Response:
    message = fault.message if isinstance(fault, MeshError) else str(fault)
    return worker_error(request, 400, "BAD_REQUEST", message)
