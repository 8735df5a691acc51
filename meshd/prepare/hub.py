"""Where a tokenizer's files are: a source is a path, or the id of a repository on the Hugging Face hub.

A download runs in a forked child that is thrown away: the hub's client starts threads, and a process that
forks prepare workers must have none. What it fetched lies in the hub's own cache afterwards.
"""

from __future__ import annotations

import os
import re
import select
import signal
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NoReturn

from meshd.control import die_with_parent
from meshd.prepare.alarm import alarm_held, drop_alarm

FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""What is fetched; all but the first may be missing."""

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_ANSWER_BYTES: Final = 4096

Fetch = Callable[[str], str]
"""Fetches the files of a hub id and returns the directory that holds them; raises what it likes."""


class SourceNotFound(Exception):
    """There is no such path, and no such repository can be fetched; the text says which and why."""


def find_source(source: str, timeout_s: float, fetch: Fetch | None = None) -> str:
    """Return the path of ``source``, which is fetched if it is a hub id. Raises ``SourceNotFound``.

    Call it in a process without threads. Blocks for a download, ``timeout_s`` at most.
    """
    if os.path.exists(source):
        return source
    if not _HUB_ID.fullmatch(source):
        raise SourceNotFound(f"{source}: no such file or directory")
    if fetch is None:
        if find_spec("huggingface_hub") is None:
            raise SourceNotFound(f"{source} is no path here, and huggingface_hub is not installed")
        fetch = fetch_from_hub
    return _fetch_in_child(source, timeout_s, fetch)


def fetch_from_hub(repository: str) -> str:
    """Download the files of a repository into the hub's cache. Starts threads."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    first = hf_hub_download(repository, FILES[0])
    for name in FILES[1:]:
        try:
            hf_hub_download(repository, name)
        except EntryNotFoundError:
            continue
    return str(Path(first).parent)


def _fetch_in_child(source: str, timeout_s: float, fetch: Fetch) -> str:
    child = receiving = 0
    try:
        with alarm_held():
            child, receiving = _fork(source, fetch)
        answer = _read_answer(receiving, timeout_s)
    finally:
        if child:
            os.close(receiving)
            os.kill(child, signal.SIGKILL)  # not reaped yet, so the id is still the child's
            os.waitpid(child, 0)
    if not answer.startswith("="):
        raise SourceNotFound(f"{source} is no path here and cannot be fetched: {answer}")
    return answer[1:]


def _fork(source: str, fetch: Fetch) -> tuple[int, int]:
    parent = os.getpid()
    receiving, sending = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(receiving)
        os.close(sending)
        raise SourceNotFound(f"{source} cannot be fetched: {error.strerror}") from error
    if child == 0:
        _fetch_and_exit(source, fetch, sending, parent)
    os.close(sending)
    return child, receiving


def _fetch_and_exit(source: str, fetch: Fetch, sending: int, parent: int) -> NoReturn:
    # os._exit on every path: the child must never return into the parent's stack.
    try:
        die_with_parent(parent)
        drop_alarm()
        answer = "=" + fetch(source)
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}".split("\n")[0]
    try:
        os.write(sending, answer.encode("utf-8", "replace")[:_ANSWER_BYTES])
    finally:
        os._exit(0)


def _read_answer(receiving: int, timeout_s: float) -> str:
    poll = select.poll()
    poll.register(receiving, select.POLLIN)
    if not poll.poll(max(0.0, timeout_s) * 1000):
        return f"it took longer than {timeout_s:.0f} s"
    return os.read(receiving, _ANSWER_BYTES).decode(errors="replace") or "the process that fetched it died"
