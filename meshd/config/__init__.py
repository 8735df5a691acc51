"""The configuration: declared in ``settings``, read by ``sources``, shown by ``printing``.

Reading order: declaration, settings, values, command_line, sources, rules, printing.
"""

from meshd.config.declaration import Kind, Setting
from meshd.config.errors import ConfigErrors
from meshd.config.settings import SETTINGS, Settings
from meshd.config.sources import Action, LoadResult, load_settings
from meshd.config.workers import WorkerSpec

__all__ = [
    "SETTINGS",
    "Action",
    "ConfigErrors",
    "Kind",
    "LoadResult",
    "Setting",
    "Settings",
    "WorkerSpec",
    "load_settings",
]
