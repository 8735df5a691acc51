"""What a service manager such as systemd tells a service by its environment; see sd_notify(3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceManager:
    """Where to report, None for nowhere, and how often at least, 0 for no watchdog."""

    notify_socket: str | None
    watchdog_usec: int


def find_service_manager(environ: Mapping[str, str], pid: int) -> ServiceManager:
    """Read ``NOTIFY_SOCKET`` and ``WATCHDOG_USEC``; a watchdog for a pid other than ``pid`` is not ours."""
    usec = environ.get("WATCHDOG_USEC", "")
    is_ours = environ.get("WATCHDOG_PID", str(pid)) == str(pid)
    is_number = usec.isascii() and usec.isdigit()
    return ServiceManager(environ.get("NOTIFY_SOCKET") or None, int(usec) if is_ours and is_number else 0)
