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

from meshd.control import name_process_as
from meshd.prepare.child_answers import fork_for_answers, read_answers

CHILD_NAME: Final = "meshd:proof"
PROOF_CPU_S: Final = 300.0
LONGEST_S: Final = 7200.0
"""In CPU time a proof has ``PROOF_CPU_S``. Of a busy CPU it gets one part in 70, which makes minutes of
its seconds: only one that does not move at all is ended by the clock on the wall."""

LAST_WORDS_S: Final = 10.0  # from the first byte of its answers to the end of the child
_NICENESS: Final = 10  # a tenth of a core that is busy otherwise: at 19 a proof of 5 s took minutes there


class ProofChild:
    """Runs ``work`` in a child from now on. Make it in a process without threads, and ``close`` it.

    Raises ``NoAnswer`` if there may be no more processes now.
    """

    def __init__(
        self,
        work: Callable[[], Sequence[str]],
        timeout_s: float = LONGEST_S,
        cpu_s: float = PROOF_CPU_S,
    ) -> None:
        self._pid, self._receiving = fork_for_answers(_at_leisure(work), timeout_s, cpu_s)
        self._poller = select.poll()  # select() knows no descriptor above 1023
        self._poller.register(self._receiving, select.POLLIN)

    def answers(self) -> list[str] | None:
        """Return the answers, ``None`` while there are none. Raises ``NoAnswer``."""
        if not self._poller.poll(0):
            return None
        return read_answers(self._receiving, LAST_WORDS_S)

    def close(self) -> None:
        """End and reap the child."""
        os.close(self._receiving)
        os.kill(self._pid, signal.SIGKILL)  # not reaped yet, so the id is still the child's
        os.waitpid(self._pid, 0)

    def __repr__(self) -> str:
        return f"ProofChild(pid={self._pid})"


def _at_leisure(work: Callable[[], Sequence[str]]) -> Callable[[], Sequence[str]]:
    def run() -> Sequence[str]:
        name_process_as(CHILD_NAME)
        os.nice(_NICENESS)
        return work()

    return run
