"""What SIGHUP does: open the log anew, read the configuration again, and say truly what that changes."""

from __future__ import annotations

from collections.abc import Callable

from meshd.config import SETTINGS, LoadResult, Settings
from meshd.errors import StartupError
from meshd.log import Log


class ConfigurationReload:
    """Compares the configuration as it is now with the one that runs.

    No setting is applied while the node runs: the names of all that differ are logged as needing a restart.
    """

    def __init__(self, running: Settings, read: Callable[[], LoadResult] | None, log: Log) -> None:
        self._running = running
        self._read = read
        self._log = log

    def take(self) -> None:
        try:
            self._log.reopen()
        except StartupError as error:
            self._log.error("log_not_reopened", message=str(error))
        if self._read is None:
            return
        try:
            found = self._read().settings
        except StartupError as error:
            self._log.error("configuration_refused", message=f"{error}; nothing changed")
            return
        changed = changed_settings(self._running, found)
        if changed:
            self._log.warning("configuration_changed", needs_restart=" ".join(changed))
        else:
            self._log.info("configuration_unchanged")


def changed_settings(running: Settings, found: Settings) -> list[str]:
    """Name the settings that differ, in order of declaration."""
    return [each.name for each in SETTINGS if getattr(running, each.name) != getattr(found, each.name)]
