"""The registry of API operations: every front door resolves requests through this one table.

A path is matched exactly, byte for byte, without its query: ``/v1//responses`` and a trailing slash
are other paths. Two kinds of rows go beyond one path: the resource operations of Responses, whose path
holds an id, and the passthrough paths of the settings, which every other row wins over. Health, admin
and metrics routes are not endpoints; a front door looks for them first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, Literal, NamedTuple
from urllib.parse import unquote_to_bytes

from meshd.errors import MeshError

PicksBy = Literal["policy", "least_load", "fan_out", "local"]
Dialect = Literal["openai", "messages"]
StreamApi = Literal["openai", "messages", "responses", ""]

RESPONSES_PATH: Final = "/v1/responses"
ANY_METHOD: Final[tuple[str, ...]] = ()
_ID: Final = "{id}"
_RESOURCE_ID: Final = re.compile(rb"[A-Za-z0-9_-]{1,256}")
_MAX_KEPT: Final = 1024
"""Passthrough rows kept by path: below a prefix, clients choose the paths."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One API operation.

    ``number``: its index in ``ENDPOINTS`` and its code in job descriptors; a passthrough row has a number
    beyond them, and no job. ``label``: the bounded value used in metrics. ``methods``: empty for any.
    ``path``: for a row of more than one path its template or pattern, a bounded value too.
    ``capability``: the path looked up in an upstream's ``mesh.apis``, ``None`` where no upstream is asked.
    ``has_prepare_job``: a JSON body is read by a prepare worker; without one a body means nothing here.
    ``picks_by``: how an upstream is chosen; ``local``: none is, meshd answers by itself.
    ``is_served_in_pd``: also served by prefill/decode plans.
    ``takes_rank``: a data-parallel upstream gets its rank even if no label says so.
    ``is_repeatable``: repeating a request that has reached an upstream changes nothing for the client,
    whatever its method. ``id_prefix``: opens a generated request id.

    Accounting: ``is_observed``: tokens are counted from its 2xx responses. ``stream_api``: whose events
    its SSE responses are made of, and so the form of the event that ends a broken one; empty if they are
    only relayed. ``ends_with_marker``: such a stream is broken without the end-of-stream event of its API.
    """

    number: int
    name: str
    label: str
    methods: tuple[str, ...]
    path: str
    capability: str | None
    has_prepare_job: bool
    picks_by: PicksBy
    is_served_in_pd: bool
    takes_rank: bool
    is_repeatable: bool
    dialect: Dialect
    id_prefix: str
    is_observed: bool
    stream_api: StreamApi
    ends_with_marker: bool


class Match(NamedTuple):
    """What a request asks for. ``resource_id``: the decoded id of a resource operation, else empty."""

    endpoint: Endpoint
    resource_id: str = ""


def _rows() -> tuple[Endpoint, ...]:
    rows: list[Endpoint] = []

    def add(
        name: str,
        path: str,
        id_prefix: str,
        *,
        label: str = "",
        methods: tuple[str, ...] = ("POST",),
        capability: str | None = "",
        picks_by: PicksBy = "policy",
        has_prepare_job: bool | None = None,
        is_served_in_pd: bool = False,
        dialect: Dialect = "openai",
        stream_api: StreamApi = "",
        ends_with_marker: bool = True,
    ) -> None:
        is_inference = picks_by in ("policy", "least_load")
        rows.append(
            Endpoint(
                number=len(rows),
                name=name,
                label=label or name,
                methods=methods,
                path=path,
                capability=path if capability == "" else capability,
                has_prepare_job=is_inference if has_prepare_job is None else has_prepare_job,
                picks_by=picks_by,
                is_served_in_pd=is_served_in_pd,
                takes_rank=is_served_in_pd,
                is_repeatable=is_inference,
                dialect=dialect,
                id_prefix=id_prefix,
                is_observed=picks_by == "policy",
                stream_api=stream_api,
                ends_with_marker=ends_with_marker and bool(stream_api),
            )
        )

    def add_resource(name: str, suffix: str, method: str) -> None:
        add(
            name,
            f"{RESPONSES_PATH}/{_ID}{suffix}",
            "resp-",
            label="responses",
            methods=(method,),
            capability=RESPONSES_PATH,
            picks_by="fan_out",
        )

    add("chat", "/v1/chat/completions", "chatcmpl-", is_served_in_pd=True, stream_api="openai")
    add("completions", "/v1/completions", "cmpl-", is_served_in_pd=True, stream_api="openai")
    add("generate", "/generate", "gnt-", is_served_in_pd=True, stream_api="openai", ends_with_marker=False)
    add("messages", "/v1/messages", "msg-", dialect="messages", stream_api="messages")
    add(
        "count_tokens",
        "/v1/messages/count_tokens",
        "msg-",
        capability="/v1/messages",
        picks_by="least_load",
        dialect="messages",
    )
    add("responses", RESPONSES_PATH, "resp-", stream_api="responses")
    add("embeddings", "/v1/embeddings", "req-")
    for name in ("tokenize", "detokenize"):
        add(
            name,
            f"/v1/{name}",
            "req-",
            label="other",
            capability=None,
            picks_by="local",
            has_prepare_job=True,
        )
    add(
        "models",
        "/v1/models",
        "req-",
        label="other",
        methods=("GET", "HEAD"),
        capability=None,
        picks_by="local",
    )
    # A stored response was counted when it was made: its retrieval is relayed and not observed.
    add_resource("responses_get", "", "GET")
    add_resource("responses_delete", "", "DELETE")
    add_resource("responses_cancel", "/cancel", "POST")
    add_resource("responses_input_items", "/input_items", "GET")
    return tuple(rows)


ENDPOINTS: Final[tuple[Endpoint, ...]] = _rows()

_BY_PATH: Final = {row.path: row for row in ENDPOINTS if _ID not in row.path}
_MATCHES: Final = {(method, row.path): Match(row) for row in _BY_PATH.values() for method in row.methods}
_RESOURCES: Final = {
    suffix: {
        method: row
        for row in ENDPOINTS
        if row.path == f"{RESPONSES_PATH}/{_ID}{suffix}"
        for method in row.methods
    }
    for suffix in ("", "/cancel", "/input_items")
}
"""What follows the id → method → row."""

_PASSTHROUGH: Final = Endpoint(
    number=len(ENDPOINTS),
    name="passthrough",
    label="other",
    methods=ANY_METHOD,
    path="",
    capability="",
    has_prepare_job=False,
    picks_by="least_load",
    is_served_in_pd=False,
    takes_rank=False,
    is_repeatable=False,
    dialect="openai",
    id_prefix="req-",
    is_observed=False,
    stream_api="",
    ends_with_marker=False,
)


class EndpointRegistry:
    """All rows of one process: the table above, and the passthrough paths of the settings.

    ``passthrough_paths``: exact paths, or prefixes that end in ``*``.
    """

    def __init__(self, passthrough_paths: Iterable[str] = ()) -> None:
        patterns = tuple(passthrough_paths)
        self._exact = frozenset(path for path in patterns if not path.endswith("*"))
        # The longest first: its pattern is what a path below two of them is counted under.
        self._prefixes = sorted((path[:-1] for path in patterns if path.endswith("*")), key=len)[::-1]
        self._kept: dict[str, Match] = {}
        self._numbers = count(len(ENDPOINTS))

    def find(self, method: str, path: str) -> Match:
        """Return what a request asks for; ``path`` is the target without its query, as it was sent.

        Methods are case-sensitive (RFC 9110 §9.1). Raises ``MeshError``: ``not_found`` for a path that no
        row has, ``method_not_allowed`` with ``allow`` for a known path and another method,
        ``invalid_request`` for a resource id that is none.
        """
        match = _MATCHES.get((method, path))
        if match is not None:
            return match
        return self._find(method, path)

    def template_of(self, path: str) -> str:
        """Return the bounded name of a path for metrics, whatever its method: `other` if no row has it."""
        if path in _BY_PATH:
            return path
        if path.startswith(f"{RESPONSES_PATH}/"):
            _, slash, operation = path[len(RESPONSES_PATH) + 1 :].partition("/")
            rows = _RESOURCES.get(slash + operation, {})
            return next((row.path for row in rows.values()), "other")
        return "other"

    def _find(self, method: str, path: str) -> Match:
        known = _BY_PATH.get(path)
        if known is not None:
            raise _not_allowed(known.methods)
        resource = _find_resource(method, path)
        if resource is not None:
            return resource
        passthrough = self._kept.get(path) or self._find_passthrough(path)
        if passthrough is None:
            raise MeshError("not_found", "There is nothing at this path.")
        return passthrough

    def _find_passthrough(self, path: str) -> Match | None:
        pattern = path if path in self._exact else self._prefix_of(path)
        if pattern is None:
            return None
        if len(self._kept) >= _MAX_KEPT:
            self._kept.clear()
        # A number of its own, never given out again: placement keeps what it knows of a capability by it.
        row = replace(_PASSTHROUGH, number=next(self._numbers), path=pattern, capability=path)
        match = self._kept[path] = Match(row)
        return match

    def _prefix_of(self, path: str) -> str | None:
        for prefix in self._prefixes:
            if path.startswith(prefix):
                return None if _has_dot_segment(path) else f"{prefix}*"
        return None

    def __repr__(self) -> str:
        return f"EndpointRegistry({sorted(self._exact)}, {[f'{prefix}*' for prefix in self._prefixes]})"


def endpoint_by_number(number: int) -> Endpoint:
    """Return the endpoint of a job descriptor; ``LookupError`` for a number that no endpoint has."""
    if number < 0:
        raise LookupError(f"no endpoint has the number {number}")
    return ENDPOINTS[number]


def _find_resource(method: str, path: str) -> Match | None:
    """Return the resource operation of a path; None if the path is not one of theirs."""
    if not path.startswith(f"{RESPONSES_PATH}/"):
        return None
    encoded, slash, operation = path[len(RESPONSES_PATH) + 1 :].partition("/")
    rows = _RESOURCES.get(slash + operation)
    if not encoded or rows is None:
        return None
    row = rows.get(method)
    if row is None:
        raise _not_allowed(tuple(rows))
    resource_id = unquote_to_bytes(encoded)
    if not _RESOURCE_ID.fullmatch(resource_id):
        raise MeshError(
            "invalid_request", "The id in the path must be 1 to 256 letters, digits, underscores or hyphens."
        )
    return Match(row, resource_id.decode("ascii"))


def _has_dot_segment(path: str) -> bool:
    """Whether a server that resolves dot segments might leave the prefix, so that it would not hold."""
    return not {b".", b".."}.isdisjoint(re.split(rb"[/\\]", unquote_to_bytes(path)))


def _not_allowed(methods: tuple[str, ...]) -> MeshError:
    return MeshError("method_not_allowed", f"This path takes only {' and '.join(methods)}.", allow=methods)
