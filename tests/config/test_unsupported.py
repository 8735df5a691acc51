from __future__ import annotations

import pytest

from meshd.config.settings import SETTINGS
from meshd.config.unsupported import reason_unsupported, unsupported_flags

# Names that meshd specifies; some are still to come. No family of refused flags may swallow them.
_SPECIFIED = """
config print-config demo passthrough-paths backend cache-threshold balance-abs-threshold balance-rel-threshold
eviction-interval-secs max-tree-size score-weights score-latency-ref-ms score-default-capacity
score-half-life-secs dp-aware pd-disaggregation prefill decode prefill-policy decode-policy pd-protocol
kv-connector atom-pd-rank-mapping-policy pd-prefill-timeout-secs pd-max-handoff-bytes pd-missing-handoff
pd-prefill-failure pd-release-on-cancel ext-proc discovery-file discovery-dns discovery-check-interval-secs
service-discovery selector prefill-selector decode-selector service-discovery-port
service-discovery-namespace worker-startup-timeout-secs worker-startup-check-interval queue-aging-secs
max-concurrent-per-tenant tenants-file open-admin rate-limit-tokens-per-second cors-allowed-origins
disable-retries retry-max-retries retry-initial-backoff-ms retry-on-500 retry-budget-ratio
disable-circuit-breaker cb-failure-threshold cb-timeout-duration-secs tokenizer-crosscheck-ratio tls-cert-path
client-cert-path ca-cert-paths enable-trace otlp-traces-endpoint eviction-interval runtime
vllm-pd-disaggregation intra-node-data-parallel-size
"""


def test_no_family_covers_a_flag_that_meshd_has_or_will_have() -> None:
    names = [
        *_SPECIFIED,
        *(each.flag[2:] for each in SETTINGS),
        *(a for each in SETTINGS for a in each.aliases),
    ]
    assert [name for name in names if reason_unsupported(name)] == []


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mini-lb", "it stores no conversations and runs no tools"),
        ("history-backend", "it stores no conversations and runs no tools"),
        ("parser", "it does not rewrite model output"),
        ("tokenizer-cache-enable-l0", "it keeps no tokens of earlier prompts"),
        ("kv-event-port", "no such policy or parameter"),
        ("wasm-x", "no plugins"),
        ("mesh-port", "one node"),
        ("encode", "no encode stage"),
        ("jwt-issuer", "it knows no clients, tenants or priorities"),
        ("rl-mode", "not offered"),
        ("parsers", None),
        ("history", None),
    ],
)
def test_a_reason_is_found_by_name_or_family(name: str, reason: str | None) -> None:
    assert reason_unsupported(name) == reason


def test_every_listed_flag_has_exactly_its_own_reason() -> None:
    for reason, patterns in unsupported_flags():
        for pattern in patterns:
            assert reason_unsupported(pattern.replace("*", "x")) == reason
