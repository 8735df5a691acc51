"""Flags of other routers that meshd deliberately lacks, and why; a trailing ``*`` covers a family."""

from __future__ import annotations

from typing import Final

_REASONS: Final[tuple[tuple[str, str], ...]] = (
    (
        "it stores no conversations and runs no tools",
        "mini-lb history-* oracle-* postgres-* redis-* mcp-config-path max-background-responses",
    ),
    ("it does not rewrite model output", "reasoning-parser tool-call-parser parser"),
    (
        "it keeps no tokens of earlier prompts",
        "tokenizer-cache-*",
    ),
    (
        "no such policy or parameter",
        "assignment-mode max-idle-secs bucket-adjust-interval-secs block-size cache-boundaries kv-event-*"
        " kv-penalty-* kv-aware-* pd-kv-events kv-index router-temperature selection-*"
        " power-of-two-load-metric least-load-* routing-key-*",
    ),
    ("no plugins", "enable-wasm wasm-* storage-hook-wasm-path"),
    ("one node", "enable-mesh mesh-*"),
    ("no encode stage", "epd-disaggregation encode* mm-* multimodal-* rdma-*"),
    (
        "it knows no clients, tenants or priorities",
        "jwt-* control-plane-* tenant-* trust-tenant-header priority-scheduler-*",
    ),
    (
        "not offered",
        "sse-keepalive-secs upstream-http2 health-check-port vllm-discovery-address zmq-engine-count"
        " model-alias discovery-provider worker-overload-* worker-warmup-* worker-stale-secs"
        " worker-stall-secs worker-wedge-secs worker-startup-delay disable-worker-overload-protection"
        " overload-* overlap-decay load-monitor-interval disable-load-monitoring"
        " disable-tokenizer-autoload remove-unhealthy-workers dp-minimum-tokens-scheduler"
        " balance-token-usage-threshold prefix-hash-balance-abs-threshold cache-index cache-ttl-secs"
        " prefill-queue-* prefill-max-inflight-requests-per-worker pd-admission-wait-secs"
        " max-buffered-request-bytes job-queue-* router-selector model-id-from"
        " kv-connector-annotation kv-engine-id-annotation schema-config storage-context-headers"
        " enable-rl rl-* log-mm-timing jemalloc-prof-dir enable-program-scheduling"
        " program-scheduling-config-json",
    ),
)


def reason_unsupported(name: str) -> str | None:
    """Return why meshd lacks the flag ``--name``; None if it is no such flag."""
    for reason, patterns in _REASONS:
        if any(_covers(pattern, name) for pattern in patterns.split()):
            return reason
    return None


def unsupported_flags() -> list[tuple[str, tuple[str, ...]]]:
    """List every reason with its flags and families."""
    return [(reason, tuple(patterns.split())) for reason, patterns in _REASONS]


def _covers(pattern: str, name: str) -> bool:
    if pattern.endswith("*"):
        return name.startswith(pattern[:-1])
    return name == pattern
