"""The proof that a fast tokenizer engine gives the same ids as the reference, on text of every kind.

It runs in a forked child that is thrown away: encoding starts engine threads, and the process that loads
tokenizers must have none when it forks its prepare workers. The parent only waits on a pipe.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterable
from typing import Final, NoReturn

Encode = Callable[[str], list[int]]

PROOF_SEED: Final = 20240229
PROOF_TIMEOUT_S: Final = 300.0
_REASON_BYTES: Final = 2048


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


def prove_in_child(
    reference: Encode, candidate: Encode, texts: Iterable[str], timeout_s: float = PROOF_TIMEOUT_S
) -> str:
    """Run ``find_difference`` in a forked child and return its answer; a child that dies fails the proof.

    Call it in a process without threads: the child may use nothing that another thread had locked.
    Blocks until the child ends, ``timeout_s`` at most.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        _prove_and_exit(reference, candidate, texts, sending, timeout_s)
    os.close(sending)
    try:
        answer = _read_answer(receiving, timeout_s)
    finally:
        os.close(receiving)
        os.kill(child, signal.SIGKILL)  # not reaped yet, so the id is still the child's
        os.waitpid(child, 0)
    return answer


def _prove_and_exit(
    reference: Encode, candidate: Encode, texts: Iterable[str], sending: int, timeout_s: float
) -> NoReturn:
    # os._exit on every path: the child must never return into the parent's stack.
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(timeout_s) + 1)  # ends the child even if the parent is gone
        reason = find_difference(reference, candidate, texts)
        os.write(sending, b"=" if not reason else reason.encode()[:_REASON_BYTES])
    except BaseException as error:
        os.write(sending, f"the proof itself raised {type(error).__name__}".encode())
    finally:
        os._exit(0)


def _read_answer(receiving: int, timeout_s: float) -> str:
    poll = select.poll()
    poll.register(receiving, select.POLLIN)
    if not poll.poll(timeout_s * 1000):
        return f"the proof did not end within {timeout_s:g} s"
    answer = os.read(receiving, _REASON_BYTES)  # one write below PIPE_BUF arrives whole
    if not answer:
        return "the process that ran the proof died"
    return "" if answer == b"=" else answer.decode()
