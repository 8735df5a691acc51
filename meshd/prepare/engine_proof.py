"""The proof that a fast tokenizer engine gives the same ids as the reference, on text of every kind.

It runs, with the cut proof, in a forked child that is thrown away: encoding starts engine threads, and the
process that loads tokenizers must have none when it forks its prepare workers. The parent waits on a pipe.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NoReturn

from meshd.control import die_with_parent
from meshd.prepare.alarm import alarm_held, drop_alarm

Encode = Callable[[str], list[int]]

PROOF_SEED: Final = 20240229
PROOF_TIMEOUT_S: Final = 300.0
_REASON_CHARACTERS: Final = 100  # three reasons, each character escaped to 12, stay below PIPE_BUF


class ProofBroken(Exception):
    """The proof came to no end; the text says why."""


def find_difference(reference: Encode, candidate: Encode, texts: Iterable[str]) -> str:
    """Return why ``candidate`` is not equal to ``reference`` on ``texts``, empty if it is."""
    for number, text in enumerate(texts):
        expected = reference(text)
        try:
            ids = candidate(text)
        # A panic of a Rust engine is a BaseException; any of them fails the proof.
        except BaseException as error:
            return f"it raised {type(error).__name__} on proof text {number}"
        if ids != expected:
            return f"its ids differ on proof text {number} ({len(text)} characters)"
    return ""


def answers_of_child(work: Callable[[], Sequence[str]], timeout_s: float = PROOF_TIMEOUT_S) -> list[str]:
    """Run ``work`` in a forked child and return its answers, each cut to 100 characters.

    Call it in a process without threads: the child may use nothing that another thread had locked.
    Blocks until the child ends, ``timeout_s`` at most. Raises ``ProofBroken`` if there is no answer.
    """
    child = receiving = 0
    try:
        with alarm_held():
            child, receiving = fork_for_answers(work, timeout_s)
        return _answers_in_time(receiving, timeout_s)
    finally:
        if child:
            os.close(receiving)
            os.kill(child, signal.SIGKILL)  # not reaped yet, so the id is still the child's
            os.waitpid(child, 0)


def fork_for_answers(
    work: Callable[[], Sequence[str]], timeout_s: float, cpu_s: float = 0.0
) -> tuple[int, int]:
    """Run ``work`` in a forked child; return its pid and where ``read_answers`` finds its answers.

    It is killed by the kernel after ``timeout_s``, after ``cpu_s`` of CPU time unless that is 0, and when
    this process dies. Raises ``ProofBroken`` if there may be no more processes now.
    """
    parent = os.getpid()
    receiving, sending = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(receiving)
        os.close(sending)
        raise ProofBroken(f"there is no process for it: {error.strerror}") from error
    if child == 0:
        _answer_and_exit(work, sending, timeout_s, cpu_s, parent)
    os.close(sending)
    return child, receiving


def _answer_and_exit(
    work: Callable[[], Sequence[str]], sending: int, timeout_s: float, cpu_s: float, parent: int
) -> NoReturn:
    # os._exit on every path: the child must never return into the parent's stack.
    try:
        die_with_parent(parent)
        drop_alarm()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.alarm(int(timeout_s) + 1)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answers = [answer[:_REASON_CHARACTERS] for answer in work()]
        os.write(sending, json.dumps(answers).encode())
    except BaseException as error:
        os.write(sending, json.dumps(f"it raised {type(error).__name__}").encode())
    finally:
        os._exit(0)


def _answers_in_time(receiving: int, timeout_s: float) -> list[str]:
    poll = select.poll()
    poll.register(receiving, select.POLLIN)
    if not poll.poll(timeout_s * 1000):
        raise ProofBroken(f"it did not end within {timeout_s:g} s")
    return read_answers(receiving)


def read_answers(receiving: int) -> list[str]:
    """Read what the child has written. Raises ``ProofBroken`` if it has died before."""
    written = os.read(receiving, select.PIPE_BUF)  # one write below PIPE_BUF arrives whole
    if not written:
        raise ProofBroken("its process died")
    answers = json.loads(written)
    if isinstance(answers, str):
        raise ProofBroken(answers)
    return [str(answer) for answer in answers]
