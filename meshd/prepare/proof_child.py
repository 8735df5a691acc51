"""A proof that goes on while its leader works: in a forked child of low priority, polled for its answers.

The child is thrown away, because encoding starts engine threads, and a leader must have none when it forks
its prepare workers. It dies with its leader.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Sequence
from typing import Final

from meshd.control import die_with_parent, name_process_as
from meshd.prepare.engine_proof import PROOF_TIMEOUT_S, answer_and_exit, read_answers

CHILD_NAME: Final = "meshd:proof"
_LOWEST_PRIORITY: Final = 19


class ProofChild:
    """Runs ``work`` in a child from now on. Make it in a process without threads, and ``close`` it."""

    def __init__(self, work: Callable[[], Sequence[str]], timeout_s: float = PROOF_TIMEOUT_S) -> None:
        leader = os.getpid()
        self._receiving, sending = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            answer_and_exit(_at_leisure(work, leader), sending, timeout_s)
        os.close(sending)

    def answers(self) -> list[str] | None:
        """Return the answers, ``None`` while there are none. Raises ``ProofBroken``."""
        if not select.select([self._receiving], [], [], 0)[0]:
            return None
        return read_answers(self._receiving)

    def close(self) -> None:
        """End and reap the child."""
        os.close(self._receiving)
        os.kill(self._pid, signal.SIGKILL)  # not reaped yet, so the id is still the child's
        os.waitpid(self._pid, 0)

    def __repr__(self) -> str:
        return f"ProofChild(pid={self._pid})"


def _at_leisure(work: Callable[[], Sequence[str]], leader: int) -> Callable[[], Sequence[str]]:
    def run() -> Sequence[str]:
        die_with_parent(leader)
        name_process_as(CHILD_NAME)
        os.nice(_LOWEST_PRIORITY)
        return work()

    return run
