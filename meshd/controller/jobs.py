"""How registrations and removals go or went: in this process alone, forgotten 5 minutes after the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

JOB_KEPT_S: Final = 300.0

JobType = Literal["register", "remove"]
JobStatus = Literal["pending", "processing", "completed", "failed"]


@dataclass(frozen=True, slots=True)
class Job:
    """``ended_s``: monotonic time of its end, None while it runs; ``timestamp``: Unix time of its status."""

    worker_url: str
    status: JobStatus
    timestamp: int
    message: str = ""
    ended_s: float | None = None
    job_type: JobType = "register"


class JobBook:
    """The latest job of each upstream, by the id of the upstream."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._jobs: dict[str, Job] = {}

    @property
    def pending(self) -> int:
        """Registrations that have not ended."""
        return sum(job.ended_s is None and job.job_type == "register" for job in self._jobs.values())

    def note(
        self,
        upstream_id: str,
        url: str,
        status: JobStatus,
        message: str = "",
        job_type: JobType = "register",
    ) -> None:
        ended_s = self._clock() if status in ("completed", "failed") else None
        self._jobs[upstream_id] = Job(url, status, int(self._wall_clock()), message, ended_s, job_type)

    def get(self, upstream_id: str) -> Job | None:
        """Return the job, None if there was none or it ended long ago."""
        job = self._jobs.get(upstream_id)
        if job is not None and job.ended_s is not None and self._clock() - job.ended_s >= JOB_KEPT_S:
            del self._jobs[upstream_id]
            return None
        return job

    def forget(self, upstream_id: str) -> None:
        self._jobs.pop(upstream_id, None)

    def __repr__(self) -> str:
        return f"JobBook({len(self._jobs)} jobs, {self.pending} pending)"
