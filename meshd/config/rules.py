"""What several settings must satisfy together, and what an operator should be told though it is allowed.

A rule is asked only if every setting that it names was read without fault: one mistake, one line.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from meshd.config.checks import expand_cpu_list
from meshd.config.settings import Settings
from meshd.errors import StartupError

Sources = Mapping[str, str]
_WILDCARDS: Final = ("0.0.0.0", "::")
_TOKEN_POLICIES: Final = frozenset({"prefix_hash"})
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(?<!\.json)")
_LOOK_BYTES: Final = 4096


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
        *_no_upstream(settings),
        *_selector_alone(settings),
        *_base_path_of_the_api(settings),
        *_one_upstream(settings, sources),
        *_no_tokenizer(settings),
        *_smaller_body_memory(settings, sources),
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
            f"--health-check-timeout-secs ({timeout:g}) is above --health-check-interval-secs ({interval:g}):"
            " lower it too"
        )


def _backoffs(settings: Settings, sources: Sources) -> Iterator[str]:
    initial, longest = settings.retry_initial_backoff_ms, settings.retry_max_backoff_ms
    if longest < initial:
        yield f"--retry-max-backoff-ms ({longest}) is below --retry-initial-backoff-ms ({initial})"


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


def _worker_types(settings: Settings, sources: Sources) -> Iterator[str]:
    for spec in settings.workers:
        if spec.worker_type != "regular":
            yield f"[[workers]] {spec.url}: worker_type {spec.worker_type} needs prefill/decode topology"


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


def _no_tokenizer(settings: Settings) -> Iterator[str]:
    has_tokenizer = settings.tokenizer_path or settings.model_path or settings.demo  # --demo brings its own
    if settings.policy in _TOKEN_POLICIES and not has_tokenizer:
        yield (
            f"--policy {settings.policy} reads tokens: without --tokenizer-path or --model-path a model is"
            " served only while a server's label or POST /v1/tokenizers gives it a tokenizer"
        )


def _tokenizer(settings: Settings, sources: Sources) -> Iterator[str]:
    """Look at the tokenizer that is taken; loading it, and all its other faults, is its leader's."""
    flag = "--tokenizer-path" if settings.tokenizer_path else "--model-path"
    path = settings.tokenizer_path or settings.model_path
    problem = _tokenizer_problem(path) if path else ""
    if problem:
        yield f"{flag}: {path}{problem}"


def _tokenizer_problem(path: str) -> str:
    """Return what is wrong, to follow the path, or nothing."""
    file = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
    try:
        with open(file, "rb") as opened:
            is_object = opened.read(_LOOK_BYTES).lstrip().startswith(b"{")
    except FileNotFoundError:
        if file != path:
            return ": has no tokenizer.json"
        if not _HUB_ID.fullmatch(path):
            return ": no such file or directory"
        has_hub = importlib.util.find_spec("huggingface_hub") is not None
        return "" if has_hub else " is not a path, and huggingface_hub is not installed"
    except (OSError, ValueError) as exc:
        return f": cannot be read: {getattr(exc, 'strerror', None) or exc}"
    return "" if is_object else " is not valid JSON"


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


def _dns_client(settings: Settings, sources: Sources) -> Iterator[str]:
    if settings.discovery_dns:
        yield from _missing("--discovery-dns", "dns", "dnspython")


def _service_discovery(settings: Settings, sources: Sources) -> Iterator[str]:
    if settings.service_discovery:
        if not settings.selector:
            yield "--service-discovery needs --selector: the labels of the pods to register"
        yield from _missing("--service-discovery", "kubernetes", "kubernetes")


def _tracing(settings: Settings, sources: Sources) -> Iterator[str]:
    # Parts of the namespace ``opentelemetry`` come with other software.
    package = "opentelemetry.exporter.otlp.proto.grpc"
    try:
        is_there = not settings.enable_trace or importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even its parents
        is_there = False
    if not is_there:
        name = package.replace(".", "-")
        yield f"--enable-trace needs the package {name}: pip install 'meshd[tracing]'"


def _missing(flag: str, extra: str, package: str) -> Iterator[str]:
    """Say how to install what a flag needs; the import name of the package is that of the extra."""
    if importlib.util.find_spec(extra) is None:
        yield f"{flag} needs the package {package}: pip install 'meshd[{extra}]'"


def _selector_alone(settings: Settings) -> Iterator[str]:
    if settings.selector and not settings.service_discovery:
        yield "--selector does nothing without --service-discovery"


def _discovers(settings: Settings) -> bool:
    return bool(settings.discovery_file or settings.discovery_dns or settings.service_discovery)


def _no_upstream(settings: Settings) -> Iterator[str]:
    if not _urls(settings) and not settings.demo and not _discovers(settings):
        yield "no servers: give --worker-urls, [[workers]], discovery or --demo"


def _base_path_of_the_api(settings: Settings) -> Iterator[str]:
    for url in _urls(settings):
        if url.endswith("/v1"):  # the base URL of clients; here requests would go to /v1/v1/...
            yield f"{url!r} ends in /v1: give the server's root, {url.removesuffix('/v1')}"


def _one_upstream(settings: Settings, sources: Sources) -> Iterator[str]:
    is_chosen = sources["policy"] != "default" and not _discovers(settings)
    if is_chosen and settings.policy == "power_of_two" and len(_urls(settings)) + settings.demo == 1:
        yield "--policy power_of_two compares two upstreams, but only one is given"


def _smaller_body_memory(settings: Settings, sources: Sources) -> Iterator[str]:
    if 0 < settings.body_memory_bytes < settings.max_payload_size:
        yield (
            f"--body-memory-bytes ({settings.body_memory_bytes}) is below --max-payload-size"
            f" ({settings.max_payload_size}): the smaller is the bound of a request body"
        )


RULES: Final[tuple[Rule, ...]] = (
    Rule(("host", "port", "prometheus_host", "prometheus_port"), _listeners),
    Rule(("max_payload_size", "body_memory_bytes"), _body_memory),
    Rule(("queue_size", "queue_timeout_secs"), _queue_timeout),
    Rule(("health_check_timeout_secs", "health_check_interval_secs"), _health_timeout),
    Rule(("retry_initial_backoff_ms", "retry_max_backoff_ms"), _backoffs),
    Rule(("prepare_queue_timeout_ms", "prepare_timeout_ms"), _prepare_timeouts),
    Rule(("worker_urls", "workers"), _equal_upstreams),
    Rule(("workers",), _worker_types),
    Rule(("io_cpus", "prepare_cpus"), _cpu_overlap),
    Rule(("chat_template",), _chat_template),
    Rule(("tokenizer_path", "model_path"), _tokenizer),
    Rule(("log_dir",), _log_dir),
    Rule(("tls_cert_path", "tls_key_path"), _server_tls),
    Rule(("ca_cert_paths", "client_cert_path", "client_key_path"), _client_tls),
    Rule(("discovery_dns",), _dns_client),
    Rule(("service_discovery", "selector"), _service_discovery),
    Rule(("enable_trace",), _tracing),
)
