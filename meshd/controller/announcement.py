"""An upstream that is to be registered, whoever asks for it: settings, the API or discovery."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Final

import orjson

from meshd.config.settings import Settings
from meshd.config.workers import WorkerSpec
from meshd.routing.upstream import DEFAULT_RUNTIME

CONFIG: Final = "config"
"""Source of the upstreams of the settings; their keys are their URLs."""

_PATH_LABELS: Final = ("tokenizer_path", "chat_template")


@dataclass(frozen=True, slots=True)
class Announcement:
    """``base_url`` is normalized. ``model_id``: configured model, empty to discover it.

    ``priority``, ``cost``: None for those of the labels, else the defaults. ``probing``: the health members
    that differ from the settings.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    model_id: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    priority: int | None = None
    cost: float | None = None
    worker_type: str = "regular"
    bootstrap_port: int | None = None
    runtime: str = DEFAULT_RUNTIME
    probing: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of(cls, spec: WorkerSpec, default_key: str | None, default_runtime: str) -> Announcement:
        """Make one of a ``[[workers]]`` table or a body of ``POST /workers``."""
        paths = {name: getattr(spec, name) for name in _PATH_LABELS if getattr(spec, name)}
        return cls(
            spec.url,
            spec.api_key or default_key,
            spec.model_id,
            tuple({**paths, **spec.labels}.items()),
            spec.priority,
            spec.cost,
            spec.worker_type,
            spec.bootstrap_port,
            spec.runtime or default_runtime,
            tuple(spec.probing.items()),
        )

    def digest(self) -> str:
        """Return a short name of its content, by which a changed one is known without keeping it."""
        content = orjson.dumps(asdict(self), option=orjson.OPT_SORT_KEYS)
        return hashlib.blake2b(content, digest_size=12).hexdigest()


def announcements(settings: Settings) -> list[Announcement]:
    """Return the upstreams of the settings: ``worker_urls``, then ``[[workers]]``, in their order."""
    default_key, runtime = settings.api_key or None, settings.backend
    plain = [Announcement(url, default_key, runtime=runtime) for url in settings.worker_urls]
    return [*plain, *(Announcement.of(spec, default_key, runtime) for spec in settings.workers)]
