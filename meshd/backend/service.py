"""The bundled upstream without its sockets: a request in, an exchange out, counters kept.

Order of checks: control routes; key; path and method; fault header; capacity; status fault; the API.
Faults that stand for all requests leave alone what a router asks by itself in the background (health,
models, server and model information), so that ``times`` counts requests of clients only and an upstream
that fails its traffic can still be a healthy one. A fault header acts on whatever request carries it.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from meshd.backend import control_routes
from meshd.backend.apis import chat, completions, embeddings, generate, information, messages, responses
from meshd.backend.call import Call, invalid, make_call
from meshd.backend.faults import NO_FAULTS, Faults, StandingFaults, parse_faults, shape, status_reply
from meshd.backend.reply import Dialect, Reply, RequestError, error_reply, json_reply
from meshd.backend.state import Request, RequestLog, Stats

REMEMBERED_HEADER_FAULTS: Final = 1024

Answer = Callable[[Request, Faults], Reply]


@dataclass(frozen=True, slots=True)
class Options:
    """What the flags of the process say; times in seconds."""

    models: tuple[str, ...] = ("meshd-demo",)
    api_key: str | None = None
    ranks: int = 1
    embedding_dimensions: int = 16
    token_delay_s: float = 0.0
    first_token_delay_s: float = 0.0
    capacity: int = 0
    keepalive_s: float = 5.0
    faults: Faults = NO_FAULTS


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request with its reply and how to send it. ``is_counted``: ``Service.end`` must follow."""

    request: Request
    reply: Reply
    faults: Faults = NO_FAULTS
    token_delay_s: float = 0.0
    first_token_delay_s: float = 0.0
    is_counted: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    answer: Answer
    dialect: Dialect = Dialect.OPENAI
    is_counted: bool = True
    takes_standing_faults: bool = True
    needs_key: bool = True


