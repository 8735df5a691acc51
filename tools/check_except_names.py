"""Refuse a function that gives one name to exceptions of two kinds.

    except OSError as error: …
    except ValueError as error: …      # refused: give it a name of its own

mypyc takes the type of such a name from the first clause. In the compiled build the second clause would raise
TypeError the moment it catches something, and mypy says nothing, since the source alone is correct.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

Scope = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def main(paths: Sequence[str]) -> int:
    """Look into the files and directories; exit code 1 if a name was found, 2 if there was no file."""
    files = [file for path in paths for file in _sources(Path(path))]
    if not files:
        sys.stderr.write("check_except_names: no Python file was given\n")
        return 2
    found = [f"{file}:{line}" for file in files for line in faults(file.read_text())]
    sys.stderr.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


def faults(source: str) -> list[str]:
    """Return a line (``LINE: what is wrong``) for each clause whose name has another type already."""
    found = []
    for scope in ast.walk(ast.parse(source)):
        if isinstance(scope, Scope):
            types: dict[str, str] = {}
            for clause in _clauses(scope):
                if clause.name and clause.type:
                    kind = ast.unparse(clause.type)
                    first = types.setdefault(clause.name, kind)
                    if kind != first:
                        found.append(f"{clause.lineno}: {clause.name} is {first} here already, not {kind}")
    return found


def _clauses(node: ast.AST) -> Iterator[ast.ExceptHandler]:
    """Yield the except clauses of a scope, in their order, without those of scopes inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ExceptHandler):
            yield child
        if not isinstance(child, Scope):
            yield from _clauses(child)


def _sources(path: Path) -> list[Path]:
    return sorted(path.rglob("*.py")) if path.is_dir() else [path]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
