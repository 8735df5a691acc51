"""Every setting of meshd, declared once.

Flags, variables, file keys, help, ``--print-config`` and docs/settings.md derive from this dataclass; a
new setting is one more attribute here. 0 (or −1, where 0 means something) stands for "derive it".

What a running node can take from a changed file is said by ``takes_effect`` and ``readers``: a setting that
decides about listeners, shared memory or the topology is "restart" (supervisor/reload.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final

from meshd.config import checks, discovery
from meshd.config.declaration import Setting, declared_settings, setting
from meshd.config.policies import POLICIES, POLICY_ALIASES, POLICY_HINTS
from meshd.config.workers import RUNTIME_ALIASES, RUNTIMES, WorkerSpec

_DURATION_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0, 15.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 240.0,
)  # fmt: skip
_REQUEST_ID_HEADERS: Final = ("x-request-id", "x-correlation-id", "x-trace-id", "request-id")

_listener = partial(setting, section="Listeners", takes_effect="restart")
_front = partial(setting, takes_effect="processes", readers=("io", "controller"))
_tls = partial(_front, section="TLS", metavar="FILE")
_upstreams = partial(setting, section="Upstreams", takes_effect="processes", readers=("controller",))
_discovery = partial(setting, section="Discovery", takes_effect="processes", readers=("controller",))
_routing = partial(_front, section="Routing")
_admission = partial(_front, section="Admission")
_request = partial(_front, section="Requests")
_timer = partial(_front, section="Timeouts", unit="s", above=0)
_retry = partial(setting, section="Retries", takes_effect="processes", readers=("io",))
_breaker = partial(setting, section="Circuit breaker", takes_effect="processes", readers=("io", "controller"))
_health = partial(setting, section="Health checks", takes_effect="processes", readers=("controller",))
_process = partial(setting, section="Processes and CPUs", takes_effect="restart")
_prepare = partial(setting, section="Preparation", takes_effect="processes")
_trace = partial(setting, section="Tracing", takes_effect="processes", readers=("io",))
_log = partial(setting, section="Log", takes_effect="processes")
_shutdown = partial(setting, section="Shutdown", takes_effect="live", unit="s", minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one start or reload; every process holds the same."""

    host: str = _listener(
        "0.0.0.0",
        help="Address of the traffic listener, IPv4 or IPv6.",
        metavar="ADDRESS",
        check=checks.check_address,
    )
    port: int = _listener(
        30000,
        help="Port of the traffic listener; 0: chosen by the system and logged.",
        metavar="PORT",
        minimum=0,
        maximum=65535,
    )
    prometheus_host: str = _listener(
        "0.0.0.0", help="Address of the metrics listener.", metavar="ADDRESS", check=checks.check_address
    )
    prometheus_port: int = _listener(
        29000,
        help="Port of the metrics listener; 0: chosen by the system and logged.",
        metavar="PORT",
        minimum=0,
        maximum=65535,
    )
    prometheus_duration_buckets: tuple[float, ...] = _listener(
        _DURATION_BUCKETS,
        help="Upper bounds of the buckets of request durations, ascending.",
        unit="s",
        above=0,
        check=checks.check_ascending,
    )

    tls_cert_path: str = _tls(
        "",
        help="Certificate chain of the traffic listener, PEM; needs --tls-key-path. Both: https, TLS 1.2 or"
        " later. SIGHUP reads the files of this section anew.",
    )
    tls_key_path: str = _tls("", help="Its private key, PEM, not encrypted.")
    ca_cert_paths: tuple[str, ...] = _tls(
        (), help="Authorities trusted for https upstreams, PEM, besides those of the system."
    )
    client_cert_path: str = _tls(
        "", help="Certificate chain shown to https upstreams, PEM; needs --client-key-path."
    )
    client_key_path: str = _tls("", help="Its private key, PEM, not encrypted.")

    worker_urls: tuple[str, ...] = _upstreams(
        (), help="URLs of inference servers, http or https.", metavar="URL", check=checks.check_urls
    )
    workers: tuple[WorkerSpec, ...] = _upstreams(
        (),
        help="More inference servers, each a [[workers]] table of the file with the members of"
        " POST /workers.",
    )
    api_key: str = _upstreams(
        "",
        help="Credential sent to the servers of --worker-urls and of discovery, and to those of [[workers]]"
        " without a key of their own. Not inbound authentication.",
        metavar="KEY",
        is_secret=True,
        check=checks.check_header_value,
    )
    backend: str = _upstreams(
        "sglang",
        help="What the servers are; decides what is asked of them when they are registered.",
        choices=RUNTIMES,
        choice_aliases=RUNTIME_ALIASES,
        aliases=("runtime",),
    )
    open_admin: bool = _upstreams(
        False,
        help="Let every client change the set of servers and the like, not only those on loopback.",
        readers=("io", "controller"),
    )
    worker_startup_timeout_secs: float = _upstreams(
        1800.0,
        help="Without a successful probe for so long after its registration a server has failed to start;"
        " it is probed on at the normal interval.",
        unit="s",
        above=0,
    )
    worker_startup_check_interval: float = _upstreams(
        30.0, help="How often a server that is still starting is logged.", unit="s", above=0
    )
    dp_aware: bool = _upstreams(
        False,
        help="Register each server as one upstream for each of its data-parallel ranks, as many as its"
        " /server_info tells.",
    )
    demo: int = _upstreams(
        0,
        help="Start this many bundled deterministic servers on loopback and register them.",
        takes_effect="restart",
        minimum=0,
        maximum=1024,
    )
    enable_igw: bool = _upstreams(
        False, help="Accepted for compatibility; serving several models is always on."
    )

    discovery_file: str = _discovery(
        "",
        help="TOML or JSON file whose workers, written as [[workers]], are registered, and drained when they"
        " are no longer in it. Replace it by renaming another over it.",
        metavar="FILE",
    )
    discovery_check_interval_secs: float = _discovery(
        5.0, help="How often --discovery-file is looked at.", unit="s", above=0
    )
    discovery_dns: tuple[str, ...] = _discovery(
        (),
        help="Names whose addresses (A, AAAA) are registered as http servers; NAME:PORT where the port is not"
        " 80; a name that starts with _ is looked up as SRV. Asked again after the TTL, within 1 to 60 s."
        " Needs meshd[dns].",
        metavar="NAME",
        check=discovery.check_dns_names,
    )
    service_discovery: bool = _discovery(
        False,
        help="Register the Kubernetes pods that match --selector while they are Ready. Uses the service"
        " account of this pod, or the file that KUBECONFIG names. Needs meshd[kubernetes].",
    )
    selector: tuple[tuple[str, str], ...] = _discovery(
        (),
        help="Labels that the pods of --service-discovery have, all of them.",
        metavar="KEY=VALUE",
        check=discovery.check_selector,
    )
    service_discovery_port: int = _discovery(
        80, help="Port of the servers in pods.", metavar="PORT", minimum=1, maximum=65535
    )
    service_discovery_namespace: str = _discovery(
        "",
        help="Namespace of the pods.",
        metavar="NAMESPACE",
        default_text="all",
        check=discovery.check_namespace,
    )

    policy: str = _routing(
        "cache_aware",
        help="How a server is picked among the candidates: docs/routing.md.",
        choices=POLICIES,
        choice_aliases=POLICY_ALIASES,
        choice_hints=POLICY_HINTS,
    )
    prefill_policy: str = _routing(
        "",
        help="The same among prefill servers, for prefill/decode disaggregation; has no effect without it.",
        choices=POLICIES,
        choice_aliases=POLICY_ALIASES,
        choice_hints=POLICY_HINTS,
        default_text="--policy",
    )
    decode_policy: str = _routing(
        "",
        help="The same among decode servers.",
        choices=POLICIES,
        choice_aliases=POLICY_ALIASES,
        choice_hints=POLICY_HINTS,
        default_text="--policy",
    )
    cache_threshold: float = _routing(
        0.3,
        help="Policy cache_aware: share of a prompt that a server must hold to be preferred for it.",
        minimum=0,
        maximum=1,
    )
    balance_abs_threshold: int = _routing(
        64,
        help="Policy cache_aware: the least loaded server is taken when loads differ by more than this and by"
        " more than --balance-rel-threshold.",
        unit="requests",
        minimum=0,
    )
    balance_rel_threshold: float = _routing(
        1.5, help="Policy cache_aware: the largest load over the smallest.", minimum=1
    )
    max_tree_size: int = _routing(
        67108864,
        help="Policy cache_aware: memory of the prefix index on this node, 8 bytes for each prefix known.",
        takes_effect="restart",
        unit="bytes",
        minimum=65536,
    )
    eviction_interval_secs: float = _routing(
        120.0,
        help="How often servers that have left are removed from the prefix index.",
        unit="s",
        above=0,
        aliases=("eviction-interval",),
    )
    prefix_token_count: int = _routing(
        256,
        help="Policy prefix_hash: tokens of the prompt that are hashed.",
        takes_effect="restart",  # the room for a view in shared memory
        unit="tokens",
        minimum=1,
    )
    prefix_hash_load_factor: float = _routing(
        1.25,
        help="Policy prefix_hash: load over the mean above which the next server is taken.",
        minimum=1,
    )

    max_concurrent_requests: int = _admission(
        -1, help="Requests that may run at once on this node; 0 or less: no bound.", default_text="no bound"
    )
    queue_size: int = _admission(
        100, help="Requests that may wait for a free place; 0: refuse at once.", unit="requests", minimum=0
    )
    queue_timeout_secs: float = _admission(60.0, help="Longest wait for a free place.", unit="s", minimum=0)

    max_payload_size: int = _request(
        536870912, help="Largest request body; above it 413.", unit="bytes", minimum=1
    )
    body_memory_bytes: int = _request(
        0,
        help="Memory for request bodies on this node.",
        takes_effect="restart",
        unit="bytes",
        minimum=0,
        default_text="25 % of the smaller of RAM and cgroup limit",
    )
    max_header_bytes: int = _request(65536, help="Largest request head.", unit="bytes", minimum=1024)
    max_headers: int = _request(256, help="Most field lines in a request head.", unit="lines", minimum=16)
    passthrough_paths: tuple[str, ...] = _request(
        (),
        help="Further paths that are forwarded to the least loaded server, whatever the body: exact, or"
        " prefixes that end in *.",
        metavar="PATH",
        check=checks.check_passthrough_paths,
    )
    request_id_headers: tuple[str, ...] = _request(
        _REQUEST_ID_HEADERS,
        help="Headers searched, in order, for the id of a request.",
        metavar="NAME",
        check=checks.check_header_names,
    )
    cors_allowed_origins: tuple[str, ...] = _request(
        (),
        help="Origins whose web pages may read answers, such as https://chat.example.com; *: all. None: no"
        " CORS handling.",
        metavar="ORIGIN",
        check=checks.check_origins,
    )
    route_headers: bool = _request(False, help="Tell in response headers which server was picked, and why.")

    client_header_timeout_secs: float = _timer(
        30.0, help="Time for a whole request head.", aliases=("header-read-timeout-secs",)
    )
    client_body_timeout_secs: float = _timer(
        60.0, help="Silence within a request body.", aliases=("stream-body-stall-timeout-secs",)
    )
    client_idle_timeout_secs: float = _timer(
        75.0,
        help="Idle time between requests of a connection. Keep it above the idle timeout of a load"
        " balancer in front.",
        aliases=("idle-connection-timeout-secs",),
    )
    request_timeout_secs: float = _timer(
        1800.0, help="From the end of preparation to the response head, over all attempts."
    )
    upstream_connect_timeout_secs: float = _timer(5.0, help="Name, TCP and TLS of a new upstream connection.")
    first_byte_timeout_secs: float = _timer(
        0.0,
        help="From the sent request to the whole response head, per attempt; 0: off.",
        above=None,
        minimum=0,
        default_text="off",
    )
    stream_idle_timeout_secs: float = _timer(300.0, help="Silence within a response body.")
    upstream_keepalive_timeout_secs: float = _timer(
        4.0,
        help="How long an idle upstream connection may be used again; 0: never. Keep it below the idle"
        " timeout of the servers.",
        above=None,
        minimum=0,
        aliases=("upstream-pool-idle-timeout-secs",),
    )

    disable_retries: bool = _retry(False, help="Ask one server, once.")
    retry_max_retries: int = _retry(
        5, help="Attempts of a request in all, the first included.", unit="attempts", minimum=1, maximum=100
    )
    retry_initial_backoff_ms: int = _retry(
        50, help="Delay before the first retry.", unit="ms", minimum=0, maximum=3600000
    )
    retry_max_backoff_ms: int = _retry(
        30000,
        help="Longest delay before a retry, and longest wait for a server that asked to be left alone.",
        readers=("io", "controller"),
        unit="ms",
        minimum=0,
        maximum=3600000,
    )
    retry_backoff_multiplier: float = _retry(
        1.5, help="Each delay over the one before.", minimum=1, maximum=1000
    )
    retry_jitter_factor: float = _retry(
        0.2, help="Share of a delay by which it may differ at random.", minimum=0, maximum=1
    )
    retry_on_500: bool = _retry(False, help="Ask again after a 500 too.")
    retry_budget_ratio: float = _retry(
        0.2, help="Retries for each first attempt that this node may make, over 10 s.", minimum=0
    )
    retry_budget_min: int = _retry(
        10, help="Retries in 10 s that are allowed whatever the share.", unit="retries", minimum=0
    )

    disable_circuit_breaker: bool = _breaker(False, help="Never leave a server out for its failures.")
    cb_failure_threshold: int = _breaker(
        10, help="Failures in a row that open the breaker of a server.", minimum=1
    )
    cb_success_threshold: int = _breaker(
        3, help="Successful trials that close a half-open breaker.", minimum=1
    )
    cb_timeout_duration_secs: float = _breaker(
        60.0, help="How long an open breaker lets nothing through.", unit="s", above=0
    )
    cb_window_duration_secs: float = _breaker(
        120.0, help="Longest gap between two failures that count as in a row.", unit="s", above=0
    )

    health_check_endpoint: str = _health(
        "/health", help="Path that is probed.", metavar="PATH", check=checks.check_path
    )
    health_check_interval_secs: float = _health(60.0, help="Time between probes.", unit="s", above=0)
    health_check_timeout_secs: float = _health(
        5.0, help="Time for one probe; at most the interval.", unit="s", above=0
    )
    health_failure_threshold: int = _health(
        3, help="Failed probes in a row that make a server unhealthy.", minimum=1
    )
    health_success_threshold: int = _health(
        2, help="Good probes in a row that make a server healthy.", minimum=1
    )
    disable_health_check: bool = _health(False, help="Do not probe; servers start healthy.")

    io_processes: int = _process(
        0,
        help="Processes that move bytes.",
        minimum=0,
        maximum=1024,
        default_text="half of the available CPUs, rounded down, at least 1",
    )
    prepare_workers: int = _process(
        0,
        help="Processes that parse and tokenize.",
        minimum=0,
        maximum=1024,
        default_text="the other half of the available CPUs, at least 1",
    )
    io_cpus: str = _process(
        "",
        help="CPUs of the I/O processes, such as 0-7,16.",
        metavar="CPUS",
        default_text="half of the cores",
        check=checks.check_cpu_list,
    )
    prepare_cpus: str = _process(
        "",
        help="CPUs of the prepare workers, disjoint from --io-cpus.",
        metavar="CPUS",
        default_text="the other half",
        check=checks.check_cpu_list,
    )
    prepare_group_size: int = _process(
        4, help="Prepare workers that share one copy of a tokenizer.", minimum=1, maximum=64
    )

    tokenizer_path: str = _prepare(
        "",
        help="Default tokenizer: a tokenizer.json, its directory or a hub id; wins over --model-path.",
        metavar="PATH",
    )
    model_path: str = _prepare(
        "", help="Directory of a model, taken for its tokenizer and chat template.", metavar="PATH"
    )
    chat_template: str = _prepare(
        "", help="File with a chat template; wins over the tokenizer's own.", metavar="FILE"
    )
    tokenizer_engine: str = _prepare(
        "auto",
        help="auto: fastokens where it is installed and proven equal for the tokenizer, else tokenizers.",
        choices=("auto", "fastokens", "tokenizers"),
    )
    tokenizer_crosscheck_ratio: float = _prepare(
        0.0001,
        help="Part of the encodes by fastokens that tokenizers repeats; other ids switch fastokens off.",
        minimum=0,
        maximum=1,
    )
    prepare_queue_capacity: int = _prepare(
        -1,
        help="Requests on the whole node that may wait for preparation; -1: derived.",
        unit="requests",
        minimum=-1,
        default_text="64 for each prepare worker, at least 256",
    )
    prepare_queue_timeout_ms: int = _prepare(
        2000, help="Longest wait for a prepare worker; at most --prepare-timeout-ms.", unit="ms", minimum=1
    )
    prepare_timeout_ms: int = _prepare(
        10000, help="Longest preparation, wait included.", unit="ms", minimum=1
    )
    prepare_max_tokenize_bytes: int = _prepare(
        1048576, help="Largest text that is tokenized; above it 413.", unit="bytes", minimum=1
    )

    log_level: str = _log(
        "info",
        help="Least severe lines that are written; access lines are info.",
        choices=("debug", "info", "warn", "error"),
        choice_aliases=(("warning", "warn"), ("critical", "error")),
    )
    json_log: bool = _log(False, help="Write each line as a JSON object.", aliases=("log-json",))
    log_dir: str = _log(
        "",
        help="Also write meshd.log in this directory; SIGHUP reopens it.",
        takes_effect="restart",
        metavar="DIRECTORY",
    )

    enable_trace: bool = _trace(
        False,
        help="Make a span of each request and of each exchange with a server, and send them over OTLP; a"
        " missing traceparent is created. Needs the extra meshd[tracing].",
    )
    otlp_traces_endpoint: str = _trace(
        "localhost:4317",
        help="Collector of the spans, gRPC: host:port, or a URL; encrypted if that is https.",
        metavar="ENDPOINT",
        check=checks.check_endpoint,
    )

    shutdown_delay_secs: float = _shutdown(
        5.0, help="How long new connections are still served after SIGTERM, while readiness fails."
    )
    shutdown_grace_period_secs: float = _shutdown(
        180.0, help="Time from SIGTERM after which running requests are cut."
    )

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can carry to a child, secrets included."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        plain["workers"] = [spec.to_dict() for spec in self.workers]
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Settings:
        """Build from the result of ``to_dict``, before or after JSON; values are trusted."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
        }
        values["workers"] = tuple(WorkerSpec.from_dict(spec) for spec in plain["workers"])
        values["selector"] = tuple((key, text) for key, text in plain["selector"])
        return cls(**values)


SETTINGS: Final[tuple[Setting, ...]] = declared_settings(Settings)
