from __future__ import annotations

from meshd.config.command_line import CommandLine, CommandLineReader
from meshd.config.settings import SETTINGS


def read(*argv: str) -> CommandLine:
    names = {each.name.replace("_", "-"): each for each in SETTINGS if each.has_flag}
    names |= {alias: each for each in SETTINGS for alias in each.aliases}
    return CommandLineReader(names).read(argv)


def test_every_flag_of_a_single_value_takes_the_next_word_or_the_text_after_equals() -> None:
    assert read("--port", "1_234", "--host=::1").values == {"port": 1234, "host": "::1"}


def test_a_negative_number_is_a_value_and_no_flag() -> None:
    assert read("--max-concurrent-requests", "-1").values == {"max_concurrent_requests": -1}


def test_repeated_lists_add_up_in_order() -> None:
    line = read("--worker-urls", "http://a", "http://b", "--port", "1", "--worker-urls", "http://c")
    assert line.values["worker_urls"] == ("http://a", "http://b", "http://c")
    assert line.errors == []


def test_the_last_of_repeated_single_values_wins() -> None:
    assert read("--port", "1", "--port", "2").values == {"port": 2}


def test_booleans_are_set_bare_with_a_value_or_negated() -> None:
    assert read("--json-log").values == {"json_log": True}
    assert read("--json-log=false").values == {"json_log": False}
    assert read("--json-log", "--no-json-log").values == {"json_log": False}


def test_a_boolean_does_not_take_the_next_word() -> None:
    assert read("--json-log", "false").errors == ["unexpected word 'false'"]


def test_negation_is_for_booleans_and_takes_no_value() -> None:
    assert read("--no-port").errors == ["unknown flag --no-port: did you mean --port?"]
    assert read("--no-json-log=true").errors == ["--no-json-log takes no value"]


def test_an_alias_sets_the_setting() -> None:
    line = read("--log-json", "--upstream-pool-idle-timeout-secs", "2.5")
    assert line.values == {"json_log": True, "upstream_keepalive_timeout_secs": 2.5}


def test_an_unknown_flag_names_the_nearest_and_its_words_are_skipped() -> None:
    line = read("--max-payload", "5", "--port", "7")
    assert line.errors == ["unknown flag --max-payload: did you mean --max-payload-size?"]
    assert line.values == {"port": 7}


def test_a_flag_like_nothing_known_points_to_help() -> None:
    assert read("--qqqqqq").errors == ["unknown flag --qqqqqq: see meshd --help"]


def test_a_missing_value_is_one_error() -> None:
    assert read("--port", "--json-log").errors == ["--port needs a value"]
    assert read("--worker-urls").errors == ["--worker-urls needs at least one value"]


def test_an_unsupported_flag_says_why() -> None:
    assert read("--reasoning-parser", "x").errors == [
        "--reasoning-parser is not supported by meshd: it does not rewrite model output"
    ]


def test_special_flags_are_told_apart_from_settings() -> None:
    line = read("--config", "/x.toml", "--print-config", "-h")
    assert (line.config_path, line.asked, line.values) == ("/x.toml", {"print-config", "help"}, {})
    assert read("--config").errors == ["--config needs a path"]


def test_a_refused_value_is_marked_and_named() -> None:
    line = read("--port", "70000", "--queue-size", "1.5")
    assert line.errors == [
        "--port: 70000 is out of bounds: 0 to 65535",
        "--queue-size: '1.5' is not a whole number",
    ]
    assert line.failed == {"port", "queue_size"}
