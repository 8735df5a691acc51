"""Brings running children to the wanted settings and to fresh code, one replacement at a time.

What is wanted may change at any time; what runs is brought there when the replacement before has ended, its
old processes included, for a key has two seats and no third. Wishes that come meanwhile add up to one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from meshd.config import SETTINGS, Settings
from meshd.control import Role
from meshd.log import Log
from meshd.supervisor.child import Child, ChildSpec, Duty
from meshd.supervisor.children import Children
from meshd.supervisor.replacement import Act, Key, Progress, Replacement, Sight

_SECOND: Final = 1_000_000_000
_HAND_OVER_NS: Final = 8 * _SECOND  # a leader leaves at once, a controller when it has answered
_EXIT_NS: Final = 2 * _SECOND  # past its grace period an I/O process needs half of it
_ROLES: Final = (Role.CONTROLLER, Role.LEADER, Role.IO)  # demo upstreams are no part of the gateway


class Renewal:
    """``specs``: all seats, the spare ones too. ``in_force``: the settings that the children were given, as
    they were read; ``complete`` makes of such settings what children are told.
    """

    def __init__(
        self,
        children: Children,
        specs: Iterable[ChildSpec],
        in_force: Settings,
        complete: Callable[[Settings], Settings],
        most_booting: int,
        log: Log,
        clock: Callable[[], int],
    ) -> None:
        self._children = children
        self._specs = [spec for spec in specs if spec.role in _ROLES]
        self._complete = complete
        self._most_booting = most_booting
        self._log = log
        self._clock = clock
        self.in_force = in_force
        self._wanted = in_force
        self._wants_all = False
        self._target = in_force  # of the replacement that runs
        self._replacement: Replacement | None = None
        self._formers: dict[Key, Child] = {}
        self._started_ns = 0

    def __repr__(self) -> str:
        return f"<renewal {self._replacement} wants_all={self._wants_all}>"

    @property
    def wanted(self) -> Settings:
        """The settings that are or will be in force."""
        return self._wanted

    @property
    def is_pending(self) -> bool:
        """Whether something wanted is not yet served by new processes."""
        is_switching = self._replacement is not None and not self._replacement.has_switched
        return is_switching or self._wants_all or self._wanted != self.in_force

    def want(self, settings: Settings, *, everything: bool = False) -> None:
        """Bring the children to ``settings``, and with ``everything`` to fresh code; ``advance`` does it."""
        self._wanted = settings
        self._wants_all |= everything
        if self._replacement is not None and (self._wants_all or self._wanted != self._target):
            self._log.info("replacement_queued", message="it begins when the one that runs has ended")

    def advance(self, now_ns: int) -> None:
        """Do what is due; call it after every event."""
        if self._replacement is None and self._are_seats_free():
            self._begin(now_ns)
        while self._replacement is not None:
            acts = self._replacement.next_acts(now_ns, self._sights())
            self._settle(self._replacement)
            for act, key in acts:
                self._do(act, key)
            if not acts:
                return

    def stop(self) -> None:
        """Start nothing more; what has begun to leave is followed to its end."""
        self._wanted, self._wants_all = self.in_force, False
        if self._replacement is not None:
            for act, key in self._replacement.stop():
                self._do(act, key)
            self._settle(self._replacement)

    # --------------------------------------------------------------------------------------- begin, end

    def _are_seats_free(self) -> bool:
        """Whether nobody is left of the replacement before; successors that it dropped take time to die."""
        return all(child.duty is Duty.SERVING for child in self._children.all)

    def _begin(self, now_ns: int) -> None:
        roles = set(_ROLES) if self._wants_all else readers_of_changes(self.in_force, self._wanted)
        self._target, self._wants_all = self._wanted, False
        keys = list(dict.fromkeys(spec.key for spec in self._specs if spec.role in roles))
        if not keys:
            self._put_in_force(self._target)
            return
        self._started_ns = now_ns
        self._formers = {}
        self._replacement = Replacement(keys, self._most_booting, now_ns)
        self._log.info("replacement_started", children=" ".join(_name(key) for key in keys))

    def _settle(self, replacement: Replacement) -> None:
        """Take note of how far it came."""
        if replacement.is_committed and self.in_force is not self._target:
            self._put_in_force(self._target)
        if not replacement.is_over:
            return
        self._replacement = None
        took_s = (self._clock() - self._started_ns) / _SECOND
        if replacement.is_given_up:
            self._log.error(
                "replacement_given_up",
                children=" ".join(_name(key) for key in replacement.lost),
                message="new processes could not start; the old ones and their settings stay",
            )
            if self._wanted == self._target:
                self._wanted = self.in_force
        elif replacement.lost:
            lost = " ".join(_name(key) for key in replacement.lost)
            self._log.error("replacement_incomplete", children=lost, message="the old ones of these stay")
        else:
            self._log.info("replacement_done", took_s=took_s)

    def _put_in_force(self, settings: Settings) -> None:
        self.in_force = settings
        told = self._complete(settings).to_dict()
        for child in self._children.all:
            child.settings = told

    # -------------------------------------------------------------------------------------------- acts

    def _sights(self) -> dict[Key, Sight]:
        return {key: self._sight(key, former) for key, former in self._formers.items()}

    def _sight(self, key: Key, former: Child) -> Sight:
        child = self._children.successor(key) or self._children.serving(key)
        if child is former:  # its successor was dropped
            progress = Progress.DEAD
        elif child.is_ready:
            progress = Progress.READY
        elif not child.is_alive:
            progress = Progress.DEAD
        else:
            progress = Progress.LOADED if child.is_loaded else Progress.BOOTING
        return Sight(progress, is_predecessor_gone=not former.is_alive)

    def _do(self, act: Act, key: Key) -> None:
        children, now_ns = self._children, self._clock()
        match act:
            case Act.START:
                self._formers[key] = children.serving(key)
                children.start_successor(self._free_spec(key), self._complete(self._target).to_dict())
            case Act.HAND_OVER:
                children.replace(key, {"t": "hand_over"}, now_ns + _HAND_OVER_NS)
            case Act.TAKE_OVER:
                children.take_over(key)
            case Act.RETIRE:
                grace_s = self.in_force.shutdown_grace_period_secs
                leave_by_ns = now_ns + int(grace_s * _SECOND) + _EXIT_NS
                children.replace(key, {"t": "retire", "grace_s": grace_s}, leave_by_ns)
                children.take_over(key)
            case Act.DROP:
                children.drop_successor(key)

    def _free_spec(self, key: Key) -> ChildSpec:
        taken = {child.spec.seat for child in self._children.all}
        return next(spec for spec in self._specs if spec.key == key and spec.seat not in taken)


def readers_of_changes(running: Settings, wanted: Settings) -> set[Role]:
    """Return the kinds of children that a change from one to the other replaces."""
    return {
        Role(reader)
        for each in SETTINGS
        if each.takes_effect == "processes" and getattr(running, each.name) != getattr(wanted, each.name)
        for reader in each.readers
    }


def _name(key: Key) -> str:
    return f"{key[0]}{key[1]}"
