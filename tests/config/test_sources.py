from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from meshd.config import SETTINGS, ConfigErrors, Settings
from meshd.config.sources import Action, LoadResult, load_settings


def load(*argv: str, **environ: str) -> LoadResult:
    return load_settings(argv, environ)


def errors(argv: Sequence[str] = (), **environ: str) -> tuple[str, ...]:
    with pytest.raises(ConfigErrors) as caught:
        load_settings(argv, environ)
    assert caught.value.exit_code == 2
    return caught.value.errors


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "meshd.toml"


def test_without_anything_every_setting_has_its_default() -> None:
    result = load()
    assert result.settings == Settings()
    assert set(result.sources) == {each.name for each in SETTINGS}
    assert set(result.sources.values()) == {"default"}
    assert result.action is Action.RUN


def test_flag_wins_over_variable_over_file_over_default(file: Path) -> None:
    file.write_text("port = 1\nqueue_size = 1\nmax_headers = 100\n")
    result = load("--config", str(file), "--port", "3", MESHD_PORT="2", MESHD_QUEUE_SIZE="2")
    settings, sources = result.settings, result.sources
    assert (settings.port, sources["port"]) == (3, "flag")
    assert (settings.queue_size, sources["queue_size"]) == (2, "env")
    assert (settings.max_headers, sources["max_headers"]) == (100, "file")
    assert (settings.demo, sources["demo"]) == (0, "default")


def test_a_list_from_a_higher_place_replaces_the_lower_one_whole(file: Path) -> None:
    file.write_text('worker_urls = ["http://a", "http://b"]\n')
    result = load("--config", str(file), MESHD_WORKER_URLS="http://c  http://d")
    assert result.settings.worker_urls == ("http://c", "http://d")


def test_the_file_may_come_from_the_environment_and_a_flag_wins(file: Path) -> None:
    file.write_text("port = 4\n")
    assert load(MESHD_CONFIG=str(file)).settings.port == 4
    assert load("--config", str(file), MESHD_CONFIG="/nowhere").settings.port == 4


def test_a_key_with_hyphens_is_the_same_key(file: Path) -> None:
    file.write_text("max-payload-size = 5\n")
    assert load("--config", str(file)).settings.max_payload_size == 5
    file.write_text("max-payload-size = 5\nmax_payload_size = 6\n")
    assert errors(["--config", str(file)]) == (f"{file}: max_payload_size: max_payload_size is given twice",)


def test_the_example_of_the_documentation_is_read(file: Path) -> None:
    file.with_name("tokenizer.json").write_text("{}")
    file.write_text(
        'host = "0.0.0.0"\npolicy = "prefix_hash"\nmax_concurrent_requests = 512\n'
        f'tokenizer_path = "{file.parent}"\n'
        '[[workers]]\nurl = "http://10.0.0.1:8000/"\napi_key = "k-7f21"\nmodel_id = "m1"\n'
        'labels = { "mesh.apis" = "/v1/responses" }\n[[workers]]\nurl = "http://10.0.0.2:8000"\n'
    )
    settings = load("--config", str(file)).settings
    assert [spec.url for spec in settings.workers] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert settings.workers[0].labels == {"mesh.apis": "/v1/responses"}
    assert settings.policy == "prefix_hash"


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("on", True), ("Yes", True), ("0", False), ("off", False)]
)
def test_booleans_of_the_environment(text: str, value: bool) -> None:
    assert load(MESHD_JSON_LOG=text).settings.json_log is value


def test_a_misspelt_name_is_refused_in_each_place_and_the_right_one_named(file: Path) -> None:
    file.write_text("max_paylod_size = 1\n")
    assert errors(MESHD_MAX_PAYLOD_SIZE="1") == (
        "unknown variable MESHD_MAX_PAYLOD_SIZE: did you mean MESHD_MAX_PAYLOAD_SIZE?",
    )
    assert errors(["--max-paylod-size", "1"]) == (
        "unknown flag --max-paylod-size: did you mean --max-payload-size?",
    )
    assert errors(["--config", str(file)]) == (
        f"{file}: unknown key max_paylod_size: did you mean max_payload_size?",
    )


