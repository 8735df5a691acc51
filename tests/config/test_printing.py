from __future__ import annotations

import tomllib
from pathlib import Path

from meshd.config import SETTINGS
from meshd.config.printing import config_text, help_text
from meshd.config.sources import load_settings


def test_the_printed_configuration_is_a_file_that_gives_the_same_settings(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    argv = ["--worker-urls", "http://a", "--port", "7", "--no-json-log", "--shutdown-delay-secs", "0.5"]
    argv += ["--tokenizer-path", str(tmp_path), "--selector", "app=x", "a/b=", "--service-discovery"]
    result = load_settings(argv, {"MESHD_MODEL_PATH": 'a "b"\\\x7f\n'})
    file = tmp_path / "m.toml"
    file.write_text(config_text(result, {}))
    assert load_settings(["--config", str(file)], {}).settings == result.settings


def test_each_line_names_its_setting_and_source() -> None:
    lines = config_text(load_settings(["--port", "7"], {"MESHD_DEMO": "2"}), {"io_processes": 3}).splitlines()
    assert len(lines) == len(SETTINGS)
    assert "port = 7  # flag" in lines
    assert "demo = 2  # env" in lines
    assert "queue_size = 100  # default" in lines
    assert "io_processes = 3  # derived" in lines


def test_secrets_are_not_printed(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text('[[workers]]\nurl = "http://a"\napi_key = "hunter2"\n')
    text = config_text(load_settings(["--config", str(file), "--api-key", "hunter2"], {}), {})
    assert "hunter2" not in text
    assert 'api_key = "***"  # flag' in text
    assert tomllib.loads(text)["workers"][0]["api_key"] == "***"


def test_an_unset_secret_is_shown_as_unset() -> None:
    assert 'api_key = ""  # default' in config_text(load_settings([], {}), {})


def test_help_starts_with_three_commands_and_shows_every_flag() -> None:
    text = help_text("1.2.3", 80)
    examples = [line for line in text.splitlines()[:9] if line.startswith("  meshd ")]
    assert len(examples) == 3
    for each in SETTINGS:
        assert each.has_flag is (f"  {each.flag}" in text)
    assert "[30000]" in text


def test_help_keeps_to_the_width() -> None:
    for width in (60, 80, 120):
        flags = help_text("1.2.3", width).split("Listeners\n")[1]
        assert max(map(len, flags.splitlines())) <= width
    assert help_text("1.2.3", 3) == help_text("1.2.3", 40)
