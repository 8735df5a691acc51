"""Metrics of several servers as one text, checked with the parser of prometheus_client."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshd.controller.engine_metrics import merge

A, B = "http://a:1", "http://b:1"

ENGINE = b"""# HELP sglang:num_running_reqs Running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m1"} 3
# HELP sglang:e2e_seconds Time.
# TYPE sglang:e2e_seconds histogram
sglang:e2e_seconds_bucket{le="1.0",model_name="m1"} 1
sglang:e2e_seconds_bucket{le="+Inf",model_name="m1"} 2
sglang:e2e_seconds_sum{model_name="m1"} 2.5
sglang:e2e_seconds_count{model_name="m1"} 2
# TYPE process_cpu_seconds_total counter
process_cpu_seconds_total 12.5
"""


def merged(texts: dict[str, bytes], failures: dict[str, str] | None = None) -> str:
    text, _ = merge(texts, failures or {})
    assert not texts, "a text is held for longer than it is read"
    list(text_string_to_metric_families(text.decode()))  # it parses
    return text.decode()


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_families_of_one_name_are_merged_with_metadata_once_and_the_worker_told() -> None:
    """admin.md behaviour 15, its first half."""
    text = merged({A: ENGINE, B: ENGINE.replace(b" 3\n", b" 4\n").replace(b"Time.", b"Other words.")})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert {name: family.type for name, family in families.items()} == {
        "sglang_num_running_reqs": "gauge",
        "sglang_e2e_seconds": "histogram",
        "process_cpu_seconds": "counter",
    }
    assert families["sglang_e2e_seconds"].documentation == "Time."
    assert text.count("# TYPE sglang_e2e_seconds histogram") == 1
    found = samples(text)
    running = {
        dict(labels)["worker_addr"]: value
        for (name, labels), value in found.items()
        if name == "sglang_num_running_reqs"
    }
    assert running == {A: 3.0, B: 4.0}
    assert all("worker_addr" in dict(labels) for _, labels in found)
    assert len(found) == 12


@pytest.mark.parametrize(
    "garbage",
    [
        b"<html>no metrics</html>",
        b"a_metric",
        b"a_metric1",
        b"a_metric one",
        b"a_metric{x=1} 2",
        b'a_metric{x="1" y="2"} 2',
        b'a_metric{x="1"} 2 3 4',
        b'a_metric{x="1} 2',
        b"\xff\xfe",
        b'{"json":1}',
    ],
)
def test_server_that_answers_garbage_is_left_out_with_a_comment(garbage: bytes) -> None:
    """admin.md behaviour 15, its second half."""
    text, count = merge({A: ENGINE, B: b"fine 1\n" + garbage + b"\n"}, {})
    assert count == 1
    assert f"# left out: worker {B}: " in text.decode()
    assert "fine" not in text.decode()
    assert samples(text.decode())


def test_server_that_failed_is_told_in_one_line() -> None:
    text = merged({A: ENGINE}, {B: "HTTP 500\nsomething_evil 1"})
    assert f"# left out: worker {B}: HTTP 500 something_evil 1\n" in text
    assert ("something_evil", frozenset()) not in samples(text)


def test_family_whose_types_disagree_is_left_out_with_all_its_samples() -> None:
    other = b'# TYPE sglang:e2e_seconds summary\nsglang:e2e_seconds{quantile="0.5"} 1\nx 1\n'
    text = merged({A: ENGINE, B: other})
    assert "# left out: family sglang_e2e_seconds: its types disagree: histogram, summary" in text
    assert {name for name, _ in samples(text)} == {
        "sglang_num_running_reqs",
        "process_cpu_seconds_total",
        "x",
    }


def test_label_of_our_name_is_kept_under_another_and_odd_texts_survive() -> None:
    line = b'x{worker_addr="w", path="a\\"b,}\\\\\\n worker_addr=",} NaN 1790000000000\n'
    ((name, labels),) = samples(merged({A: line}))
    assert name == "x"
    assert dict(labels) == {
        "worker_addr": A,
        "exported_worker_addr": "w",
        "path": 'a"b,}\\\n worker_addr=',
    }


def test_colons_may_make_two_families_one_and_equal_series_count_once() -> None:
    text = merged({A: b"# TYPE a:b gauge\na:b 1\n# TYPE a_b gauge\na_b 2\n"})
    assert samples(text) == {("a_b", frozenset({("worker_addr", A)})): 1.0}


def test_family_that_one_server_does_not_declare_takes_the_type_of_the_other() -> None:
    bare = b'sglang:e2e_seconds_bucket{le="+Inf"} 7\nsglang:e2e_seconds_sum 1\nsglang:e2e_seconds_count 7\n'
    text = merged({A: ENGINE, B: bare})
    assert text.count("# TYPE sglang_e2e_seconds") == 1
    assert f'sglang_e2e_seconds_sum{{worker_addr="{B}"}} 1' in text


@pytest.mark.parametrize("text", [b"x 1", b"\n\n  x   1  \n", b"# a comment\nx{} 1\r\n", b"x\t1"])
def test_layout_does_not_matter(text: bytes) -> None:
    assert samples(merged({A: text})) == {("x", frozenset({("worker_addr", A)})): 1.0}
