"""Reading the configuration again: open the log anew, compare, and say truly what a change does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from meshd.config import SETTINGS, Kind, Setting, Settings
from meshd.config.sources import LoadResult
from meshd.errors import StartupError
from meshd.log import Log

_MAX_VALUE: Final = 100  # characters of a value in the log


class ConfigurationReload:
    """``running``: the settings as they were read at start. ``read`` reads them from all their places."""

    def __init__(self, running: Settings, read: Callable[[], LoadResult] | None, log: Log) -> None:
        self.running = running
        self._read = read
        self._log = log

    def take(self, running: Settings) -> LoadResult | None:
        """Return what is to be in force: what was read, with what needs a restart as it is in ``running``.

        None if there is nothing to read or it is invalid. Every difference is logged.
        """
        try:
            self._log.reopen()
        except StartupError as error:
            self._log.error("log_not_reopened", message=str(error))
        if self._read is None:
            return None
        try:
            found = self._read()
        except StartupError as error:
            self._log.error("configuration_refused", message=f"{error}; nothing changed")
            return None
        changed = changed_settings(running, found.settings)
        self._report(running, found.settings, changed)
        kept = {each.name: getattr(running, each.name) for each in changed if each.takes_effect == "restart"}
        return replace(found, settings=replace(found.settings, **kept))

    def _report(self, running: Settings, found: Settings, changed: list[Setting]) -> None:
        def told(takes_effect: str) -> str:
            return "; ".join(
                describe_change(each, running, found) for each in changed if each.takes_effect == takes_effect
            )

        live, processes, restart = told("live"), told("processes"), told("restart")
        if live or processes:
            self._log.info("configuration_changed", live=live, new_processes=processes)
        if restart:
            self._log.warning(
                "configuration_needs_restart",
                needs_restart=restart,
                message="these settings stay as they are until meshd is started anew",
            )
        if not changed:
            self._log.info("configuration_unchanged")


def changed_settings(running: Settings, found: Settings) -> list[Setting]:
    """List the settings that differ, in order of declaration."""
    return [each for each in SETTINGS if getattr(running, each.name) != getattr(found, each.name)]


def describe_change(setting: Setting, running: Settings, found: Settings) -> str:
    """Say what becomes of a setting; of one that holds secrets the name alone."""
    if setting.is_secret or setting.kind is Kind.TABLES:
        return setting.name
    before, after = (_shown(getattr(settings, setting.name)) for settings in (running, found))
    return f"{setting.name} {before} -> {after}"


def _shown(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return (text[:_MAX_VALUE] + "…" if len(text) > _MAX_VALUE else text) or "(empty)"
