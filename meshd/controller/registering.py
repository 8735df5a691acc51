"""Complete registrations, and turn what probes find into the state of upstreams."""

from __future__ import annotations

from collections.abc import Iterable

from meshd.controller.jobs import JobStatus
from meshd.controller.ranks import ranks_of
from meshd.controller.registration import (
    Discovered,
    settled_labels,
    settled_models,
    warn_of_labels,
)
from meshd.controller.registry_keeper import RegistryKeeper
from meshd.log import Log
from meshd.routing.registry import Upstream
from meshd.routing.upstream import UNKNOWN_MODEL


def lacks_facts(upstream: Upstream) -> bool:
    """Say whether nothing is known of what an upstream serves."""
    return upstream.serves_any_model and not upstream.entries


class Registrations:
    """``is_dp_aware``: a server becomes one upstream for each of its data-parallel ranks.

    ``passthrough_paths``: those of the settings; known APIs, for the label ``mesh.apis``.
    """

    def __init__(
        self,
        keeper: RegistryKeeper,
        log: Log,
        *,
        is_dp_aware: bool = False,
        passthrough_paths: Iterable[str] = (),
    ) -> None:
        self._keeper = keeper
        self._log = log
        self._is_dp_aware = is_dp_aware
        self._passthrough_paths = tuple(passthrough_paths)

    def begin(self, base_url: str) -> None:
        """Note that the registration of an origin is being worked on."""
        for upstream in self._keeper.present(base_url):
            self._note(upstream, "processing")

    def activate(self, base_url: str, discovered: Discovered) -> None:
        """Complete the registration of an origin: its facts, its ranks, state ``active``, healthy.

        An origin that has to have ranks and cannot has failed: it stays as it is, and is tried again.
        """
        present = self._keeper.present(base_url)
        if not present:
            return
        if self._is_dp_aware:
            problem = self._split(present[0], discovered.dp_size)
            if problem:
                self.fail(base_url, problem)
                self._log.warning("registration_failed", upstream=base_url, reason=problem)
                return
        for upstream in self._keeper.present(base_url):
            labels = settled_labels(discovered, upstream.labels)
            configured = () if lacks_facts(upstream) else upstream.models
            models = settled_models(discovered, configured, labels)
            self._keeper.change(
                upstream,
                labels=labels,
                models=models,
                entries=discovered.entries,
                state="active",
                is_healthy=True,
            )
            self._note(upstream, "completed", discovered.problem)
        self._tell_active(base_url, discovered.problem)

    def activate_without_facts(self, base_url: str) -> None:
        """Put an origin in use that has not told its facts: with its configured models, else for any model.

        Not where ranks are wanted: there is nothing to be used before their number is known.
        """
        if self._is_dp_aware:
            return
        for upstream in self._keeper.present(base_url):
            models = upstream.models or (UNKNOWN_MODEL,)
            self._keeper.change(upstream, models=models, state="active", is_healthy=True)
            self._log.info("upstream_active", upstream=base_url, problem="it has not told its models yet")

    def fail(self, base_url: str, message: str) -> None:
        """Note that a registration has not succeeded in time; the upstream stays and is probed on."""
        for upstream in self._keeper.present(base_url):
            self._note(upstream, "failed", message)

    def note_problem(self, base_url: str, problem: str) -> None:
        """Tell in the jobs of an origin why its registration does not go on."""
        for upstream in self._keeper.present(base_url):
            job = self._keeper.jobs.get(upstream.id)
            if job is not None and job.status == "processing":
                self._note(upstream, job.status, problem)

    def set_health(self, base_url: str, is_healthy: bool) -> None:
        for upstream in self._keeper.of_origin(base_url):
            self._keeper.change(upstream, is_healthy=is_healthy)
        level = self._log.info if is_healthy else self._log.warning
        level("upstream_healthy" if is_healthy else "upstream_unhealthy", upstream=base_url)

    def _split(self, origin: Upstream, dp_size: int | None) -> str:
        """Put one upstream for each rank where the origin stands; return why that cannot be, or nothing."""
        if origin.dp_rank is not None:
            return ""
        if dp_size is None:
            return "the server does not tell its dp_size"
        numbers = [origin.number]
        while len(numbers) < dp_size:
            number = self._keeper.new_number(numbers)
            if number is None:
                return f"the set has no room for {dp_size} ranks"
            numbers.append(number)
        ranks = ranks_of(origin, numbers)
        if {rank.url for rank in ranks} & {upstream.url for upstream in self._keeper.upstreams}:
            return "the URL of one of its ranks is registered already"
        self._keeper.split(origin, ranks)
        return ""

    def _tell_active(self, base_url: str, problem: str) -> None:
        first = self._keeper.present(base_url)[0]
        self._log.info(
            "upstream_active",
            upstream=base_url,
            models=",".join(first.models),
            ranks=first.dp_size,
            problem=problem or None,
        )
        warn_of_labels(self._log, base_url, first.labels, self._passthrough_paths)

    def _note(self, upstream: Upstream, status: JobStatus, message: str = "") -> None:
        self._keeper.jobs.note(upstream.id, upstream.url, status, message)

    def __repr__(self) -> str:
        return f"Registrations({self._keeper!r})"
