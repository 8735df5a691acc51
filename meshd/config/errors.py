"""All faults of a configuration, reported together."""

from __future__ import annotations

from collections.abc import Sequence

from meshd.errors import StartupError


class ConfigErrors(StartupError):
    """The configuration cannot be used: ``errors`` holds one line for each fault. Exit code 2."""

    def __init__(self, errors: Sequence[str]) -> None:
        super().__init__("\n".join(errors), exit_code=2)
        self.errors = tuple(errors)
