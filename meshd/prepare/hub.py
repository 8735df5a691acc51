"""Where a tokenizer's files are: a source is a path, or the id of a repository on the Hugging Face hub.

A download runs in a forked child that is thrown away: the hub's client starts threads, and a process that
forks prepare workers must have none. What it fetched lies in the hub's own cache afterwards.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from meshd.prepare.child_answers import NoAnswer, answers_of_child

FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""What is fetched; all but the first may be missing."""

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

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
    def work() -> tuple[str, str]:
        try:
            return "fetched", fetch(source)
        except BaseException as error:
            return "failed", f"{type(error).__name__}: {error}".split("\n")[0]

    try:
        told, answer = answers_of_child(work, timeout_s)
    except NoAnswer as none:
        told, answer = "failed", str(none)
    if told == "failed":
        raise SourceNotFound(f"{source} is no path here and cannot be fetched: {answer}")
    return answer
