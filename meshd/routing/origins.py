"""Which upstreams are asked without being picked by a policy.

A Responses resource operation asks all origins: nobody knows which one keeps the response.

Ranks of one origin keep it together and are asked once. Unhealthy and draining upstreams count: they may
be the one that has it.
"""

from __future__ import annotations

from collections.abc import Callable

from meshd.api.endpoints import Endpoint
from meshd.errors import MeshError
from meshd.routing.registry import Registry
from meshd.routing.upstream import Upstream


def origins_of(registry: Registry, endpoint: Endpoint) -> tuple[Upstream, ...]:
    """Return the first able regular upstream of each origin, sorted by URL; never empty.

    Raises ``MeshError``: ``no_workers``, ``unsupported_api``, or ``conflicting_backend_credentials`` if
    the ranks of an origin have different keys. Costs some µs for each upstream; these requests are rare.
    """
    if not registry.upstreams:
        raise MeshError("no_workers", "No server is registered.")
    chosen: dict[str, Upstream] = {}
    for upstream in registry.upstreams:
        if upstream.worker_type != "regular" or not upstream.is_able(endpoint.capability):
            continue
        first = chosen.setdefault(upstream.base_url, upstream)
        if first.api_key != upstream.api_key:
            raise MeshError("conflicting_backend_credentials", "The ranks of one server have different keys.")
    if not chosen:
        raise MeshError("unsupported_api", "No server offers this API.")
    return tuple(chosen[url] for url in sorted(chosen))


def first_available(registry: Registry, is_available: Callable[[Upstream], bool]) -> Upstream:
    """Return the available upstream that was registered first; of prefill and decode ones a prefill.

    Raises ``MeshError`` ``no_workers``.
    """
    for upstream in registry.upstreams:
        if upstream.worker_type != "decode" and is_available(upstream):
            return upstream
    raise MeshError("no_workers", "No server is available.")
