"""Which policy places the requests of a model: that of its first upstream with a label, else the default."""

from __future__ import annotations

from typing import Final

from meshd.api.endpoints import Endpoint
from meshd.routing.policies.table import PolicyTable, labelled_policy
from meshd.routing.policy import Policy
from meshd.routing.registry import Registry
from meshd.routing.upstream import Upstream

_MAX_KEPT: Final = 4096
"""Policy objects kept; an upstream of unknown model admits any name a client invents."""


class PolicyChoice:
    """The policy objects of one process, each of one model; ``renew`` with each generation."""

    def __init__(self, policies: PolicyTable, default: str) -> None:
        if default not in policies:
            raise ValueError(f"there is no policy {default!r}")
        self._policies = policies
        self._default = default
        self._kept: dict[tuple[str, str], Policy] = {}
        self.needs = 0  # the ``NEEDS`` bits of all that can be in force

    def renew(self, registry: Registry) -> None:
        """Look at the labels of a new set; the hash ring is built now, not by the first request that asks."""
        labelled = {labelled_policy(upstream.labels) for upstream in registry.upstreams}
        names = {self._default, *(labelled & self._policies.keys())}
        policies = [self._policies[name]() for name in names]
        self.needs = 0
        for policy in policies:
            self.needs |= policy.needs
        if any(policy.uses_ring for policy in policies):
            registry.ring  # noqa: B018

    def policy(self, endpoint: Endpoint, model: str, known: tuple[Upstream, ...]) -> Policy:
        """Return the policy object for a model; it keeps its turn from generation to generation.

        ``known``: the upstreams that serve it, in registration order.
        """
        name = "least_load" if endpoint.picks_by == "least_load" else self._name(model, known)
        policy = self._kept.get((name, model))
        if policy is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            policy = self._kept[name, model] = self._policies[name]()
        return policy

    def _name(self, model: str, known: tuple[Upstream, ...]) -> str:
        """A request without a model has no label to go by."""
        if model:
            for upstream in known:
                name = labelled_policy(upstream.labels)
                if name in self._policies:
                    return name
        return self._default

    def __repr__(self) -> str:
        return f"PolicyChoice({self._default}, {len(self._kept)} kept)"
