"""Work done in a forked child that is thrown away, which answers with some short texts.

Encoding and downloading start threads, and a process that forks prepare workers must have none; what is
foreign may hang, or end its process. The parent waits on a pipe. The child writes once, less than a pipe
takes, and ends, so that it never waits for its parent; it dies with it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from meshd.control import die_with_parent
from meshd.prepare.alarm import alarm_held, drop_alarm

Work = Callable[[], Sequence[str]]

ANSWER_TIMEOUT_S: Final = 300.0
_PIPE_BYTES: Final = 65536
_ANSWERS_CHARACTERS: Final = 5400  # escaped to 12 bytes at most, they and their quotes fit the pipe


class NoAnswer(Exception):
    """The child came to no end; the text says why."""


def answers_of_child(work: Work, timeout_s: float = ANSWER_TIMEOUT_S) -> list[str]:
    """Run ``work`` in a forked child and return its answers, which are cut where they grow too long together.

    Call it in a process without threads: the child may use nothing that another thread had locked.
    Blocks until the child ends, ``timeout_s`` at most. Raises ``NoAnswer``.
    """
    child = receiving = 0
    try:
        with alarm_held():
            child, receiving = fork_for_answers(work, timeout_s)
        return read_answers(receiving, timeout_s)
    finally:
        if child:
            os.close(receiving)
            os.kill(child, signal.SIGKILL)  # not reaped yet, so the id is still the child's
            os.waitpid(child, 0)


def fork_for_answers(work: Work, timeout_s: float, cpu_s: float = 0.0) -> tuple[int, int]:
    """Run ``work`` in a forked child; return its pid and where ``read_answers`` finds its answers.

    It is killed by the kernel after ``timeout_s``, after ``cpu_s`` of CPU time unless that is 0, and when
    this process dies. Raises ``NoAnswer`` if there may be no more processes now.
    """
    parent = os.getpid()
    receiving, sending = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(receiving)
        os.close(sending)
        raise NoAnswer(f"there is no process for it: {error.strerror}") from error
    if child == 0:
        _answer_and_exit(work, sending, timeout_s, cpu_s, parent)
    os.close(sending)
    return child, receiving


def read_answers(receiving: int, timeout_s: float) -> list[str]:
    """Wait for what the child writes, ``timeout_s`` at most, and return it. Raises ``NoAnswer``."""
    poll = select.poll()  # select() knows no descriptor above 1023
    poll.register(receiving, select.POLLIN)
    deadline_s = time.monotonic() + timeout_s
    written = b""
    while True:
        if not poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            raise NoAnswer(f"it did not end within {timeout_s:g} s")
        piece = os.read(receiving, _PIPE_BYTES)
        if not piece:
            break
        written += piece
    if not written:
        raise NoAnswer("its process died")
    answers = json.loads(written)
    if isinstance(answers, str):
        raise NoAnswer(answers)
    return [str(answer) for answer in answers]


def _answer_and_exit(work: Work, sending: int, timeout_s: float, cpu_s: float, parent: int) -> NoReturn:
    # os._exit on every path: the child must never return into the parent's stack.
    try:
        die_with_parent(parent)
        drop_alarm()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.alarm(int(timeout_s) + 1)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answers = work()
        most = _ANSWERS_CHARACTERS // max(1, len(answers))
        os.write(sending, json.dumps([answer[:most] for answer in answers]).encode())
    except BaseException as error:
        os.write(sending, json.dumps(f"it raised {type(error).__name__}").encode())
    finally:
        os._exit(0)
