"""Routes that are not endpoints: what the I/O process answers itself, and what it relays (admin.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import orjson

from meshd.api.health import HEALTH_ROUTES, HealthFacts, HealthRoute, health_answer
from meshd.errors import MeshError
from meshd.io.http1 import Field
from meshd.routing.registry import Registry

Answer = tuple[int, bytes, tuple[Field, ...]]

_NO_STORE: Final = ((b"cache-control", b"no-store"),)
_RELAYED: Final = {"/workers": "/workers", "/v1/tokenizers": "/v1/tokenizers"}
_RELAYED_PREFIXES: Final = {"/workers/": "/workers/{id}", "/v1/tokenizers/": "/v1/tokenizers/{id}"}
_PREFIXES: Final = tuple(_RELAYED_PREFIXES)


@dataclass(frozen=True, slots=True)
class Route:
    """One route: ``label`` is its template in metrics; a relayed one is the controller's to answer."""

    label: str
    health: HealthRoute | None = None
    is_relayed: bool = False


class Routes:
    """Find and answer routes from what shared memory says now."""

    def __init__(
        self,
        facts: Callable[[], HealthFacts],
        registry: Callable[[], Registry],
        started_at: int,
    ) -> None:
        self._facts = facts
        self._registry = registry
        self._started_at = started_at
        self._routes = {path: Route(path, health=route) for path, route in HEALTH_ROUTES.items()}
        self._routes.update({path: Route(label, is_relayed=True) for path, label in _RELAYED.items()})

    def find(self, path: str) -> Route | None:
        route = self._routes.get(path)
        if route is None and path.startswith(_PREFIXES):
            prefix = next(each for each in _PREFIXES if path.startswith(each))
            return Route(_RELAYED_PREFIXES[prefix], is_relayed=True)
        return route

    def answer(self, route: Route, method: str) -> Answer:
        """Answer a health route; raise MeshError for a wrong method."""
        if method not in ("GET", "HEAD"):
            raise MeshError("method_not_allowed", "This path takes only GET and HEAD.", allow=("GET", "HEAD"))
        assert route.health is not None
        status, body = health_answer(route.health, self._facts())
        return status, body, _NO_STORE

    def models(self) -> Answer:
        """List the models of all upstreams that have answered, each once, sorted (admin.md §6)."""
        upstreams = self._registry().upstreams
        if not upstreams:
            raise MeshError("no_workers", "No upstream is registered.")
        names = {
            name
            for upstream in upstreams
            if upstream.state == "active"
            for name in upstream.models
            if not upstream.serves_any_model
        }
        data = [
            {"id": name, "object": "model", "created": self._started_at, "owned_by": "local"}
            for name in sorted(names)
        ]
        return 200, orjson.dumps({"object": "list", "data": data}), ()
