from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshd.log.line import MAX_LINE_BYTES, Timestamp, cut_free_text, encode_line

_ANY_TEXT = st.text(st.characters())  # lone surrogates, controls and separators included


def text_line(**fields: Any) -> str:
    return encode_line(fields, is_json=False).decode()


@pytest.mark.parametrize(
    ("at_ns", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (1_790_000_000_123_999_999, "2026-09-21T14:13:20.123Z"),
        (1_790_000_000_999_000_000, "2026-09-21T14:13:20.999Z"),
        (1_790_000_001_000_000_000, "2026-09-21T14:13:21.000Z"),
        (951_782_400_007_000_000, "2000-02-29T00:00:00.007Z"),
    ],
)
def test_timestamps_are_rfc3339_in_utc_with_milliseconds(at_ns: int, text: str) -> None:
    stamp = Timestamp()
    stamp.text(1_790_000_000_000_000_000)
    assert stamp.text(at_ns) == text


def test_values_are_written_by_type_and_empty_ones_left_out() -> None:
    line = text_line(a="x", b=5, c=1.23456, d=True, e=False, f=None, g="", h=0, i=("x", 1))
    assert line == "a=x b=5 c=1.235 d=true e=false h=0 i=\"('x', 1)\"\n"


def test_json_has_the_same_fields() -> None:
    fields = {"a": "x", "b": 5, "c": 1.23456, "d": True, "f": None, "g": "", "h": 0}
    assert encode_line(fields, is_json=True) == b'{"a":"x","b":5,"c":1.235,"d":true,"h":0}\n'


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("a b", '"a b"'),
        ("a=b", '"a=b"'),
        ('a"b', '"a\\"b"'),
        ("a\\b", '"a\\\\b"'),
        ("a\nb", '"a\\nb"'),
        ("\x1b[2J", '"\\u001b[2J"'),
        ("a\x7f", '"a\\u007f"'),
        ("a\x9b", '"a\\u009b"'),
        ("a\u2028b", '"a\\u2028b"'),
        ("\udcff", '"\\udcff"'),
        ("模型", "模型"),
    ],
)
def test_text_that_could_break_a_line_or_a_terminal_is_quoted_or_escaped(value: str, written: str) -> None:
    assert text_line(model=value, n=1) == f"model={written} n=1\n"


@given(_ANY_TEXT, _ANY_TEXT)
def test_json_lines_stay_one_line_and_give_the_text_back(first: str, second: str) -> None:
    line = encode_line({"a": first, "b": second}, is_json=True).decode()
    assert line.endswith("\n") and line[:-1].isprintable()
    expected = {name: text for name, text in (("a", first), ("b", second)) if text}
    assert json.loads(line) == expected


@given(_ANY_TEXT)
def test_text_lines_stay_one_line_of_printable_characters(value: str) -> None:
    line = text_line(a=value, b="x")
    assert line.endswith("b=x\n") and line[:-1].isprintable()


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize("character", ["x", "\x00", "型", "\U0001f600"])
def test_a_line_is_never_longer_than_a_pipe_takes_at_once(is_json: bool, character: str) -> None:
    head = {"ts": "t", "level": "info", "event": "e"}
    for fields in (
        {"text": character * 50_000},
        {f"f{i}": character * 3000 for i in range(9)},
        {f"f{i}": i for i in range(5000)},
    ):
        line = encode_line({**head, **fields}, is_json=is_json)
        assert len(line) <= MAX_LINE_BYTES
        assert line.endswith(b"\n")
        if is_json:
            assert json.loads(line)["event"] == "e"


def test_a_path_loses_its_query_and_its_end_and_a_model_its_end() -> None:
    fields = {"path": "/" + "é" * 200 + "?key=hunter2", "model": "m" * 127 + "é"}
    cut_free_text(fields)
    assert fields == {"path": "/" + "é" * 127, "model": "m" * 127}


def test_short_paths_and_models_stay_as_they_are() -> None:
    fields = {"path": "/v1/chat/completions", "model": "模型", "status": 200}
    cut_free_text(fields)
    assert fields == {"path": "/v1/chat/completions", "model": "模型", "status": 200}
