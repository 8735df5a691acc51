"""A process that imports for several children, forks them and ends; then they are ours (meshd/birth.py).

Only for the first processes of a node: a successor is to have fresh code, and finds nobody to be forked from.
While the nursery lives it stands for each of its children: to kill one is to kill it, and all of them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Final

from meshd.supervisor.child import Child

_ALL_BIRTHS: Final = 65536  # what a pipe holds: thousands of lines


class Nursery:
    """``births``: where the nursery writes the process ids of ``children``, in this order."""

    def __init__(self, process: subprocess.Popen[bytes], births: int, children: Sequence[Child]) -> None:
        self._process = process
        self._births = births
        self.children = children

    @property
    def pid(self) -> int:
        return self._process.pid

    def reap(self) -> list[int]:
        """Reap the nursery, which has ended; return the pid of each child, 0 for one that was not born."""
        self._process.wait()
        try:
            told = os.read(self._births, _ALL_BIRTHS)
        except BlockingIOError:  # nothing, and a child has not closed its end yet
            told = b""
        os.close(self._births)
        pids = [int(line) for line in told.split()]
        return pids + [0] * (len(self.children) - len(pids))

    def __repr__(self) -> str:
        return f"Nursery(pid={self.pid}, {len(self.children)} children)"
