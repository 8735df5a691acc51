from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from meshd.prepare.engine_proof import find_difference, prove_in_child


def by_bytes(text: str) -> list[int]:
    return list(text.encode())


def test_equal_engines_pass_in_a_child():
    assert prove_in_child(by_bytes, lambda text: list(text.encode()), ["", "a", "é"]) == ""


def test_one_differing_id_fails_and_its_text_is_numbered():
    def differs_on_joiner(text: str) -> list[int]:
        return [0 if byte == 0x8D else byte for byte in text.encode()]

    reason = prove_in_child(by_bytes, differs_on_joiner, ["a", "b\u200d", "c"])
    assert reason == "its ids differ on proof text 1 (2 characters)"


def test_an_exception_and_a_panic_fail_the_proof():
    class Panic(BaseException):
        pass

    def raises(error: BaseException):
        def encode(text: str) -> list[int]:
            raise error

        return encode

    assert find_difference(by_bytes, raises(ValueError()), ["a"]) == "it raised ValueError on proof text 0"
    assert prove_in_child(by_bytes, raises(Panic()), ["a"]) == "it raised Panic on proof text 0"


def test_a_reference_that_raises_is_told_apart():
    def broken(text: str) -> list[int]:
        raise RuntimeError

    assert prove_in_child(broken, by_bytes, ["a"]) == "the proof itself raised RuntimeError"


def test_a_child_that_dies_fails_the_proof():
    def dies(text: str) -> list[int]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    assert prove_in_child(by_bytes, dies, ["a"]) == "the process that ran the proof died"


def test_a_child_that_hangs_is_killed_at_the_time_limit():
    def hangs(text: str) -> list[int]:
        time.sleep(600)
        return []

    before = children()
    assert prove_in_child(by_bytes, hangs, ["a"], timeout_s=0.2) == "the proof did not end within 0.2 s"
    assert children() <= before


def children() -> set[str]:
    """The child processes of this one, zombies included; other tests may have left some."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def test_the_parent_runs_no_engine():
    seen: list[str] = []

    def remembers(text: str) -> list[int]:
        seen.append(text)
        return list(text.encode())

    assert prove_in_child(remembers, remembers, ["a", "b"]) == ""
    assert seen == []
