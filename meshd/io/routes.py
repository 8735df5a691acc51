"""Routes that are not endpoints: what the I/O process answers itself, and what it relays.

What the process answers, it answers from shared memory: it needs neither the controller nor an upstream.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson

from meshd.api.health import HEALTH_ROUTES, HealthFacts, HealthRoute, health_answer
from meshd.errors import MeshError
from meshd.io.http1 import Field
from meshd.routing.registry import Registry
from meshd.routing.upstream import Upstream

Answer = tuple[int, bytes, tuple[Field, ...]]
Kind = Literal["health", "relayed", "first_upstream", "server_info", "explain", "absent"]

READING: Final = ("GET", "HEAD")
_HARMLESS: Final = (*READING, "OPTIONS")
_NO_STORE: Final = ((b"cache-control", b"no-store"),)
_RELAYED: Final = (
    "/workers",
    "/list_workers",
    "/add_worker",
    "/remove_worker",
    "/flush_cache",
    "/get_loads",
    "/engine_metrics",
    "/v1/tokenizers",
)
_FIRST_UPSTREAM: Final = ("/get_model_info", "/model_info")
_TEMPLATES: Final = (
    (re.compile(r"/workers/.*", re.DOTALL), "/workers/{id}"),
    (re.compile(r"/v1/tokenizers/[^/]*/status"), "/v1/tokenizers/{id}/status"),
    (re.compile(r"/v1/tokenizers/.*", re.DOTALL), "/v1/tokenizers/{id}"),
)


@dataclass(frozen=True, slots=True)
class Route:
    """One route. ``label``: its template in metrics.

    ``kind``: ``relayed`` is the controller's to answer, ``first_upstream`` an upstream's; ``explain`` is
    explain.py; ``absent`` is answered with 404 whatever the passthrough paths are.
    """

    label: str
    kind: Kind = "health"
    health: HealthRoute | None = None

    @property
    def is_relayed(self) -> bool:
        return self.kind == "relayed"


class Routes:
    """Find and answer routes from what shared memory says now.

    ``server_info``: the answer to ``/get_server_info`` but for the number of upstreams. ``is_open``: whoever
    reaches the port may change the state of the node, not only clients on loopback.
    """

    def __init__(
        self,
        facts: Callable[[], HealthFacts],
        registry: Callable[[], Registry],
        server_info: Callable[[], Mapping[str, Any]],
        is_open: bool = False,
    ) -> None:
        self._facts = facts
        self._registry = registry
        self._server_info = server_info
        self._is_open = is_open
        self._routes = {path: Route(path, "health", route) for path, route in HEALTH_ROUTES.items()}
        self._routes.update({path: Route(path, "relayed") for path in _RELAYED})
        self._routes.update({path: Route(path, "first_upstream") for path in _FIRST_UPSTREAM})
        self._routes["/get_server_info"] = Route("/get_server_info", "server_info")
        self._routes["/route/explain"] = Route("/route/explain", "explain")
        self._routes["/metrics"] = Route("other", "absent")
        self._models: tuple[int, Answer | None] = (-1, None)

    def find(self, path: str) -> Route | None:
        route = self._routes.get(path)
        if route is None and path.startswith(("/workers/", "/v1/tokenizers/")):
            label = next(label for pattern, label in _TEMPLATES if pattern.fullmatch(path))
            return Route(label, "relayed")
        return route

    def admit(self, method: str, peer: str) -> None:
        """Refuse a change of the node's state to a client elsewhere; raise MeshError ``admin_required``.

        ``peer``: address and port of the client, empty if it came over a Unix socket.
        """
        if method in _HARMLESS or self._is_open or not peer or _is_loopback(peer):
            return
        raise MeshError(
            "admin_required",
            "Only clients on this host may change this; --open-admin opens it to all who reach the port.",
        )

    def answer(self, route: Route, method: str) -> Answer:
        """Answer a route of this process; raise MeshError, for a wrong method also."""
        if route.kind == "absent":
            raise MeshError("not_found", "There is nothing at this path.")
        check_reading(method)
        if route.kind == "server_info":
            count = len(self._registry().upstreams)
            return 200, orjson.dumps({**_ROUTER, "workers_count": count, **self._server_info()}), ()
        assert route.health is not None
        status, body = health_answer(route.health, self._facts())
        return status, body, _NO_STORE

    def models(self) -> Answer:
        """List the models of all upstreams that have answered, each once, sorted."""
        registry = self._registry()
        if not registry.upstreams:
            raise MeshError("no_workers", "No upstream is registered.")
        generation, answer = self._models
        if answer is None or generation != registry.generation:
            data = [entry for _, entry in sorted(_entries(registry).items())]
            answer = 200, orjson.dumps({"object": "list", "data": data}), ()
            self._models = registry.generation, answer
        return answer


_ROUTER: Final = {"router_manager": True, "routers_count": 1}


def check_asking(method: str) -> None:
    if method != "POST":
        raise MeshError("method_not_allowed", "This path takes only POST.", allow=("POST",))


def check_reading(method: str) -> None:
    if method not in READING:
        raise MeshError("method_not_allowed", "This path takes only GET and HEAD.", allow=READING)


def _entries(registry: Registry) -> dict[str, dict[str, Any]]:
    """Return one entry for each model: as the first upstream that has it told it, else one made up."""
    entries: dict[str, dict[str, Any]] = {}
    for upstream in registry.upstreams:
        if upstream.state == "active" and not upstream.serves_any_model:
            told = dict(_told(upstream))
            for name in upstream.models:
                if name not in entries:
                    entries[name] = {
                        "id": name,
                        "object": "model",
                        "created": upstream.registered_at,
                        "owned_by": "local",
                        **told.get(name, {}),
                    }
    return entries


def _told(upstream: Upstream) -> Iterator[tuple[str, dict[str, Any]]]:
    for text in upstream.entries:
        entry = orjson.loads(text)
        yield entry["id"], entry


def _is_loopback(peer: str) -> bool:
    host = peer.rpartition(":")[0].partition("%")[0]
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
