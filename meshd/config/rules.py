"""What several settings must satisfy together, and what an operator should be told though it is allowed.

A rule is asked only if every setting that it names was read without fault: one mistake, one line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from meshd.config.checks import expand_cpu_list
from meshd.config.settings import Settings
from meshd.errors import StartupError

Sources = Mapping[str, str]
_WILDCARDS: Final = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Rule:
    """``check`` yields a line for each fault; ``names`` are the settings that it looks at."""

    names: tuple[str, ...]
    check: Callable[[Settings, Sources], Iterator[str]]


def broken_rules(settings: Settings, sources: Sources, failed: Collection[str]) -> list[str]:
    """Return one line for each fault; rules that look at a name in ``failed`` are left out."""
    asked = [rule for rule in RULES if not any(name in failed for name in rule.names)]
    return [line for rule in asked for line in rule.check(settings, sources)]


def warnings_of(settings: Settings, sources: Sources) -> list[str]:
    """Return what is allowed, but probably not meant."""
    return [
        *_one_upstream(settings, sources),
        *_smaller_body_memory(settings, sources),
        *_no_tokenizer(settings),
    ]


def _listeners(settings: Settings, sources: Sources) -> Iterator[str]:
    if settings.port != settings.prometheus_port or settings.port == 0:
        return
    hosts = (settings.host, settings.prometheus_host)
    # Two sockets with SO_REUSEPORT on one address would share its connections silently.
    if hosts[0] == hosts[1] or any(host in _WILDCARDS for host in hosts):
        yield f"--port and --prometheus-port are both {settings.port}: the two listeners must differ"


def _body_memory(settings: Settings, sources: Sources) -> Iterator[str]:
    are_given = "default" not in (sources["max_payload_size"], sources["body_memory_bytes"])
    if are_given and 0 < settings.body_memory_bytes < settings.max_payload_size:
        yield (
            f"--max-payload-size ({settings.max_payload_size}) is larger than"
            f" --body-memory-bytes ({settings.body_memory_bytes})"
        )


def _queue_timeout(settings: Settings, sources: Sources) -> Iterator[str]:
    if settings.queue_size > 0 and settings.queue_timeout_secs <= 0:
        yield "--queue-timeout-secs must be above 0 while --queue-size is (--queue-size 0: refuse at once)"


def _health_timeout(settings: Settings, sources: Sources) -> Iterator[str]:
    timeout, interval = settings.health_check_timeout_secs, settings.health_check_interval_secs
    if timeout > interval:
        yield (
            f"--health-check-timeout-secs ({timeout:g}) is above --health-check-interval-secs ({interval:g})"
        )


def _prepare_timeouts(settings: Settings, sources: Sources) -> Iterator[str]:
    queue, whole = settings.prepare_queue_timeout_ms, settings.prepare_timeout_ms
    if queue > whole:
        yield f"--prepare-queue-timeout-ms ({queue}) is above --prepare-timeout-ms ({whole})"


def _equal_upstreams(settings: Settings, sources: Sources) -> Iterator[str]:
    seen: set[str] = set()
    told: set[str] = set()
    for url in _urls(settings):
        if url in seen and url not in told:
            told.add(url)
            yield f"the upstream {url} is given more than once in --worker-urls and [[workers]]"
        seen.add(url)


def _urls(settings: Settings) -> list[str]:
    return [*settings.worker_urls, *(spec.url for spec in settings.workers)]


def _cpu_overlap(settings: Settings, sources: Sources) -> Iterator[str]:
    if settings.io_cpus and settings.prepare_cpus:
        both = sorted(set(expand_cpu_list(settings.io_cpus)) & set(expand_cpu_list(settings.prepare_cpus)))
        if both:
            yield f"--io-cpus and --prepare-cpus overlap: {', '.join(map(str, both))}"


def _chat_template(settings: Settings, sources: Sources) -> Iterator[str]:
    path = settings.chat_template
    if path:
        try:
            with open(path, "rb") as file:
                file.read(1)
        except OSError as exc:
            yield f"--chat-template: {path}: cannot be read: {exc.strerror}"


def _log_dir(settings: Settings, sources: Sources) -> Iterator[str]:
    path = settings.log_dir
    if path and not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
        yield f"--log-dir: {path}: is not a directory that can be written"


def _server_tls(settings: Settings, sources: Sources) -> Iterator[str]:
    cert, key = settings.tls_cert_path, settings.tls_key_path
    if bool(cert) != bool(key):
        yield _half_a_pair("--tls-cert-path", "--tls-key-path", has_first=bool(cert))
    elif cert:
        # Imported here: most command lines have no TLS, and ssl takes longer to import than all the rest.
        from meshd.tls import server_context

        yield from _fault_of(lambda: server_context(cert, key))


def _client_tls(settings: Settings, sources: Sources) -> Iterator[str]:
    cert, key = settings.client_cert_path, settings.client_key_path
    if bool(cert) != bool(key):
        yield _half_a_pair("--client-cert-path", "--client-key-path", has_first=bool(cert))
    elif cert or settings.ca_cert_paths:
        from meshd.tls import client_context

        yield from _fault_of(lambda: client_context(settings.ca_cert_paths, cert, key))


def _half_a_pair(first: str, second: str, has_first: bool) -> str:
    given, missing = (first, second) if has_first else (second, first)
    return f"{given} is given without {missing}: give both or neither"


def _fault_of(load: Callable[[], object]) -> Iterator[str]:
    try:
        load()
    except StartupError as exc:
        yield str(exc)


def _one_upstream(settings: Settings, sources: Sources) -> Iterator[str]:
    is_chosen = sources["policy"] != "default"
    if is_chosen and settings.policy == "power_of_two" and len(_urls(settings)) + settings.demo == 1:
        yield "--policy power_of_two compares two upstreams, but only one is given"


def _smaller_body_memory(settings: Settings, sources: Sources) -> Iterator[str]:
    if 0 < settings.body_memory_bytes < settings.max_payload_size:
        yield (
            f"--body-memory-bytes ({settings.body_memory_bytes}) is below --max-payload-size"
            f" ({settings.max_payload_size}): the smaller is the bound of a request body"
        )


def _no_tokenizer(settings: Settings) -> Iterator[str]:
    path = settings.tokenizer_path
    if path and not os.path.exists(path):
        yield f"--tokenizer-path: {path} does not exist: prompts are not tokenized"


RULES: Final[tuple[Rule, ...]] = (
    Rule(("host", "port", "prometheus_host", "prometheus_port"), _listeners),
    Rule(("max_payload_size", "body_memory_bytes"), _body_memory),
    Rule(("queue_size", "queue_timeout_secs"), _queue_timeout),
    Rule(("health_check_timeout_secs", "health_check_interval_secs"), _health_timeout),
    Rule(("prepare_queue_timeout_ms", "prepare_timeout_ms"), _prepare_timeouts),
    Rule(("worker_urls", "workers"), _equal_upstreams),
    Rule(("io_cpus", "prepare_cpus"), _cpu_overlap),
    Rule(("chat_template",), _chat_template),
    Rule(("log_dir",), _log_dir),
    Rule(("tls_cert_path", "tls_key_path"), _server_tls),
    Rule(("ca_cert_paths", "client_cert_path", "client_key_path"), _client_tls),
)
