from __future__ import annotations

from pathlib import Path

import pytest

import meshd
from tools.check_except_names import faults, main

TWO_KINDS = """
def load():
    try:
        read()
    except OSError as error:
        say(error)
    except ValueError as error:
        say(error)
"""


def test_one_name_for_two_kinds_is_told_with_its_line() -> None:
    assert faults(TWO_KINDS) == ["7: error is OSError here already, not ValueError"]


@pytest.mark.parametrize("kind", ["async def", "class"])
def test_other_scopes_are_looked_into_too(kind: str) -> None:
    name = "load" if kind == "class" else "load()"
    assert len(faults(TWO_KINDS.replace("def load()", f"{kind} {name}"))) == 1


def test_two_statements_of_one_function_share_their_names() -> None:
    second = "    try: write()\n    except KeyError as error: say(error)\n"
    assert len(faults(TWO_KINDS + second)) == 2


def test_clause_within_a_clause_counts() -> None:
    source = "try: a()\nexcept OSError as error:\n  try: b()\n  except ValueError as error: c()\n"
    assert faults(source) == ["4: error is OSError here already, not ValueError"]


@pytest.mark.parametrize(
    "replaced",
    [
        ("ValueError as error", "ValueError as fault"),  # a name of its own
        ("ValueError as error", "ValueError"),  # no name
        ("ValueError as error", "OSError as error"),  # the same type
    ],
)
def test_names_with_one_type_each_pass(replaced: tuple[str, str]) -> None:
    assert faults(TWO_KINDS.replace(*replaced)) == []


def test_function_inside_a_function_has_names_of_its_own() -> None:
    inner = "    def inner():\n        try: write()\n        except KeyError as error: say(error)\n"
    assert len(faults(TWO_KINDS + inner)) == 1


def test_exit_code_tells_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    (tmp_path / "good.py").write_text("x = 1\n")
    assert main([str(tmp_path)]) == 0
    (tmp_path / "bad.py").write_text(TWO_KINDS)
    assert main([str(tmp_path / "bad.py")]) == main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"{tmp_path}/bad.py:7: error is OSError")


def test_meshd_itself_passes() -> None:
    assert main([str(Path(meshd.__file__).parent)]) == 0