def test_names_that_kubernetes_sets_are_ignored() -> None:
    result = load(
        MESHD_PORT="tcp://10.0.0.9:30000",
        MESHD_SERVICE_HOST="10.0.0.9",
        MESHD_PORT_30000_TCP_ADDR="10.0.0.9",
        MESHD_SERVICE_PORT="30000",
    )
    assert result.settings.port == 30000
    assert result.sources["port"] == "default"


def test_faults_of_all_places_are_reported_together(file: Path) -> None:
    file.write_text("queue_size = -1\n")
    assert errors(["--port", "x", "--config", str(file)], MESHD_DEMO="many") == (
        "--port: 'x' is not a whole number",
        "MESHD_DEMO: 'many' is not a whole number",
        f"{file}: queue_size: -1 is out of bounds: at least 0",
    )


def test_a_fault_in_a_place_that_is_overruled_is_still_a_fault() -> None:
    assert errors(["--port", "1"], MESHD_PORT="x") == ("MESHD_PORT: 'x' is not a whole number",)


def test_a_rule_is_not_asked_about_a_value_that_was_refused() -> None:
    argv = ["--health-check-timeout-secs", "100", "--health-check-interval-secs", "never"]
    assert errors(argv) == ("--health-check-interval-secs: 'never' is not a number",)


def test_a_file_that_is_missing_or_no_toml_is_a_fault(file: Path) -> None:
    assert errors(["--config", str(file)]) == (f"{file}: cannot be read: No such file or directory",)
    file.write_text("port = = 1\n")
    assert errors(["--config", str(file)])[0].startswith(f"{file}: is not TOML: ")
    file.write_bytes(b'host = "\xff"\n')
    assert errors(["--config", str(file)])[0].startswith(f"{file}: is not TOML: ")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('port = "1"', "port: must be a whole number"),
        ("port = true", "port: must be a whole number"),
        ("json_log = 1", "json_log: must be true or false"),
        ("host = 1", "host: must be a string"),
        ('worker_urls = "http://a"', "worker_urls: must be an array"),
        ("worker_urls = [1]", "worker_urls: must be a string"),
        ("request_timeout_secs = nan", "request_timeout_secs: must be a finite number"),
        ("workers = 1", "workers: must be tables, each written [[workers]]"),
        ('[[workers]]\nmodel_id = "m"', "workers: table 1: needs a url"),
    ],
)
def test_a_value_of_another_type_is_refused(file: Path, line: str, words: str) -> None:
    file.write_text(line)
    assert errors(["--config", str(file)]) == (f"{file}: {words}",)


def test_tables_cannot_be_given_as_a_flag_or_a_variable() -> None:
    assert errors(["--workers", "x"]) == ("unknown flag --workers: did you mean --worker-urls?",)
    assert errors(MESHD_WORKERS="x")[0].startswith("unknown variable MESHD_WORKERS: did you mean ")


def test_an_unsupported_name_says_why_in_the_environment_and_the_file_too(file: Path) -> None:
    file.write_text("mini_lb = true\n")
    reason = "is not supported by meshd: it stores no conversations and runs no tools"
    assert errors(MESHD_MINI_LB="1") == (f"MESHD_MINI_LB {reason}",)
    assert errors(["--config", str(file)]) == (f"{file}: mini_lb {reason}",)


def test_help_and_version_are_granted_despite_faults() -> None:
    assert load("--bogus", "--help").action is Action.HELP
    assert load("--version", MESHD_BOGUS="1").action is Action.VERSION


def test_a_setting_that_is_specified_but_not_there_yet_is_unknown() -> None:
    assert errors(["--tenants-file", "x"])[0].startswith("unknown flag --tenants-file: ")


def test_text_that_is_not_utf8_is_refused() -> None:
    assert errors(MESHD_MODEL_PATH="\udcff") == ("MESHD_MODEL_PATH: is not UTF-8",)
