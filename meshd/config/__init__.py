"""The configuration: declared in ``settings``, read by ``sources``, shown by ``printing``.

Children are told their settings and read none, so what reads them is imported by its own name.
Reading order: declaration, settings, values, command_line, sources, rules, printing.
"""

from meshd.config.declaration import Kind, Setting
from meshd.config.errors import ConfigErrors
from meshd.config.settings import SETTINGS, Settings
from meshd.config.workers import WorkerSpec

__all__ = [
    "SETTINGS",
    "ConfigErrors",
    "Kind",
    "Setting",
    "Settings",
    "WorkerSpec",
]
