from __future__ import annotations

import os

import pytest

from meshd.config import SETTINGS, Settings, WorkerSpec
from meshd.config.sources import Action, LoadResult
from meshd.errors import StartupError
from meshd.log import Log
from meshd.supervisor.reload import ConfigurationReload, changed_settings, describe_change


@pytest.fixture
def lines(tmp_path):
    """A log and a way to read it."""
    fd = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    yield Log("supervisor", "debug", stream_fd=fd), lambda: (tmp_path / "log").read_text()
    os.close(fd)


def result(**settings):
    return LoadResult(Settings(**settings), {}, Action.RUN)


def take(log, running, read):
    return ConfigurationReload(running, read, log).take(running)


def test_changed_settings_are_listed_in_order_of_declaration():
    changed = changed_settings(Settings(), Settings(queue_size=1, port=1))
    assert [each.name for each in changed] == ["port", "queue_size"]


def test_what_can_change_is_taken_and_what_needs_a_restart_stays(lines):
    log, text = lines
    found = take(log, Settings(), lambda: result(port=1, queue_size=7, shutdown_delay_secs=1.0))
    assert found is not None
    assert found.settings == Settings(queue_size=7, shutdown_delay_secs=1.0)
    assert 'live="shutdown_delay_secs 5.0 -> 1.0" new_processes="queue_size 100 -> 7"' in text()
    assert "level=warn event=configuration_needs_restart" in text()
    assert 'needs_restart="port 30000 -> 1"' in text()


def test_of_a_setting_that_holds_secrets_the_name_alone_is_logged(lines):
    log, text = lines
    workers = (WorkerSpec(url="http://a", api_key="k-other"),)
    take(log, Settings(api_key="k-old"), lambda: result(api_key="k-secret", workers=workers))
    assert "api_key" in text() and "workers" in text()
    assert not any(secret in text() for secret in ("k-secret", "k-old", "k-other"))


def test_an_invalid_configuration_changes_nothing_and_is_logged(lines):
    log, text = lines

    def read():
        raise StartupError("port: 70000 is too large", 2)

    assert take(log, Settings(), read) is None
    assert "configuration_refused" in text() and "70000 is too large" in text()


def test_an_equal_configuration_is_said_to_be_unchanged(lines):
    log, text = lines
    found = take(log, Settings(), result)
    assert found is not None and found.settings == Settings()
    assert "configuration_unchanged" in text()


def test_a_long_list_is_cut_and_an_empty_one_is_said_to_be_empty():
    (setting,) = (each for each in SETTINGS if each.name == "worker_urls")
    urls = tuple(f"http://10.0.0.{number}:8000" for number in range(50))
    text = describe_change(setting, Settings(), Settings(worker_urls=urls))
    assert text.startswith("worker_urls (empty) -> http://10.0.0.0:8000 ") and len(text) < 150


def test_log_files_are_opened_anew_even_without_a_way_to_read_the_configuration(tmp_path):
    log = Log("supervisor", "debug", log_dir=str(tmp_path))
    log.info("before")
    os.rename(tmp_path / "meshd.log", tmp_path / "meshd.log.1")
    assert take(log, Settings(), None) is None
    log.info("after")
    assert "after" in (tmp_path / "meshd.log").read_text()
    log.close()
