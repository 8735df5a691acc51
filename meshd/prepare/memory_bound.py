"""Bounds what a process may allocate from now on, so that foreign code cannot take the memory of the node.

``RLIMIT_DATA`` counts private writable memory, as mapped and not as touched, and none that is shared. Over
the limit CPython raises ``MemoryError``, which ends a rendering; an engine in Rust aborts, which ends the
process.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Final

_STATM: Final = Path("/proc/self/statm")
_DATA_FIELD: Final = 5


def data_bytes() -> int:
    """Return what counts against ``RLIMIT_DATA`` now."""
    return int(_STATM.read_text("ascii").split()[_DATA_FIELD]) * resource.getpagesize()


def bound_data(most_bytes: int) -> None:
    """Let this process have no more than ``most_bytes`` in all, as far as its hard limit allows.

    May be called again, with more too. About 1 µs.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        most_bytes = min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, hard))


class JobMemory:
    """The bound of a prepare worker: what it has when this is made, and so much for each job.

    A job needs some dozen times its body while that is parsed, hence a larger bound for a larger body.
    """

    def __init__(self, job_bytes: int, bytes_a_byte: int, free_body_bytes: int) -> None:
        self._least = data_bytes() + job_bytes
        self._bytes_a_byte = bytes_a_byte
        self._free_body_bytes = free_body_bytes
        self._is_raised = False
        bound_data(self._least)

    def prepare_for(self, body_bytes: int) -> None:
        """Set the bound for a job; free for bodies that are not larger than most."""
        if body_bytes > self._free_body_bytes:
            self._is_raised = True
            bound_data(self._least + body_bytes * self._bytes_a_byte)
        elif self._is_raised:
            self._is_raised = False
            bound_data(self._least)

    def __repr__(self) -> str:
        return f"JobMemory({self._least} bytes, raised={self._is_raised})"
