"""Reads the files of a model, whatever lies at their paths.

Paths come from operators, labels and other people's directories. A pipe that nobody writes to would hold its
reader for ever, and a device or a file of many GiB fill its memory: only regular files are read, and none
that is larger than any such file has a reason to be.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

MOST_TEXT_BYTES: Final = 16 << 20
"""Of a template or a configuration; the largest ones published are below 2 MiB."""

MOST_TOKENIZER_BYTES: Final = 1 << 30
"""Of a ``tokenizer.json``; those of the largest vocabularies are below 64 MiB."""


def read_text(file: Path, most_bytes: int = MOST_TEXT_BYTES) -> str:
    """Return the UTF-8 text of a regular file.

    Raises ``OSError``, also for what is no regular file or too large, and ``UnicodeDecodeError``.
    """
    fd = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # non-blocking: opening a pipe waits
    try:
        _check(os.fstat(fd), file, most_bytes)
        with open(fd, "rb", closefd=False) as opened:
            data = opened.read(most_bytes + 1)  # a file of /proc has no size before it is read
    finally:
        os.close(fd)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes", str(file))
    return data.decode("utf-8")


def check_tokenizer_file(file: Path) -> None:
    """Raise ``OSError`` unless ``file`` is a regular file of a credible size."""
    _check(os.stat(file), file, MOST_TOKENIZER_BYTES)


def _check(status: os.stat_result, file: Path, most_bytes: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(file))
    if status.st_size > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes", str(file))
