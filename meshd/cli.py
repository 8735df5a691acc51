"""The command ``meshd``: picks what the first word asks for and hands over to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from meshd import __version__
from meshd.config import ConfigErrors
from meshd.config.names import unknown
from meshd.config.printing import config_text, help_text
from meshd.config.service_manager import find_service_manager
from meshd.config.sources import Action, LoadResult, load_settings
from meshd.errors import StartupError
from meshd.log import Log

_LAUNCH_WORDS: Final = ("launch", "start")
_COMMANDS: Final = (*_LAUNCH_WORDS, "backend", "ps")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (default: that of this process) and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except ConfigErrors as faults:
        sys.stderr.writelines(f"{line}\n" for line in faults.errors)
        return faults.exit_code
    except StartupError as exc:
        sys.stderr.write(f"meshd: {exc}\n")
        return exc.exit_code


def _dispatch(words: list[str]) -> int:
    if not words or words[0].startswith("-"):
        return _launch(words)
    command, rest = words[0], words[1:]
    if command in _LAUNCH_WORDS:
        return _launch(rest)
    # Imported late: neither command needs the other's code, and --help needs none of it.
    if command == "backend":
        from meshd.backend.process import main as run_backend

        return run_backend(rest)
    if command == "ps":
        from meshd.supervisor.ps import main as show_processes

        return show_processes(rest)
    raise ConfigErrors([unknown("command", command, _COMMANDS)])


def _launch(words: list[str]) -> int:
    result = load_settings(words, os.environ)
    if result.action is Action.HELP:
        from shutil import get_terminal_size  # late: it imports five compressors, and a start needs none

        sys.stdout.write(help_text(__version__, get_terminal_size().columns))
        return 0
    if result.action is Action.VERSION:
        sys.stdout.write(f"meshd {__version__}\n")
        return 0
    if result.wants_print_config:
        from meshd.supervisor.node import derived_settings

        sys.stderr.writelines(f"meshd: warning: {line}\n" for line in result.warnings)
        sys.stdout.write(config_text(result, derived_settings(result.settings)))
        return 0
    return _run(words, result)


def _run(words: list[str], result: LoadResult) -> int:
    from meshd.supervisor import run

    settings = result.settings
    log = Log("supervisor", settings.log_level, settings.json_log, log_dir=settings.log_dir)
    for line in result.warnings:
        log.warning("configuration", message=line)
    log.close()
    manager = find_service_manager(os.environ, os.getpid())
    return run(
        settings,
        result.sources,
        notify_socket=manager.notify_socket,
        watchdog_usec=manager.watchdog_usec,
        reload=lambda: load_settings(words, os.environ),
    )
