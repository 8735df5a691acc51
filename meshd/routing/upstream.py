"""One inference server as routing sees it, at one generation of the registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from meshd.api.endpoints import Endpoint

State = Literal["starting", "active", "draining"]

UNKNOWN_MODEL: Final = "unknown"
APIS_LABEL: Final = "mesh.apis"
SHARED_STATE_LABEL: Final = "mesh.responses_state"
POLICY_LABEL: Final = "policy"
DEFAULT_RUNTIME: Final = "sglang"

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Upstream:
    """A registered upstream; ``dataclasses.replace`` gives its next state.

    ``number``: its column in the load cells. ``base_url``: its normalized URL, shared by the ranks of
    one origin. ``dp_rank``: ``None`` unless it is one rank of a data-parallel server, of ``dp_size`` in
    all; ``origin_id`` is then the id of the server as a whole. ``models``: the model ids it serves; empty
    or only ``unknown`` means any. ``priority``, ``cost``: told by `/workers`; no policy reads them.
    ``api_key``: the credential sent to it.

    For the controller: ``source`` (`config`, `api`, `file`, `dns`, `kubernetes`) and ``source_key``, its
    name there; ``probing``, the health members of `POST /workers` that were given; ``runtime``, a value of
    `--backend`; ``entries``, JSON texts of the model list as the upstream told it; ``registered_at``, Unix.

    Derived: ``url``, its name everywhere (``base_url``, with ``@rank`` for a rank); the parts of
    ``base_url``; ``capabilities``, the paths of label ``mesh.apis``, ``None`` for every API.
    """

    number: int
    id: str
    base_url: str
    dp_rank: int | None = None
    models: tuple[str, ...] = ()
    worker_type: str = "regular"
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    priority: int = 50
    cost: float = 1.0
    api_key: str | None = field(default=None, repr=False)
    is_healthy: bool = False
    state: State = "starting"
    dp_size: int | None = None
    origin_id: str = ""
    source: str = "config"
    source_key: str = ""
    runtime: str = DEFAULT_RUNTIME
    bootstrap_port: int | None = None
    probing: Mapping[str, float] = field(default_factory=dict, hash=False)
    entries: tuple[str, ...] = field(default=(), repr=False)
    registered_at: int = 0

    url: str = field(init=False)
    host: str = field(init=False, repr=False)
    port: int = field(init=False, repr=False)
    is_tls: bool = field(init=False, repr=False)
    base_path: str = field(init=False, repr=False)
    capabilities: frozenset[str] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
            raise ValueError("base_url must be a normalized http or https URL")
        derive = object.__setattr__
        derive(self, "url", self.base_url if self.dp_rank is None else f"{self.base_url}@{self.dp_rank}")
        derive(self, "host", parts.hostname)
        derive(self, "port", parts.port or _DEFAULT_PORTS[parts.scheme])
        derive(self, "is_tls", parts.scheme == "https")
        derive(self, "base_path", parts.path)
        derive(self, "capabilities", _capabilities(self.labels))

    @property
    def registration(self) -> str:
        """The id that its registration was given: of the origin, for a rank."""
        return self.origin_id or self.id

    @property
    def serves_any_model(self) -> bool:
        """Whether its only model is ``unknown``."""
        return not self.models or self.models == (UNKNOWN_MODEL,)

    @property
    def shares_state(self) -> bool:
        """Whether its stored responses are visible to the other upstreams of its model."""
        return self.labels.get(SHARED_STATE_LABEL) == "shared"

    def is_able(self, capability: str | None) -> bool:
        """Say whether it serves the API of ``capability``."""
        return self.capabilities is None or capability in self.capabilities

    def rank_for(self, endpoint: Endpoint) -> int | None:
        """Return the rank that a body for ``endpoint`` is to name; ``None``: the client's bytes as they are.

        Beyond the endpoints that always take one, ``mesh.apis`` is where a server says that it reads the
        member on an API too.
        """
        if self.dp_rank is None or not endpoint.has_prepare_job:
            return None
        if endpoint.takes_rank or (
            self.capabilities is not None and endpoint.capability in self.capabilities
        ):
            return self.dp_rank
        return None

    def to_row(self) -> dict[str, Any]:
        """Return what ``from_row`` needs, as plain JSON values."""
        row = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        row["labels"] = dict(self.labels)
        row["probing"] = dict(self.probing)
        return row

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Upstream:
        """Make the upstream that ``row`` was made from."""
        return cls(**{**row, "models": tuple(row["models"]), "entries": tuple(row["entries"])})


def is_available(upstream: Upstream) -> bool:
    """Say whether a request may be sent to ``upstream`` now."""
    return upstream.is_healthy and upstream.state == "active"


def _capabilities(labels: Mapping[str, str]) -> frozenset[str] | None:
    listed = labels.get(APIS_LABEL)
    if listed is None:
        return None
    return frozenset(item.strip() for item in listed.split(",") if item.strip())
