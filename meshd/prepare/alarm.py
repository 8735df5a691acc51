"""The alarm of a leader that loads: it may interrupt anything, so what it may not interrupt holds it.

An alarm can raise, to end the load (zygote.py). In the middle of a fork that would lose the child and its
pipe, or the exception: CPython ignores what is raised in the callbacks that run around a fork.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def alarm_held() -> Iterator[None]:
    """Let SIGALRM wait until the block has ended; it may raise in that moment. Forked children inherit it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def drop_alarm() -> None:
    """In a forked child: let SIGALRM end it, as in any process."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
