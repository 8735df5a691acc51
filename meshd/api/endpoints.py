"""The registry of API operations: every front door resolves requests through this one table.

A path is matched exactly, byte for byte, without its query: ``/v1//responses`` and a trailing slash
are other paths. Health, admin and metrics routes are not endpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from meshd.errors import MeshError

PicksBy = Literal["policy", "least_load", "fan_out", "local"]
Dialect = Literal["openai", "messages"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One API operation.

    ``number``: its index in ``ENDPOINTS`` and its code in job descriptors. ``label``: the bounded value
    used in metrics. ``capability``: the path looked up in an upstream's ``mesh.apis``, ``None`` where no
    upstream is asked. ``has_prepare_job``: a JSON body is read by a prepare worker. ``picks_by``: how an
    upstream is chosen. ``is_served_in_pd``: also served by prefill/decode plans.
    ``id_prefix``: opens a generated request id.
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
    dialect: Dialect
    id_prefix: str


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
        has_prepare_job: bool = True,
        picks_by: PicksBy = "policy",
        is_served_in_pd: bool = False,
        dialect: Dialect = "openai",
    ) -> None:
        rows.append(
            Endpoint(
                number=len(rows),
                name=name,
                label=label or name,
                methods=methods,
                path=path,
                capability=path if capability == "" else capability,
                has_prepare_job=has_prepare_job,
                picks_by=picks_by,
                is_served_in_pd=is_served_in_pd,
                dialect=dialect,
                id_prefix=id_prefix,
            )
        )

    add("chat", "/v1/chat/completions", "chatcmpl-", is_served_in_pd=True)
    add("completions", "/v1/completions", "cmpl-", is_served_in_pd=True)
    add("generate", "/generate", "gnt-", is_served_in_pd=True)
    add("messages", "/v1/messages", "msg-", dialect="messages")
    add(
        "count_tokens",
        "/v1/messages/count_tokens",
        "msg-",
        capability="/v1/messages",
        picks_by="least_load",
        dialect="messages",
    )
    add("responses", "/v1/responses", "resp-")
    add("embeddings", "/v1/embeddings", "req-")
    add(
        "models",
        "/v1/models",
        "req-",
        label="other",
        methods=("GET", "HEAD"),
        capability=None,
        has_prepare_job=False,
        picks_by="local",
    )
    return tuple(rows)


ENDPOINTS: Final[tuple[Endpoint, ...]] = _rows()

_BY_PATH: Final = {endpoint.path: endpoint for endpoint in ENDPOINTS}
_BY_METHOD_AND_PATH: Final = {
    (method, endpoint.path): endpoint for endpoint in ENDPOINTS for method in endpoint.methods
}


def find_endpoint(method: str, path: str) -> Endpoint:
    """Return the endpoint of a request; ``path`` is the target without its query.

    Methods are case-sensitive (RFC 9110 §9.1). Raises ``MeshError``: ``not_found`` for a path that no
    endpoint has, ``method_not_allowed`` with ``allow`` for a known path and another method.
    """
    endpoint = _BY_METHOD_AND_PATH.get((method, path))
    if endpoint is not None:
        return endpoint
    known = _BY_PATH.get(path)
    if known is None:
        raise MeshError("not_found", "There is nothing at this path.")
    raise MeshError(
        "method_not_allowed",
        f"This path takes only {' and '.join(known.methods)}.",
        allow=known.methods,
    )


def endpoint_by_number(number: int) -> Endpoint:
    """Return the endpoint of a job descriptor; ``LookupError`` for a number that no endpoint has."""
    if number < 0:
        raise LookupError(f"no endpoint has the number {number}")
    return ENDPOINTS[number]
