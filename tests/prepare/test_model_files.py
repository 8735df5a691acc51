from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshd.prepare.model_files import MOST_TOKENIZER_BYTES, check_tokenizer_file, read_text


def test_a_regular_file_of_the_most_bytes_is_read_and_one_more_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text("aé")
    assert read_text(file, 3) == "aé"
    with pytest.raises(OSError, match="larger than 2 bytes"):
        read_text(file, 2)


def test_a_pipe_that_nobody_writes_to_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        read_text(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        check_tokenizer_file(tmp_path / "pipe")


def test_a_device_without_end_is_refused_also_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/zero")
    for read in (read_text, check_tokenizer_file):
        with pytest.raises(OSError, match="no regular file"):
            read(tmp_path / "link")


def test_links_in_a_circle_and_directories_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "link")
    for path in (tmp_path / "link", tmp_path):
        for read in (read_text, check_tokenizer_file):
            with pytest.raises(OSError):
                read(path)


def test_a_tokenizer_of_an_incredible_size_is_refused_without_reading_it(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.touch()
    os.truncate(file, MOST_TOKENIZER_BYTES)  # a hole: it takes no room
    check_tokenizer_file(file)
    os.truncate(file, MOST_TOKENIZER_BYTES + 1)
    with pytest.raises(OSError, match="larger than"):
        check_tokenizer_file(file)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xff")
    with pytest.raises(UnicodeDecodeError):
        read_text(tmp_path / "text")
