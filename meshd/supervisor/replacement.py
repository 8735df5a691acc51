"""The order of a rolling replacement, as a machine without clock, signals or processes.

Each *key* (child.py) goes its way; the new process is up before the old one leaves, and none of them leaves
before all new ones have loaded, so that a generation that cannot boot changes nothing::

    WAITING ─> BOOTING ─loaded─> LOADED ─┬─controller, leader─> LEAVING ─old gone─> TAKING ─ready─> DONE
                  │                      └─I/O process─> TAKING ─ready─> RETIRING ─old gone─> DONE
                  └─dead, or too late: all successors are dropped, the old ones stay

Controller and leaders write words that have one writer each, so the old one ends before the new one begins;
requests wait for that moment in a listen queue or on a ring. An I/O process shares nothing but its listening
socket: both accept until the old one is told to stop. I/O processes come last, for they count on the others.

``next_acts`` is called after every event. Past the point where the old ones begin to leave there is no way
back: a successor that dies then is started again as any child is, but an I/O process that never became ready
is dropped, and its predecessor stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from meshd.control import Role

Key = tuple[Role, int]

_SECOND: Final = 1_000_000_000
BOOT_LIMIT_NS: Final = 300 * _SECOND  # for all of them to load; systemd grants a start as much
SETTLE_LIMIT_NS: Final = 30 * _SECOND  # I/O processes wait no longer for leaders to be ready


class Progress(Enum):
    """How far a successor is."""

    BOOTING = 0
    LOADED = 1
    READY = 2
    DEAD = 3


@dataclass(frozen=True)
class Sight:
    """What is seen of one key. ``is_predecessor_gone``: the process that it served with before has ended."""

    progress: Progress
    is_predecessor_gone: bool = False


class Act(Enum):
    """What is to be done next for one key."""

    START = "start"
    HAND_OVER = "hand over"  # the old one ends, the successor waits for that
    TAKE_OVER = "take over"  # the successor begins
    RETIRE = "retire"  # the old I/O process ends what it has
    DROP = "drop"  # the successor goes, the old one stays


class _Stage(Enum):
    WAITING = 0
    BOOTING = 1
    LOADED = 2
    LEAVING = 3
    TAKING = 4
    RETIRING = 5
    DONE = 6
    LOST = 7


class Replacement:
    """One replacement of ``keys``. At most ``most_booting`` successors boot at a time."""

    def __init__(self, keys: Iterable[Key], most_booting: int, now_ns: int) -> None:
        self._stages = dict.fromkeys(keys, _Stage.WAITING)
        self._most_booting = most_booting
        self._boot_by_ns = now_ns + BOOT_LIMIT_NS
        self._settle_by_ns = 0
        self.is_committed = False
        self.lost: list[Key] = []

    def __repr__(self) -> str:
        stages = {f"{role}{number}": stage.name for (role, number), stage in self._stages.items()}
        return f"<replacement {stages}>"

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(self._stages)

    @property
    def is_given_up(self) -> bool:
        """Whether it failed before any old process left."""
        return bool(self.lost) and not self.is_committed

    @property
    def has_switched(self) -> bool:
        """Whether the new ones serve, as far as they ever will; old ones may still end what they have."""
        return self._are({_Stage.RETIRING, _Stage.DONE, _Stage.LOST})

    @property
    def is_over(self) -> bool:
        return self._are({_Stage.DONE, _Stage.LOST})

    def next_acts(self, now_ns: int, sights: Mapping[Key, Sight]) -> list[tuple[Act, Key]]:
        """Move on as far as what is seen allows. ``sights``: of every key that was started."""
        acts: list[tuple[Act, Key]] = []
        if not self.is_committed and not self.is_over:
            acts = self._boot(now_ns, sights)
        if self.is_committed:
            acts += [act for key in self._stages for act in self._switch(key, now_ns, sights[key])]
        return acts

    def stop(self) -> list[tuple[Act, Key]]:
        """Go no further than needed: the node is about to end."""
        if not self.is_committed:
            return self._give_up(list(self._stages))
        held = [key for key, stage in self._stages.items() if key[0] is Role.IO and stage is _Stage.LOADED]
        return [self._lose(key) for key in held]

    # ------------------------------------------------------------------------------------------ boot

    def _boot(self, now_ns: int, sights: Mapping[Key, Sight]) -> list[tuple[Act, Key]]:
        started = [key for key, stage in self._stages.items() if stage is not _Stage.WAITING]
        dead = [key for key in started if sights[key].progress is Progress.DEAD]
        if dead or now_ns > self._boot_by_ns:
            return self._give_up(dead or [key for key in started if self._stages[key] is _Stage.BOOTING])
        for key in started:
            if sights[key].progress is not Progress.BOOTING:
                self._stages[key] = _Stage.LOADED
        if self._are({_Stage.LOADED}):
            self.is_committed = True
            self._settle_by_ns = now_ns + SETTLE_LIMIT_NS
            return []
        free = self._most_booting - sum(stage is _Stage.BOOTING for stage in self._stages.values())
        due = [key for key, stage in self._stages.items() if stage is _Stage.WAITING][: max(0, free)]
        self._stages.update(dict.fromkeys(due, _Stage.BOOTING))
        return [(Act.START, key) for key in due]

    def _give_up(self, lost: list[Key]) -> list[tuple[Act, Key]]:
        started = [key for key, stage in self._stages.items() if stage is not _Stage.WAITING]
        self._stages = dict.fromkeys(self._stages, _Stage.LOST)
        self.lost = lost
        return [(Act.DROP, key) for key in started]

    # ---------------------------------------------------------------------------------------- switch

    def _switch(self, key: Key, now_ns: int, sight: Sight) -> list[tuple[Act, Key]]:
        stage = self._stages[key]
        is_io = key[0] is Role.IO
        if is_io and stage in (_Stage.LOADED, _Stage.TAKING) and sight.progress is Progress.DEAD:
            return [self._lose(key)]
        match stage:
            case _Stage.LOADED if not is_io:
                return self._move(key, _Stage.LEAVING, Act.HAND_OVER)
            case _Stage.LOADED if self._may_io_begin(now_ns):
                return self._move(key, _Stage.TAKING, Act.TAKE_OVER)
            case _Stage.LEAVING if sight.is_predecessor_gone:
                return self._move(key, _Stage.TAKING, Act.TAKE_OVER)
            case _Stage.TAKING if sight.progress is Progress.READY:
                return self._move(key, _Stage.RETIRING, Act.RETIRE) if is_io else self._move(key, _Stage.DONE)
            case _Stage.RETIRING if sight.is_predecessor_gone:
                return self._move(key, _Stage.DONE)
        return []

    def _may_io_begin(self, now_ns: int) -> bool:
        others = (stage for (role, _), stage in self._stages.items() if role is not Role.IO)
        return now_ns > self._settle_by_ns or all(stage is _Stage.DONE for stage in others)

    def _move(self, key: Key, stage: _Stage, *acts: Act) -> list[tuple[Act, Key]]:
        self._stages[key] = stage
        return [(act, key) for act in acts]

    def _lose(self, key: Key) -> tuple[Act, Key]:
        self._stages[key] = _Stage.LOST
        self.lost.append(key)
        return Act.DROP, key

    def _are(self, stages: set[_Stage]) -> bool:
        return all(stage in stages for stage in self._stages.values())
