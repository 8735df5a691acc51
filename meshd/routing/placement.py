"""Placement: from an endpoint and a view to the upstream of one attempt, with its load counted.

The steps, and what each refuses: the topology (``unsupported_api_topology``); the upstreams that serve
the model (``no_workers``, ``model_not_found``); of those the able ones, by API (``unsupported_api``);
stored state on several origins (``stateful_routing_unsupported``); the available ones
(``no_available_workers``); without those already tried, unless none would remain; without the de-ranked
ones, on the same terms; and the policy's pick among the rest (``policy_returned_none``). Then the load is
counted, before anything else happens.

What depends only on the generation, the endpoint and the model is kept as a *route* until the next
generation: an ordinary placement looks one up, sees in one comparison that no upstream is in trouble
(conditions.py), and asks the policy. In trouble the candidates that are left are kept too, for as long as
that trouble stays the same. Who is picked while its breaker is half open gets the one trial there is, or
another process was faster and the policy picks again.

A resource operation of Responses is not placed: it asks all ``origins`` and holds each while it does.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final, Literal, NamedTuple, Protocol

from meshd.api.dialects import cut_name
from meshd.api.endpoints import ENDPOINTS, Endpoint
from meshd.api.view import NEEDS_RANK_FREE, NEEDS_SESSION, RoutingView
from meshd.errors import MeshError
from meshd.metrics.cells import BufferedCounter
from meshd.routing.availability import CALM, Availability, NoneAvailable
from meshd.routing.conditions import Conditions, Outcome, Trouble
from meshd.routing.load import LoadTable
from meshd.routing.origins import origins_of
from meshd.routing.policies.dp_sticky import UNASSIGNED
from meshd.routing.policies.table import PolicyTable
from meshd.routing.policy import Candidates, Pick, Policy
from meshd.routing.policy_choice import PolicyChoice
from meshd.routing.registry import Registry, RegistryBoard
from meshd.routing.upstream import Upstream, is_available

_MAX_KEPT: Final = 4096
"""Routes kept; an upstream of unknown model admits any name a client invents."""

FAN_OUT: Final = "fan_out"
"""Policy and reason of an upstream that was held and not picked."""

COOLING_DOWN: Final = "cooling_down"
"""Reason of a rehearsal that picks nobody yet."""

Topology = Literal["regular", "pd"]


class Placement:
    """One attempt's upstream, counted in its load until ``Placer.release``.

    ``reason``: ``policy:<name>`` or the branch of the policy. ``is_trial``: it is the one request that a
    half-open breaker lets through; the placer's ``_is_tried``: and has not told how that went.
    """

    __slots__ = ("_is_held", "_is_tried", "is_trial", "policy", "reason", "upstream")

    def __init__(self, upstream: Upstream, policy: str, reason: str, is_trial: bool = False) -> None:
        self.upstream = upstream
        self.policy = policy
        self.reason = reason
        self.is_trial = is_trial
        self._is_tried = is_trial
        self._is_held = True

    def __repr__(self) -> str:
        return f"Placement({self.upstream.url} {self.reason})"


class Rehearsal(NamedTuple):
    """What a placement would have done: whom of ``candidates`` the policy picks, at which ``loads``.

    No candidates: the request would wait for the end of a cool-down.
    """

    registry: Registry
    candidates: Candidates
    loads: list[int]
    policy: Policy
    pick: Pick


class SessionUnassigned(Exception):
    """A new session under ``dp_sticky``: the controller has to choose one of ``numbers`` for it first."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__("the session has to be assigned first")
        self.numbers = numbers


class PlacementMetrics(Protocol):
    """What placement counts. ``model`` is already the bounded label value."""

    def selections(self, model: str, policy: str) -> BufferedCounter: ...

    def decided(self, policy: str, reason: str) -> None: ...

    def fallback(self, policy: str, reason: str) -> None: ...


class _Unheard:
    """Takes what a rehearsal would count."""

    def __init__(self, metrics: PlacementMetrics) -> None:
        self._metrics = metrics

    def selections(self, model: str, policy: str) -> BufferedCounter:
        return self._metrics.selections(model, policy)

    def decided(self, policy: str, reason: str) -> None: ...

    def fallback(self, policy: str, reason: str) -> None: ...


