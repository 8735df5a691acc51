"""How patiently a signal ends the node."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace

from meshd.config import Settings
from meshd.supervisor.shutdown import Patience


def choose_patience(settings: Settings, sources: Mapping[str, str]) -> Callable[[int], Patience]:
    """Choose how patiently a signal ends the node.

    SIGINT is no load balancer's: it skips the delay, and of someone who watches it also cuts short the rest.
    Times that were set by hand hold for every signal.
    """
    is_default = {
        name: sources.get(name, "default") == "default"
        for name in ("shutdown_delay_secs", "shutdown_grace_period_secs")
    }
    by_settings = Patience(settings.shutdown_delay_secs, settings.shutdown_grace_period_secs)
    by_hand = replace(by_settings, delay_s=0.0) if is_default["shutdown_delay_secs"] else by_settings
    if all(is_default.values()) and (settings.demo > 0 or os.isatty(0)):
        by_hand = Patience.hurried()

    def choose(number: int) -> Patience:
        return by_hand if number == signal.SIGINT else by_settings

    return choose
