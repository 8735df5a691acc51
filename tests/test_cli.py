from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meshd import __version__, cli
from meshd.errors import StartupError

# Every shared flag that meshd has so far, with the syntax of the documentation.
_SHARED = """
--host 127.0.0.1 --port 0 --prometheus-host :: --prometheus-port 0 --worker-urls http://a http://b --api-key k
--enable-igw --policy random --max-payload-size 1_000 --max-concurrent-requests -1 --queue-size 0
--queue-timeout-secs 1.5 --request-id-headers x-a x-b --request-timeout-secs 10 --health-check-endpoint /h
--health-check-interval-secs 9 --health-check-timeout-secs 3 --health-failure-threshold 1
--health-success-threshold 1 --log-level warning
"""


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in os.environ if each.startswith("MESHD_")]:
        monkeypatch.delenv(name)


class Called:
    """Stands in for a module that a command hands over to, and keeps what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str, function: str) -> None:
        self.args: list[tuple[Any, ...]] = []
        self.options: dict[str, Any] = {}
        fake = ModuleType(module)
        setattr(fake, function, self._call)
        monkeypatch.setitem(sys.modules, module, fake)

    def _call(self, *args: Any, **options: Any) -> int:
        self.args.append(args)
        self.options = options
        return 7


@pytest.mark.parametrize("words", [[], ["launch"], ["start"]])
def test_the_words_for_launching_parse_alike(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    called = Called(monkeypatch, "meshd.supervisor", "run")
    assert cli.main([*words, "--port", "0"]) == 7
    settings, sources = called.args[0]
    assert (settings.port, sources["port"]) == (0, "flag")


def test_the_supervisor_can_read_the_same_places_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = Called(monkeypatch, "meshd.supervisor", "run")
    file = tmp_path / "m.toml"
    file.write_text("queue_size = 1\n")
    monkeypatch.setenv("NOTIFY_SOCKET", "@x")
    assert cli.main(["launch", "--config", str(file), "--port", "0"]) == 7
    file.write_text("queue_size = 2\n")
    again = called.options["reload"]().settings
    assert (called.args[0][0].queue_size, again.queue_size, again.port) == (1, 2, 0)
    assert called.options["notify_socket"] == "@x"


def test_every_shared_flag_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    called = Called(monkeypatch, "meshd.supervisor", "run")
    assert cli.main(_SHARED.split()) == 7
    assert called.args[0][0].worker_urls == ("http://a", "http://b")


@pytest.mark.parametrize(
    ("command", "module"), [("backend", "meshd.backend.process"), ("ps", "meshd.supervisor.ps")]
)
def test_other_commands_get_the_rest_of_the_words(
    command: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = Called(monkeypatch, module, "main")
    # Importing a submodule imports its package first.
    monkeypatch.setitem(sys.modules, module.rpartition(".")[0], ModuleType(module.rpartition(".")[0]))
    assert cli.main([command, "--help"]) == 7
    assert called.args == [(["--help"],)]


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lunch"]) == 2
    assert capsys.readouterr().err == "unknown command lunch: did you mean launch?\n"


def test_print_config_prints_the_settings_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[object] = []
    monkeypatch.setattr("meshd.supervisor.run", lambda *args, **_: called.append(args))
    monkeypatch.setenv("MESHD_QUEUE_SIZE", "3")
    assert cli.main(["--print-config", "--port", "8", "--api-key", "hunter2"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "port = 8  # flag" in out and "queue_size = 3  # env" in out
    assert 'api_key = "***"  # flag' in out
    assert any(line.startswith("io_processes = ") and line.endswith("# derived") for line in out)
    assert called == []


def test_faults_go_to_stderr_one_a_line_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--port", "x", "--mini-lb"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "--port: 'x' is not a whole number",
        "--mini-lb is not supported by meshd: it stores no conversations and runs no tools",
    ]


def test_a_failed_start_gives_its_words_and_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise StartupError("the port is taken", exit_code=3)

    fake = ModuleType("meshd.supervisor")
    monkeypatch.setattr(fake, "run", fail, raising=False)
    monkeypatch.setitem(sys.modules, "meshd.supervisor", fake)
    assert cli.main([]) == 3
    assert capsys.readouterr().err == "meshd: the port is taken\n"


def test_warnings_of_the_configuration_are_logged_before_the_start(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Called(monkeypatch, "meshd.supervisor", "run")
    assert cli.main(["--worker-urls", "http://a", "--policy", "power_of_two"]) == 7
    err = capfd.readouterr().err
    assert "level=warn event=configuration process=supervisor" in err and "only one is given" in err


def test_version_and_help_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert cli.main(["launch", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"meshd {__version__}\nmeshd {__version__}: ")


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meshd", "--port", "x"], capture_output=True, text=True, check=False, env={}
    )
    assert (done.returncode, done.stderr) == (2, "--port: 'x' is not a whole number\n")
