"""Every metric family of meshd, declared once; cells, rendering and ``docs/metrics.md`` derive from it.

A family stands here only while something feeds it: a family that is always 0 because nobody writes it
would lie. ``Source.ROW`` families are written by processes into their own row of metric cells;
``Source.SCRAPE`` families are computed by the controller at the moment of a scrape.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from meshd.config import Settings
from meshd.config.policies import POLICIES
from meshd.errors import CODES
from meshd.metrics.family import OTHER, Catalog, Family, Kind, Label, Source

# fmt: off
BUCKETS_D: Final = Settings().prometheus_duration_buckets
BUCKETS_F: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)
# fmt: on


def closed(name: str, values: str, fallback: str | None = None) -> Label:
    """Declare a label whose values, parted by spaces, are all shown from start."""
    return Label(name, tuple(values.split()), fallback=fallback, is_preset=True)


def opened(name: str, limit: int, note: str) -> Label:
    return Label(name, None, limit=limit, note=note)


def _within(name: str, values: Sequence[str], fallback: str, note: str) -> Label:
    """A closed list too long to show from start: a series appears when it is first used."""
    return Label(name, tuple(values), fallback=fallback, note=note)


PATH: Final = opened("path", 128, "template of the registry or route, all else `other`")
METHOD: Final = Label("method", ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", OTHER))
MODEL: Final = opened("model", 256, "id served by a registered upstream, `unknown` without one, else `other`")
WORKER: Final = opened("worker", 1024, "url of a registered upstream")
STATUS: Final = _within("status_code", [str(n) for n in range(100, 600)], OTHER, "100…599")
ERROR: Final = _within("error_code", ["", *CODES], "", "a code set by meshd itself, else empty")
ENDPOINT: Final = closed(
    "endpoint", "chat completions generate messages count_tokens responses embeddings other", fallback=OTHER
)
ROUTER: Final = closed("router_type", "http")
BACKEND: Final = closed("backend_type", "regular")
CONNECTION: Final = closed("connection_mode", "http")
WORKER_TYPE: Final = closed("worker_type", "regular")
POLICY: Final = _within("policy", POLICIES, OTHER, "name of a routing policy")
KIND: Final = closed("kind", "io prepare leader controller")
CB_STATES: Final = "closed open half_open"
RETRY_NUMBERS: Final = "1 2 3 4 5 6 7 8 9 10+"
INFLIGHT_AGES: Final = "30 60 180 300 600 1200 3600 7200 14400 28800 86400 +Inf"
MEANING_CODES: Final = (
    "invalid_request tokenizer_not_found tokenizer_input_too_large tokenization_error detokenization_error "
    "unsupported_api unsupported_api_topology stateful_routing_unsupported tokenizer_unavailable"
)
PREPARE_CODES: Final = (
    "prepare_queue_full prepare_pool_closed prepare_queue_timeout prepare_timeout prepare_cancelled "
    "prepare_failed prepare_worker_died"
)


def build_catalog(duration_buckets: Sequence[float] = ()) -> Catalog:
    """Declare all families; ``duration_buckets`` (``--prometheus-duration-buckets``) replace ``BUCKETS_D``.

    Every process of one node must pass the same buckets: they fix the layout of the cells.
    """
    buckets_d = tuple(float(bound) for bound in duration_buckets) or BUCKETS_D
    if any(low >= high for low, high in pairwise(buckets_d)) or buckets_d[0] <= 0:
        raise ValueError("duration buckets must be positive and ascending")
    return Catalog(
        [
            *_http_families(buckets_d),
            *_admission_families(),
            *_router_families(buckets_d),
            *_prepare_families(),
            *_upstream_families(buckets_d),
            *_discovery_families(),
            *_process_families(),
        ]
    )


def _counter(name: str, text: str, *labels: Label, source: Source = Source.ROW) -> Family:
    return Family(name, Kind.COUNTER, text, labels, source=source)


def _gauge(name: str, text: str, *labels: Label, source: Source = Source.ROW) -> Family:
    return Family(name, Kind.GAUGE, text, labels, source=source)


def _scraped(name: str, text: str, *labels: Label) -> Family:
    return _gauge(name, text, *labels, source=Source.SCRAPE)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: Label) -> Family:
    return Family(name, Kind.HISTOGRAM, text, labels, buckets)


def _http_families(buckets_d: tuple[float, ...]) -> list[Family]:
    return [
        _counter("mesh_http_requests_total", "Request heads received.", PATH, METHOD),
        _histogram(
            "mesh_http_request_duration_seconds",
            "First byte of a head to the end of its response.",
            buckets_d,
            PATH,
            METHOD,
        ),
        _counter("mesh_http_responses_total", "Final response heads written.", STATUS, ERROR),
        _gauge("mesh_http_connections_active", "Client connections open."),
        _counter("mesh_http_accept_errors_total", "Failures to accept connections."),
        _counter("mesh_http_malformed_requests_total", "Requests refused for their framing or head."),
        _counter("mesh_http_client_disconnects_total", "Clients gone before their response ended."),
        _counter(
            "mesh_http_rate_limit_total",
            "Tickets granted and refused.",
            closed("result", "allowed rejected"),
        ),
        _gauge(
            "mesh_http_inflight_request_age_count",
            "Requests in flight no older than le seconds.",
            closed("le", INFLIGHT_AGES),
        ),
    ]


def _admission_families() -> list[Family]:
    return [
        _gauge("mesh_admission_held", "Tickets held."),
        _gauge("mesh_admission_waiting", "Requests waiting for a ticket."),
        _histogram("mesh_admission_wait_seconds", "Wait of the tickets granted.", BUCKETS_F),
        _counter(
            "mesh_admission_rejections_total",
            "Requests refused a ticket.",
            closed("reason", "full displaced timeout closed"),
        ),
        _counter("mesh_admission_canceled_total", "Clients gone while waiting for a ticket."),
        _gauge("mesh_body_memory_reserved_bytes", "Body memory reserved by requests."),
        _scraped("mesh_body_memory_limit_bytes", "Body memory there is."),
    ]


def _router_families(buckets_d: tuple[float, ...]) -> list[Family]:
    target = (ROUTER, BACKEND, CONNECTION, MODEL, ENDPOINT)
    observed = (ROUTER, BACKEND, MODEL, ENDPOINT)
    stage = closed("stage", "admission body prepare placement upstream_head relay")
    error_type = closed(
        "error_type",
        "no_workers timeout rate_limited validation_error internal_error backend_error canceled body_error",
    )
    skipped = closed("reason", "content_encoding event_too_large body_too_large")
    failure = closed("reason", "cut idle protocol no_end shutdown")
    return [
        _counter(
            "mesh_router_requests_total",
            "Requests whose routing view was delivered.",
            *target,
            closed("streaming", "true false"),
        ),
        _histogram(
            "mesh_router_request_duration_seconds",
            "First byte of a head to the end of its response.",
            buckets_d,
            *target,
        ),
        _counter(
            "mesh_router_request_errors_total",
            "Requests with another outcome than completed.",
            *target,
            error_type,
        ),
        _histogram(
            "mesh_router_stage_duration_seconds",
            "Time requests spent in each stage.",
            buckets_d,
            ROUTER,
            stage,
        ),
        _histogram(
            "mesh_router_overhead_seconds",
            "Time meshd itself added, without waits.",
            BUCKETS_F,
            ROUTER,
        ),
        _counter(
            "mesh_router_upstream_responses_total",
            "Heads received from upstreams, retried ones included.",
            ROUTER,
            STATUS,
            ERROR,
        ),
        _histogram("mesh_router_ttft_seconds", "Time to the first output token.", buckets_d, *observed),
        _histogram("mesh_router_tpot_seconds", "Time for each further output token.", BUCKETS_F, *observed),
        _histogram(
            "mesh_router_generation_duration_seconds",
            "Duration of 2xx responses.",
            buckets_d,
            *observed,
        ),
        _counter(
            "mesh_router_tokens_total",
            "Tokens by the usage upstreams reported.",
            *observed,
            closed("token_type", "input output"),
        ),
        _counter("mesh_observation_skipped_total", "Responses relayed without observation.", skipped),
        _counter(
            "mesh_stream_failures_total",
            "Responses that failed after their head was sent.",
            ENDPOINT,
            failure,
        ),
    ]


def _prepare_families() -> list[Family]:
    stage = closed("stage", "json_parse view template encode decode")
    return [
        _gauge("mesh_prepare_queued_jobs", "Preparation jobs waiting."),
        _gauge("mesh_prepare_dispatched_jobs", "Preparation jobs dispatched."),
        _scraped("mesh_prepare_execution_reserved", "Prepare workers with a job, dispatched or running."),
        _scraped("mesh_prepare_busy_workers", "Prepare workers that run a job."),
        _scraped("mesh_prepare_live_workers", "Prepare workers alive."),
        _histogram("mesh_prepare_queue_seconds", "Submission to claim of a job.", BUCKETS_F),
        _histogram("mesh_prepare_run_seconds", "Run of the jobs that ran to an end.", BUCKETS_F),
        _histogram("mesh_prepare_stage_seconds", "Stages of preparation.", BUCKETS_F, stage),
        _counter(
            "mesh_prepare_errors_total",
            "Jobs that ended without a result.",
            closed("reason", PREPARE_CODES),
        ),
        _counter("mesh_prepare_jobs_total", "Jobs submitted."),
        _counter(
            "mesh_prepare_rejections_total",
            "Jobs that refused their request.",
            closed("reason", MEANING_CODES),
        ),
        _counter(
            "mesh_prepare_fallbacks_total",
            "Fallbacks taken while preparing.",
            closed("reason", "engine_error no_chat_template no_safe_cut"),
        ),
        _counter("mesh_prepare_retries_total", "Jobs run again after a prepare worker died."),
        _counter(
            "mesh_prepare_bounded_bytes_total",
            "Bytes of the texts whose opening ids were asked for, and those tokenized for them.",
            closed("kind", "offered tokenized"),
        ),
        _counter(
            "mesh_tokenizer_crosscheck_total",
            "Encodes of the fast engine repeated by the reference.",
            closed("result", "match mismatch"),
        ),
        _scraped(
            "mesh_tokenizer_info",
            "1 for each tokenizer loaded.",
            opened("tokenizer", 256, "name"),
            closed("engine", "fastokens tokenizers"),
        ),
    ]


def _upstream_families(buckets_d: tuple[float, ...]) -> list[Family]:
    error_type = closed("error_type", "connect connect_timeout reset timeout protocol status_5xx body")
    branch = closed("branch", "ring_hit load_balance_walk fallback_least_load no_tokens no_healthy_workers")
    return [
        _scraped("mesh_worker_pool_size", "Upstreams registered.", WORKER_TYPE, CONNECTION, MODEL),
        _gauge("mesh_worker_connections_active", "Upstream connections open.", WORKER_TYPE, CONNECTION),
        _scraped("mesh_worker_requests_active", "Requests counted as load of an upstream.", WORKER),
        _scraped("mesh_worker_health", "1 for a healthy upstream.", WORKER),
        _counter(
            "mesh_worker_health_checks_total",
            "Health probes ended.",
            WORKER_TYPE,
            closed("result", "success failure"),
        ),
        _counter(
            "mesh_worker_selection_total",
            "Placements by upstream kind, model and policy.",
            WORKER_TYPE,
            CONNECTION,
            MODEL,
            POLICY,
        ),
        _counter("mesh_worker_errors_total", "Failed attempts.", WORKER_TYPE, CONNECTION, error_type),
        _scraped("mesh_worker_cb_state", "State of a breaker: 0 closed, 1 open, 2 half open.", WORKER),
        _counter(
            "mesh_worker_cb_transitions_total",
            "Changes of state of a breaker.",
            WORKER,
            closed("from", CB_STATES),
            closed("to", CB_STATES),
        ),
        _counter(
            "mesh_worker_cb_outcomes_total",
            "Exchanges with an upstream that ended, as its breaker takes them.",
            WORKER,
            closed("outcome", "success failure neutral"),
        ),
        _scraped("mesh_worker_cb_consecutive_failures", "Failures of an upstream in a row.", WORKER),
        _scraped("mesh_worker_cb_consecutive_successes", "Successful trials of a half-open breaker.", WORKER),
        _counter(
            "mesh_worker_backpressure_total",
            "Answers 429 and 503 of an upstream.",
            WORKER,
            closed("kind", "deranked cooldown"),
        ),
        _counter("mesh_worker_retries_total", "Attempts after the first.", WORKER_TYPE, ENDPOINT),
        _counter(
            "mesh_worker_retries_exhausted_total",
            "Requests given up after their last attempt.",
            WORKER_TYPE,
            ENDPOINT,
        ),
        _histogram(
            "mesh_worker_retry_backoff_seconds",
            "Delays chosen before a retry, by its number.",
            buckets_d,
            closed("attempt", RETRY_NUMBERS),
        ),
        _counter("mesh_retry_budget_exhausted_total", "Retries not made for want of budget."),
        _counter("mesh_worker_reuse_retries_total", "Reused connections replaced by a fresh one."),
        _counter("mesh_prefix_hash_policy_branch_total", "Decisions of policy prefix_hash.", branch),
        _counter(
            "mesh_policy_fallbacks_total",
            "Decisions made without the input their policy needs.",
            closed("policy", "prefix_hash cache_aware consistent_hash dp_sticky"),
            closed("reason", "no_text no_tokens no_session_key no_owner"),
        ),
        _counter(
            "mesh_cache_aware_decisions_total",
            "Decisions of policy cache_aware.",
            closed("decision", "hit miss imbalanced"),
        ),
        _scraped("mesh_prefix_index_entries", "Prefixes that the index knows a holder of, about."),
        _scraped("mesh_prefix_index_limit_bytes", "Memory of the prefix index."),
        _counter("mesh_prefix_index_evictions_total", "Entries dropped for room."),
        _scraped("mesh_sessions_active", "Sessions of policy dp_sticky."),
    ]


def _discovery_families() -> list[Family]:
    source = closed("source", "file dns kubernetes")
    return [
        _gauge("mesh_discovery_workers_discovered", "Upstreams that a source lists.", source),
        _counter("mesh_discovery_registrations_total", "Upstreams added by a source.", source),
        _counter("mesh_discovery_deregistrations_total", "Upstreams drained by a source.", source),
    ]


def _process_families() -> list[Family]:
    return [
        _scraped("mesh_build_info", "1; the version is the label.", opened("version", 1, "of meshd")),
        _scraped("mesh_start_time_seconds", "Unix time at which meshd started."),
        _scraped("mesh_ready", "1 while /readiness would answer 200."),
        _scraped("mesh_processes", "Processes alive.", KIND),
        _counter(
            "mesh_process_restarts_total", "Processes replaced after a death.", KIND, source=Source.SCRAPE
        ),
        Family(
            "mesh_process_cpu_seconds_total",
            Kind.FLOAT_COUNTER,
            "CPU time, ended processes included.",
            (KIND,),
        ),
        _scraped(
            "mesh_process_resident_memory_bytes", "Resident memory; shared pages in each process.", KIND
        ),
        _scraped("mesh_process_open_fds", "Open file descriptors.", KIND),
        _histogram("mesh_event_loop_lag_seconds", "Lateness of event loop timers, each 100 ms.", BUCKETS_F),
        _counter(
            "mesh_internal_drops_total",
            "Items dropped because a bounded internal queue was full.",
            closed("queue", "log outcome control trace"),
        ),
    ]
