from __future__ import annotations

import os

import pytest

from meshd.config import Action, LoadResult, Settings
from meshd.errors import StartupError
from meshd.log import Log
from meshd.supervisor.reload import ConfigurationReload, changed_settings


@pytest.fixture
def lines(tmp_path):
    """A log and a way to read it."""
    fd = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    yield Log("supervisor", "debug", stream_fd=fd), lambda: (tmp_path / "log").read_text()
    os.close(fd)


def result(**settings):
    return LoadResult(Settings(**settings), {}, Action.RUN)


def test_changed_settings_are_named_in_order_of_declaration():
    assert changed_settings(Settings(), Settings(queue_size=1, port=1)) == ["port", "queue_size"]


def test_a_change_is_said_to_need_a_restart_without_its_value(lines):
    log, text = lines
    ConfigurationReload(Settings(), lambda: result(api_key="k-secret", port=1), log).take()
    assert "needs_restart" in text() and "port" in text() and "api_key" in text()
    assert "k-secret" not in text()


def test_an_invalid_configuration_changes_nothing_and_is_logged(lines):
    log, text = lines

    def read():
        raise StartupError("port: 70000 is too large", 2)

    ConfigurationReload(Settings(), read, log).take()
    assert "configuration_refused" in text() and "70000 is too large" in text()


def test_an_equal_configuration_is_said_to_be_unchanged(lines):
    log, text = lines
    ConfigurationReload(Settings(), result, log).take()
    assert "configuration_unchanged" in text()


def test_log_files_are_opened_anew_even_without_a_way_to_read_the_configuration(tmp_path):
    log = Log("supervisor", "debug", log_dir=str(tmp_path))
    log.info("before")
    os.rename(tmp_path / "meshd.log", tmp_path / "meshd.log.1")
    ConfigurationReload(Settings(), None, log).take()
    log.info("after")
    assert "after" in (tmp_path / "meshd.log").read_text()
    log.close()