class Service:
    """State and routes of one upstream process."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.stats = Stats()
        self.log = RequestLog()
        self.standing_faults = StandingFaults(options.faults)
        self.health_status = 200
        self._responses = responses.ResponseStore()
        self._header_faults: OrderedDict[tuple[bytes, bytes], StandingFaults] = OrderedDict()
        self._routes = self._make_routes()

    def begin(self, request: Request) -> Exchange:
        """Answer ``request``; if the exchange is counted, ``end`` must be called exactly once."""
        if request.path.startswith(control_routes.PREFIX):
            return Exchange(request, control_routes.answer(self, request))
        self.log.add(request)
        try:
            route = self._find(request)
        except RequestError as error:
            return Exchange(request, error_reply(error, _dialect_of(request.path)))
        try:
            self._check_key(request, route)
            faults = self._faults_of(request, route)
            self._check_capacity(route)
        except RequestError as error:
            if route.is_counted:
                self.stats.served += 1
            return Exchange(request, error_reply(error, route.dialect))
        return self._answer(request, route, faults)

    def end(self, exchange: Exchange, *, is_aborted: bool) -> None:
        if exchange.is_counted:
            self.stats.end(is_aborted=is_aborted)

    def _answer(self, request: Request, route: Route, faults: Faults) -> Exchange:
        try:
            reply = status_reply(faults, route.dialect) or route.answer(request, faults)
        except RequestError as error:
            reply = error_reply(error, route.dialect)
        if route.is_counted:
            self.stats.begin()
        return Exchange(
            request,
            shape(reply, faults, route.dialect),
            faults,
            self.options.token_delay_s if faults.token_delay_ms is None else faults.token_delay_ms / 1000,
            self.options.first_token_delay_s,
            route.is_counted,
        )

    def _find(self, request: Request) -> Route:
        path = request.path
        methods = self._routes.get(path) or self._resource_routes(path)
        if not methods:
            raise RequestError(404, "not_found", "There is no such path here.")
        method = "GET" if request.method == "HEAD" else request.method
        for route in methods:
            if route.method == method:
                return route
        allow = ", ".join(route.method for route in methods).encode()
        message = "The path does not take this method."
        raise RequestError(405, "method_not_allowed", message, ((b"allow", allow),))

    def _check_key(self, request: Request, route: Route) -> None:
        if self.options.api_key is None or not route.needs_key:
            return
        scheme, _, bearer = (request.header(b"authorization") or b"").partition(b" ")
        given = bearer.strip() if scheme.lower() == b"bearer" else request.header(b"x-api-key") or b""
        if not hmac.compare_digest(given, self.options.api_key.encode()):
            challenge = ((b"www-authenticate", b"Bearer"),)
            raise RequestError(401, "invalid_api_key", "The API key is missing or wrong.", challenge)

    def _check_capacity(self, route: Route) -> None:
        if route.is_counted and 0 < self.options.capacity <= self.stats.active:
            message = "The backend is at its capacity."
            raise RequestError(429, "at_capacity", message, ((b"retry-after", b"1"),))

    def _faults_of(self, request: Request, route: Route) -> Faults:
        spec = request.header(b"x-backend-fault")
        if spec is None:
            return self.standing_faults.take() if route.takes_standing_faults else NO_FAULTS
        try:
            faults = parse_faults(spec.decode("latin-1"))
        except ValueError as error:
            raise invalid(f"Header x-backend-fault: {error}.") from None
        if faults.times is None:
            return faults
        return self._repeated(faults, (spec, request.header(b"x-request-id") or b"")).take()

    def _repeated(self, faults: Faults, key: tuple[bytes, bytes]) -> StandingFaults:
        """``times`` of a header counts the attempts of one request, known by its request id."""
        known = self._header_faults.setdefault(key, StandingFaults(faults))
        if len(self._header_faults) > REMEMBERED_HEADER_FAULTS:
            self._header_faults.popitem(last=False)
        return known

    def _call(self, request: Request, faults: Faults) -> Call:
        return make_call(
            request.body,
            self.options.models,
            has_usage=not faults.no_usage,
            embedding_dimensions=self.options.embedding_dimensions,
        )

    def _api(self, answer: Callable[[Call], Reply], dialect: Dialect = Dialect.OPENAI) -> list[Route]:
        return [Route("POST", lambda request, faults: answer(self._call(request, faults)), dialect)]

    def _make_routes(self) -> dict[str, list[Route]]:
        models, ranks, store = self.options.models, self.options.ranks, self._responses

        def get(
            answer: Callable[[], Reply], *, needs_key: bool = True, has_faults: bool = False
        ) -> list[Route]:
            return [
                Route("GET", lambda request, faults: answer(), Dialect.OPENAI, False, has_faults, needs_key)
            ]

        server_info = get(lambda: information.server_info(models, ranks))
        model_info = get(lambda: information.model_info(models))
        return {
            "/v1/chat/completions": self._api(chat.answer),
            "/v1/completions": self._api(completions.answer),
            "/v1/messages": self._api(messages.answer, Dialect.MESSAGES),
            "/v1/messages/count_tokens": self._api(messages.count, Dialect.MESSAGES),
            "/v1/responses": self._api(lambda call: responses.answer(call, store), Dialect.RESPONSES),
            "/generate": self._api(generate.answer),
            "/v1/embeddings": self._api(embeddings.answer),
            "/health": get(self._health, needs_key=False),
            "/v1/models": get(lambda: information.models(models)),
            "/server_info": server_info,
            "/get_server_info": server_info,
            "/model_info": model_info,
            "/get_model_info": model_info,
            "/get_load": get(lambda: information.load(ranks, self.stats.active), has_faults=True),
            "/metrics": get(
                lambda: information.metrics(self.stats.served, self.stats.active),
                needs_key=False,
                has_faults=True,
            ),
            "/flush_cache": [Route("POST", lambda r, f: information.flush_cache(), is_counted=False)],
        }

    def _resource_routes(self, path: str) -> list[Route]:
        prefix, _, rest = path.partition("/v1/responses/")
        identifier, _, operation = rest.partition("/")
        if prefix or not identifier:
            return []
        store, dialect = self._responses, Dialect.RESPONSES
        if not operation:
            return [
                Route("GET", lambda r, f: store.get(identifier), dialect),
                Route("DELETE", lambda r, f: store.delete(identifier), dialect),
            ]
        if operation == "cancel":
            return [Route("POST", lambda r, f: store.cancel(identifier), dialect)]
        if operation == "input_items":
            return [Route("GET", lambda r, f: store.input_items(identifier), dialect)]
        return []

    def _health(self) -> Reply:
        return json_reply({"status": self.health_status}, status=self.health_status)


def _dialect_of(path: str) -> Dialect:
    return Dialect.MESSAGES if path.startswith("/v1/messages") else Dialect.OPENAI
