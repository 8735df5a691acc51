"""Processes that end with the tests, whatever ends these: a node left behind takes a tenth of a CPU."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_prctl: Final = ctypes.CDLL(None).prctl  # found before the fork


def end_with_tests() -> Callable[[], None] | None:
    """Return a ``preexec_fn`` after which the kernel kills the program when the tests end.

    To the kernel the parent is the thread that starts it. Threads other than the first may end in the middle
    of a test, so there it is ``None``.
    """
    if threading.current_thread() is not threading.main_thread():
        return None

    def ask_the_kernel() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return ask_the_kernel
