from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshd.errors import StartupError
from meshd.log import Log

_NOW = 1_790_000_000_123_000_000
_HEAD = "ts=2026-09-21T14:13:20.123Z level={level} event={event}"


class Stream:
    """A pipe in the place of stderr."""

    def __init__(self) -> None:
        self.reader, self.fd = os.pipe()
        os.set_blocking(self.reader, False)

    def lines(self) -> list[str]:
        try:
            return os.read(self.reader, 1 << 20).decode().splitlines()
        except BlockingIOError:
            return []


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream()
    yield made
    os.close(made.reader)
    os.close(made.fd)


def make_log(stream: Stream, level: str = "info", **options: Any) -> Log:
    return Log("io0", level, stream_fd=stream.fd, wall_clock=lambda: _NOW, **options)


def test_a_life_cycle_line_is_written_at_once(stream: Stream) -> None:
    make_log(stream).info("started", pid=7, cpus="0-1")
    assert stream.lines() == [_HEAD.format(level="info", event="started") + " process=io0 pid=7 cpus=0-1"]


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("debug", ["debug", "info", "warn", "error"]),
        ("info", ["info", "warn", "error"]),
        ("warn", ["warn", "error"]),
        ("error", ["error"]),
    ],
)
def test_lines_below_the_level_are_not_written(stream: Stream, level: str, written: list[str]) -> None:
    log = make_log(stream, level)
    log.debug("e")
    log.info("e")
    log.warning("e")
    log.error("e")
    assert [line.split()[1] for line in stream.lines()] == [f"level={each}" for each in written]


def test_access_lines_wait_for_a_flush(stream: Stream) -> None:
    log = make_log(stream)
    log.access({"status": 200, "path": "/v1/models?x=1", "error_code": ""})
    assert stream.lines() == []
    assert log.flush() is False
    assert stream.lines() == [_HEAD.format(level="info", event="access") + " status=200 path=/v1/models"]


def test_a_flush_writes_a_bounded_number_and_says_that_there_are_more(stream: Stream) -> None:
    log = make_log(stream)
    for status in range(5):
        log.access({"status": status})
    assert log.flush(max_lines=3) is True
    assert len(stream.lines()) == 3
    assert log.flush(max_lines=3) is False
    assert [line.split()[-1] for line in stream.lines()] == ["status=3", "status=4"]


def test_routine_requests_are_debug(stream: Stream) -> None:
    for level in ("info", "debug"):
        log = make_log(stream, level)
        log.access({"path": "/health"}, is_routine=True)
        log.flush()
    assert [line.split()[1] for line in stream.lines()] == ["level=debug"]


def test_access_lines_are_off_above_info(stream: Stream) -> None:
    log = make_log(stream, "warn")
    log.access({"status": 200})
    assert log.waiting == 0


def test_access_lines_beyond_the_queue_are_dropped_and_counted(stream: Stream) -> None:
    log = make_log(stream)
    for _ in range(10_002):
        log.access({"status": 200})
    assert (log.waiting, log.dropped) == (10_000, 2)
    assert repr(log) == "Log(io0 level=info waiting=10000 dropped=2)"


def test_a_stalled_reader_stops_nobody_and_costs_lines_only_beyond_the_queue(stream: Stream) -> None:
    log = make_log(stream)
    for number in range(20_000):
        log.info("step", number=number, text="x" * 100)
    assert log.waiting == 10_000
    assert 0 < log.dropped < 10_000


def test_json_lines_are_objects(stream: Stream) -> None:
    log = make_log(stream, is_json=True)
    log.access({"model": "a\nb", "total_ms": 1.23456, "stream": True})
    log.flush()
    log.warning("slow")
    first, second = map(json.loads, stream.lines())
    ts = "2026-09-21T14:13:20.123Z"
    assert first == {
        "ts": ts, "level": "info", "event": "access", "model": "a\nb", "total_ms": 1.235, "stream": True
    }  # fmt: skip
    assert second == {"ts": ts, "level": "warn", "event": "slow", "process": "io0"}


def test_the_log_file_gets_the_same_lines_and_survives_rotation(stream: Stream, tmp_path: Path) -> None:
    log = make_log(stream, log_dir=str(tmp_path))
    log.info("before")
    (tmp_path / "meshd.log").rename(tmp_path / "meshd.log.1")
    log.reopen()
    log.info("after")
    log.close()
    old, new = (tmp_path / "meshd.log.1").read_text(), (tmp_path / "meshd.log").read_text()
    assert [line + "\n" for line in stream.lines()] == [old, new]
    assert "event=before" in old and "event=after" in new


def test_a_log_file_that_cannot_be_opened_anew_is_kept_and_told(stream: Stream, tmp_path: Path) -> None:
    log = make_log(stream, log_dir=str(tmp_path))
    (tmp_path / "meshd.log").rename(tmp_path / "meshd.log.1")
    (tmp_path / "meshd.log").mkdir()
    log.reopen()
    log.info("later")
    log.close()
    lines = (tmp_path / "meshd.log.1").read_text().splitlines()
    assert "event=log_not_reopened" in lines[0] and "Is a directory" in lines[0]
    assert "event=later" in lines[1]


def test_a_log_directory_that_is_not_there_is_a_startup_error(stream: Stream, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"meshd\.log cannot be opened: No such file"):
        make_log(stream, log_dir=str(tmp_path / "none"))


def test_closing_writes_what_waits(stream: Stream) -> None:
    log = make_log(stream)
    log.access({"status": 200})
    log.close()
    assert len(stream.lines()) == 1


def test_a_changed_level_and_form_hold_from_then_on(stream: Stream) -> None:
    log = make_log(stream)
    log.debug("unseen")
    log.configure("debug", is_json=True)
    log.debug("seen")
    (line,) = stream.lines()
    assert json.loads(line)["event"] == "seen"
