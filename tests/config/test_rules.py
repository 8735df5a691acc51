from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from meshd.config import ConfigErrors
from meshd.config.sources import load_settings


def errors(*argv: str) -> str:
    with pytest.raises(ConfigErrors) as caught:
        load_settings(argv, {})
    assert len(caught.value.errors) == 1
    return caught.value.errors[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--prometheus-port 30000", "the two listeners must differ"),
        ("--port 9 --prometheus-port 9 --host 127.0.0.1", "the two listeners must differ"),
        ("--port 9 --prometheus-port 9 --host ::1 --prometheus-host ::1", "the two listeners must differ"),
        ("--max-payload-size 2048 --body-memory-bytes 1024", "is larger than --body-memory-bytes"),
        ("--queue-timeout-secs 0", "--queue-timeout-secs must be above 0"),
        ("--health-check-interval-secs 4", "--health-check-timeout-secs (5) is above"),
        ("--retry-max-backoff-ms 20", "--retry-max-backoff-ms (20) is below --retry-initial-backoff-ms (50)"),
        ("--prepare-timeout-ms 100", "--prepare-queue-timeout-ms (2000) is above"),
        (
            "--worker-urls http://a:1/ HTTP://A:1 http://a:1",
            "the upstream http://a:1 is given more than once",
        ),
        ("--io-cpus 0-3 --prepare-cpus 3-4", "overlap: 3"),
        ("--chat-template /nowhere/x.jinja", "--chat-template: /nowhere/x.jinja: cannot be read"),
        ("--log-dir /nowhere", "--log-dir: /nowhere"),
        ("--tls-cert-path /a", "--tls-cert-path is given without --tls-key-path: give both or neither"),
        ("--tls-key-path /a", "--tls-key-path is given without --tls-cert-path"),
        ("--client-cert-path /a", "--client-cert-path is given without --client-key-path"),
        ("--client-key-path /a", "--client-key-path is given without --client-cert-path"),
        (
            "--tls-cert-path /nowhere/c --tls-key-path /nowhere/k",
            "--tls-cert-path: /nowhere/c: cannot be read",
        ),
        (
            "--client-cert-path /nowhere/c --client-key-path /nowhere/k",
            "--client-cert-path: /nowhere/c: cannot be read",
        ),
        ("--ca-cert-paths /nowhere/a", "--ca-cert-paths: /nowhere/a: cannot be read"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(argv: str, words: str) -> None:
    assert words in errors(*argv.split())


@pytest.mark.parametrize(
    "argv",
    [
        "--port 0 --prometheus-port 0",
        "--port 9 --prometheus-port 9 --host 127.0.0.1 --prometheus-host 127.0.0.2",
        "--queue-timeout-secs 0 --queue-size 0",
        "--max-payload-size 1024 --body-memory-bytes 1024",
        "--io-cpus 0-3 --prepare-cpus 4-5",
        "",
    ],
)
def test_settings_at_the_edge_are_accepted_without_a_warning(argv: str) -> None:
    assert load_settings([*argv.split(), "--worker-urls", "http://a"], {}).warnings == ()


def test_an_upstream_may_not_stand_in_a_table_and_in_the_list(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text('[[workers]]\nurl = "http://a"\n')
    assert "http://a is given more than once" in errors("--config", str(file), "--worker-urls", "http://a/")


def test_two_choices_with_one_upstream_are_warned_of_when_chosen() -> None:
    assert load_settings(["--worker-urls", "http://a"], {}).warnings == ()
    chosen = ["--policy", "power_of_two", "--worker-urls", "http://a"]
    assert "only one is given" in load_settings(chosen, {}).warnings[0]
    assert load_settings([*chosen, "http://b"], {}).warnings == ()


def test_a_body_bound_above_the_body_memory_is_only_a_warning_when_defaulted() -> None:
    result = load_settings(["--body-memory-bytes", "1048576", "--demo", "1"], {})
    assert "the smaller is the bound" in result.warnings[0]
    assert result.settings.max_payload_size == 536870912


def test_a_policy_that_reads_tokens_without_a_tokenizer_is_warned_of(tmp_path: Path) -> None:
    words = "--policy prefix_hash reads tokens: without --tokenizer-path or --model-path"
    start = ["--policy", "prefix_hash", "--worker-urls", "http://a"]
    assert load_settings(start, {}).warnings[0].startswith(words)
    (tmp_path / "tokenizer.json").write_text("{}")
    for more in (["--tokenizer-path", str(tmp_path)], ["--model-path", str(tmp_path)], ["--demo", "1"]):
        assert load_settings([*start, *more], {}).warnings == ()


def test_a_tokenizer_that_cannot_be_one_is_refused_with_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    assert errors("--tokenizer-path", str(file)) == f"--tokenizer-path: {file}: no such file or directory"
    assert errors("--model-path", str(tmp_path)) == f"--model-path: {tmp_path}: has no tokenizer.json"
    file.write_text("version https://git-lfs\n")
    assert errors("--tokenizer-path", str(file)) == f"--tokenizer-path: {file} is not valid JSON"
    assert errors("--tokenizer-path", str(tmp_path)) == f"--tokenizer-path: {tmp_path} is not valid JSON"
    file.write_text('\n {"version": "1.0"}')
    for path in (file, tmp_path):
        load_settings(["--tokenizer-path", str(path)], {})
    load_settings(["--tokenizer-path", str(file), "--model-path", "/nowhere"], {})  # the first one wins


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "gpt2"])
def test_a_name_of_a_hub_is_taken_where_its_client_is_installed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_settings(["--tokenizer-path", name], {}).settings.tokenizer_path == name
    assert errors("--tokenizer-path", "m1/tokenizer.json").endswith(": no such file or directory")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = "is not a path, and huggingface_hub is not installed"
    assert errors("--tokenizer-path", name) == f"--tokenizer-path: {name} {words}"


def test_a_node_without_servers_is_warned_of() -> None:
    words = "no servers: give --worker-urls, [[workers]], discovery or --demo"
    assert load_settings([], {}).warnings == (words,)
    assert load_settings(["--discovery-file", "/a"], {}).warnings == ()
    assert load_settings(["--demo", "1"], {}).warnings == ()


def test_a_server_given_by_the_base_url_of_its_api_is_warned_of() -> None:
    assert load_settings(["--worker-urls", "http://a:8000/v1/", "http://b/llm"], {}).warnings == (
        "'http://a:8000/v1' ends in /v1: give the server's root, http://a:8000",
    )


def test_service_discovery_needs_a_selector() -> None:
    assert errors("--service-discovery") == (
        "--service-discovery needs --selector: the labels of the pods to register"
    )
    assert load_settings(["--service-discovery", "--selector", "app=engine"], {}).warnings == ()


def test_a_selector_without_service_discovery_is_warned_of() -> None:
    warnings = load_settings(["--selector", "app=engine", "--demo", "1"], {}).warnings
    assert warnings == ("--selector does nothing without --service-discovery",)


@pytest.mark.parametrize(
    ("package", "argv", "words"),
    [
        (
            "dns",
            "--discovery-dns a.example",
            "--discovery-dns needs the package dnspython: pip install 'meshd[dns]'",
        ),
        (
            "kubernetes",
            "--service-discovery --selector a=b",
            "--service-discovery needs the package kubernetes: pip install 'meshd[kubernetes]'",
        ),
        (
            "opentelemetry.exporter.otlp.proto.grpc",
            "--enable-trace",
            "--enable-trace needs the package opentelemetry-exporter-otlp-proto-grpc:"
            " pip install 'meshd[tracing]'",
        ),
    ],
)
def test_a_feature_whose_package_is_missing_says_how_to_install_it(
    package: str, argv: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_settings(argv.split(), {})
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    assert errors(*argv.split()) == words


def test_power_of_two_with_one_server_and_discovery_is_not_warned_of() -> None:
    argv = ["--worker-urls", "http://a", "--policy", "power_of_two"]
    assert len(load_settings(argv, {}).warnings) == 1
    assert load_settings([*argv, "--discovery-dns", "b.example"], {}).warnings == ()
