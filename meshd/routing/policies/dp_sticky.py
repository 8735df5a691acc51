"""``dp_sticky``: a session stays with its upstream while that can serve, and sessions spread evenly.

A known session is looked up in the shared table (sessions.py). A new one, or one whose upstream can serve no
more, is assigned by the controller, one at a time, so that two processes that see it first agree: the pick is
then ``UNASSIGNED`` and whoever places asks, sets ``assigned`` in the view and picks again. When there is no
answer the session goes where consistent hashing sends it, for this once.
"""

from __future__ import annotations

from typing import Final

from meshd.api.view import NEEDS_SESSION, UNKNOWN_ASSIGNMENT, RoutingView
from meshd.routing.policies.consistent_hash import owner_of
from meshd.routing.policies.rotation import Rotation
from meshd.routing.policy import Candidates, Loads, Pick, Recorder
from meshd.routing.sessions import SessionId, SessionTable
from meshd.routing.upstream import Upstream

UNASSIGNED: Final = "unassigned"
"""Reason of a pick of no upstream: the session has to be assigned first."""


class DpSticky:
    """Pick by the session table; without a session key by load."""

    name: Final = "dp_sticky"
    needs: Final = NEEDS_SESSION
    uses_ring: Final = True
    has_branches: Final = False
    always_picks: Final = True

    def __init__(self, table: SessionTable, turn: int) -> None:
        self.recorder: Recorder = self
        self._table = table
        self.rotation = Rotation(turn)

    def pick(self, candidates: Candidates, view: RoutingView, loads: Loads) -> Pick:
        """Pick one; ``UNASSIGNED`` for a session that the controller has to assign."""
        if not candidates:
            return Pick(None, "policy:dp_sticky")
        if not view.session_key:
            return self._by_load(candidates, loads, "no_session_key")
        if view.assigned >= 0 and view.assigned in candidates.number_set:
            return Pick(candidates.upstreams[candidates.numbers.index(view.assigned)], "new_session")
        known = self._table.find(SessionId.of(view.session_key))
        if known is not None and known in candidates.number_set:
            return Pick(candidates.upstreams[candidates.numbers.index(known)], "sticky")
        if view.assigned == UNKNOWN_ASSIGNMENT and known not in candidates.tried:
            return Pick(None, UNASSIGNED)
        owner = owner_of(candidates, view.session_key)
        if owner is None:
            return self._by_load(candidates, loads, "no_owner")
        return Pick(owner, "policy:dp_sticky")

    def record(self, upstream: Upstream, view: RoutingView) -> None:
        """Keep a session alive that was sent to its upstream; nothing else is stored here."""
        if view.session_key:
            session = SessionId.of(view.session_key)
            if self._table.find(session) == upstream.number:
                self._table.refresh(session)

    def _by_load(self, candidates: Candidates, loads: Loads, fallback: str) -> Pick:
        place = self.rotation.least(loads.loads(candidates.numbers))
        return Pick(candidates.upstreams[place], "policy:dp_sticky", fallback)