class _Route:
    """What placements on one endpoint for one model have in common; of the policy, what each of them asks.

    ``is_state_split``: stored state may lie on an upstream other than the one picked. ``only``: the pick
    where there is no choice, ``None`` where there is one.
    """

    __slots__ = ("candidates", "endpoint", "has_branches", "is_state_split", "model", "only", "policy",
                 "policy_name", "recorder", "selections")  # fmt: skip

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        candidates: Candidates,
        policy: Policy,
        selections: BufferedCounter,
        is_state_split: bool,
    ) -> None:
        self.endpoint = endpoint
        self.model = model
        self.candidates = candidates
        self.policy = policy
        self.policy_name = policy.name
        self.has_branches = policy.has_branches
        self.recorder = policy.recorder
        self.only = _only(candidates, policy)
        self.selections = selections
        self.is_state_split = is_state_split


class Placer:
    """Places the requests of one process in one pool of upstreams."""

    def __init__(
        self,
        source: RegistryBoard,
        loads: LoadTable,
        policies: PolicyTable,
        default_policy: str,
        metrics: PlacementMetrics,
        topology: Topology = "regular",
        *,
        conditions: Conditions,
    ) -> None:
        self._source = source
        self._loads = loads
        self._policies = PolicyChoice(policies, default_policy)
        self._metrics = metrics
        self._topology = topology
        self._ranked: frozenset[int] = frozenset()
        self.needs_session = False  # by the generation last seen: a policy in force reads the session key
        self._routes: dict[int, dict[str, _Route]] = {}  # by endpoint number and model
        self._last_route: _Route | None = None  # most requests are like the one before
        self._conditions = conditions
        self._availability = Availability(conditions)
        self._ids: dict[int, str] = {}  # whose each number was, as far as this process has seen
        self._held = 0
        self._registry = Registry(0, ())
        self._adopt(source.read())

    @property
    def needs(self) -> int:
        """The ``NEEDS`` bits for prepare jobs: what the policies in force read."""
        self._refresh()
        return self._policies.needs

    def needs_of(self, endpoint: Endpoint) -> int:
        """Return the ``NEEDS`` bits for a prepare job of ``endpoint``."""
        self._refresh()
        needs = 0 if endpoint.picks_by == "least_load" else self._policies.needs & ~NEEDS_SESSION
        return needs | NEEDS_RANK_FREE if endpoint.number in self._ranked else needs

    @property
    def registry(self) -> Registry:
        """The newest generation."""
        self._refresh()
        return self._registry

    def place(self, endpoint: Endpoint, view: RoutingView, tried: Collection[int] = ()) -> Placement:
        """Choose an upstream and count its load; ``tried``: upstream numbers of earlier attempts.

        Raises the ``MeshError`` of the first step that leaves nothing, and ``SessionUnassigned`` if the
        controller has to assign a session first. The caller owes one ``release``.
        """
        route = self._route(endpoint, view.model)
        if view.has_state and route.is_state_split:
            raise _state_is_split()
        trouble = self._conditions.trouble()
        is_trial = False
        if trouble is None:
            candidates = self._availability.untried(route.candidates, tried) if tried else route.candidates
            pick = self._pick(route, candidates, view, self._metrics)
        else:
            pick, is_trial = self._pick_in_trouble(route, endpoint, view, trouble, tried)
        upstream = pick.upstream
        if upstream is None:
            raise _none_picked()
        self._loads.add(upstream.number)
        self._held += 1
        if route.recorder is not None:
            route.recorder.record(upstream, view)
        route.selections.inc()
        return Placement(upstream, route.policy_name, pick.reason, is_trial)

    def rehearse(self, endpoint: Endpoint, view: RoutingView, max_wait_s: float) -> Rehearsal:
        """Return what ``place`` would do now, and leave no trace: nothing is counted, noted or begun.

        Raises what ``place`` would, but for a cool-down of at most ``max_wait_s``, which requests wait for.
        """
        route = self._route(endpoint, view.model)
        if view.has_state and route.is_state_split:
            raise _state_is_split()
        candidates, trouble = route.candidates, self._conditions.trouble()
        if trouble is not None:
            candidates = self._availability.narrow((endpoint.number, view.model), candidates, trouble, (), ())
        rotation = route.policy.rotation
        turn = 0 if rotation is None else rotation.turn
        try:
            pick = self._pick(route, candidates, view, _Unheard(self._metrics))
            if pick.upstream is None:
                raise _none_picked()
        except NoneAvailable as none:
            if none.wait_s > max_wait_s:
                raise
            pick = Pick(None, COOLING_DOWN)
        finally:
            if rotation is not None:
                rotation.turn = turn
        loads = self._loads.loads(candidates.numbers)
        return Rehearsal(self._registry, candidates, loads, route.policy, pick)

    def ready_in_s(self, endpoint: Endpoint, view: RoutingView) -> float:
        """Return 0 if a request could be placed now, else what ``NoneAvailable.wait_s`` would be."""
        try:
            route = self._route(endpoint, view.model)
        except MeshError:
            return math.inf
        return self._availability.wait_s(route.candidates, self._conditions.trouble() or CALM)

    def origins(self, endpoint: Endpoint) -> tuple[Upstream, ...]:
        """Return one upstream for each origin that a resource operation asks, sorted by URL.

        Raises ``MeshError`` when there is none to ask, or when one has to be asked with two keys.
        """
        self._refresh()
        return origins_of(self._registry, endpoint)

    def hold(self, upstream: Upstream, policy: str = FAN_OUT, reason: str = FAN_OUT) -> Placement:
        """Count the load of an upstream that is asked, not picked; the caller owes one ``release``."""
        self._loads.add(upstream.number)
        self._held += 1
        return Placement(upstream, policy, reason)

    def release(self, placement: Placement) -> None:
        """Give the load of ``placement`` back; ``RuntimeError`` if it was given back before."""
        if not placement._is_held:
            raise RuntimeError(f"{placement} was released twice")
        placement._is_held = False
        self._held -= 1
        self._loads.release(placement.upstream.number)
        if placement._is_tried:  # it ended without an outcome
            placement._is_tried = False
            self._conditions.end_trial(placement.upstream.number, "neutral")

    def report(self, placement: Placement, outcome: Outcome, began_s: float, ended_s: float) -> bool:
        """Tell the breaker how an exchange ended; once a placement, before its release.

        ``began_s``: when it was placed. False if a failure is lost: the controller has not listened for long.
        """
        number = placement.upstream.number
        if placement._is_tried:
            placement._is_tried = False
            self._conditions.end_trial(number, outcome)
        elif outcome == "failure":
            return self._conditions.failed(number, began_s, ended_s)
        if outcome == "success":
            self._conditions.succeeded(number, began_s, ended_s)
        return True

    def _refresh(self) -> None:
        if self._source.generation() != self._registry.generation:
            self._adopt(self._source.read())

    def _adopt(self, registry: Registry) -> None:
        for upstream in registry.upstreams:
            if self._ids.setdefault(upstream.number, upstream.id) != upstream.id:
                self._ids[upstream.number] = upstream.id
                self._conditions.forget(upstream.number)
        self._conditions.watch(upstream.number for upstream in registry.upstreams)
        self._registry = registry
        self._routes.clear()
        self._last_route = None
        self._availability.renew(registry)
        self._policies.renew(registry)
        self.needs_session = self._policies.needs & NEEDS_SESSION != 0
        ranks = [upstream for upstream in registry.upstreams if upstream.dp_rank is not None]
        self._ranked = frozenset(
            endpoint.number
            for endpoint in ENDPOINTS
            if any(upstream.rank_for(endpoint) is not None for upstream in ranks)
        )

    def _pick(
        self, route: _Route, candidates: Candidates, view: RoutingView, metrics: PlacementMetrics
    ) -> Pick:
        if route.only is not None and candidates is route.candidates:
            return route.only
        policy = route.policy
        pick = _only(candidates, policy) if len(candidates.upstreams) == 1 else None
        if pick is not None:
            return pick
        pick = policy.pick(candidates, view, self._loads)
        if route.has_branches and not pick.reason.startswith("policy:"):  # that is no branch
            metrics.decided(route.policy_name, pick.reason)
        if pick.fallback:
            metrics.fallback(route.policy_name, pick.fallback)
        if not candidates.upstreams:
            raise self._availability.none_of(route.candidates)
        if pick.reason == UNASSIGNED:
            raise SessionUnassigned(candidates.numbers)
        return pick

    def _pick_in_trouble(
        self,
        route: _Route,
        endpoint: Endpoint,
        view: RoutingView,
        trouble: Trouble,
        tried: Collection[int],
    ) -> tuple[Pick, bool]:
        """Pick among those that are left; the second value says that it is the trial of its upstream."""
        lost: set[int] = set()
        while True:
            key = endpoint.number, view.model
            candidates = self._availability.narrow(key, route.candidates, trouble, tried, lost)
            pick = self._pick(route, candidates, view, self._metrics)
            if pick.upstream is None or pick.upstream.number not in trouble.trying:
                return pick, False
            if self._conditions.try_trial(pick.upstream.number):
                return pick, True
            lost.add(pick.upstream.number)
            trouble = self._conditions.trouble() or CALM  # its breaker may have closed just now

    def _route(self, endpoint: Endpoint, model: str) -> _Route:
        """Return the route of the newest generation. Raises ``MeshError`` if there is none."""
        self._refresh()
        last = self._last_route
        if last is not None and last.endpoint is endpoint and last.model == model:
            return last
        by_model = self._routes.get(endpoint.number)
        route = None if by_model is None else by_model.get(model)
        if route is None:
            route = self._new_route(endpoint, model)
        self._last_route = route
        return route

    def _new_route(self, endpoint: Endpoint, model: str) -> _Route:
        if self._topology == "pd" and not endpoint.is_served_in_pd:
            raise MeshError("unsupported_api_topology", "Prefill and decode servers do not offer this API.")
        known = self._known(model)
        able = tuple(upstream for upstream in known if upstream.is_able(endpoint.capability))
        if not able:
            raise MeshError("unsupported_api", "No server of this model offers this API.")
        policy = self._policies.policy(endpoint, model, known)
        route = _Route(
            endpoint,
            model,
            Candidates(filter(is_available, able), self._registry),
            policy,
            self._metrics.selections(self.label_of(model), policy.name),
            _is_state_split(able),
        )
        by_model = self._routes.setdefault(endpoint.number, {})
        if len(by_model) >= _MAX_KEPT:
            by_model.clear()
        by_model[model] = route
        return route

    def _known(self, model: str) -> tuple[Upstream, ...]:
        known = self._registry.serving(model)
        if known:
            return known
        if not self._registry.upstreams:
            raise MeshError("no_workers", "No server is registered.")
        raise MeshError("model_not_found", f"No server serves the model {cut_name(model)}.")

    def label_of(self, model: str) -> str:
        """Return the bounded name of a model for metrics: itself, if an upstream lists it."""
        if not model:
            return "unknown"
        return model if self._registry.lists_model(model) else "other"

    def __repr__(self) -> str:
        return f"Placer(generation={self._registry.generation}, held={self._held})"


def _only(candidates: Candidates, policy: Policy) -> Pick | None:
    """Return the pick of a policy that has no choice."""
    if len(candidates) != 1 or policy.always_picks:
        return None
    return Pick(candidates.upstreams[0], f"policy:{policy.name}")


def _is_state_split(able: tuple[Upstream, ...]) -> bool:
    """Ranks of one origin share its state; unavailable upstreams count, for they may hold it."""
    origins = {upstream.base_url for upstream in able}
    return len(origins) > 1 and not all(upstream.shares_state for upstream in able)


def _none_picked() -> MeshError:
    return MeshError("policy_returned_none", "No server could be chosen for this request.")


def _state_is_split() -> MeshError:
    return MeshError(
        "stateful_routing_unsupported",
        "The request refers to stored state, and the servers of this model do not share theirs.",
    )
