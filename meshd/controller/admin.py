"""The admin routes that I/O processes relay to the controller: a table of them, and how one is found.

What a route does stands in the file that makes its rows: ``worker_info.py``, ``worker_changes.py``,
``fleet.py`` and so on. ``controller/process.py`` puts the rows together.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from meshd.controller.answers import error_answer, worker_error
from meshd.controller.http_server import Request, Response
from meshd.errors import MeshError
from meshd.log import Log

_PLACEHOLDER: Final = re.compile(r"\{[^}]*\}")

Answerer = Callable[[Request, str], Awaitable[Response]]
"""Answers a request; the text is what the placeholder of the path stands for, percent-decoded, else empty.

A ``MeshError`` that it raises is answered in the common envelope.
"""


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """One row. ``path``: a template with at most one ``{…}``, which stands for one segment of a path.

    A ``GET`` row answers ``HEAD`` too.
    """

    method: str
    path: str
    answer: Answerer


class AdminRoutes:
    """Finds the row of a request on the controller's Unix socket and has it answered."""

    def __init__(self, routes: Iterable[AdminRoute], log: Log) -> None:
        self._log = log
        self._paths: dict[str, dict[str, Answerer]] = {}
        for route in routes:
            methods = self._paths.setdefault(route.path, {})
            for method in ("GET", "HEAD") if route.method == "GET" else (route.method,):
                methods[method] = route.answer
        self._templates = [(_pattern(path), methods) for path, methods in self._paths.items() if "{" in path]

    async def handle(self, request: Request) -> Response:
        methods, segment = self._find(request.path)
        if methods is None:
            return error_answer(request, "not_found", "There is no such path.")
        answer = methods.get(request.method)
        if answer is None:
            allow = ", ".join(methods)
            return error_answer(request, "method_not_allowed", f"This path answers {allow}.", allow)
        try:
            return await answer(request, segment)
        except MeshError as error:
            return error_answer(request, error.code, error.message)
        except Exception as fault:  # the edge of one admin request: the controller goes on
            trace = "".join(traceback.format_exception(fault))
            self._log.error("internal_error", path=request.path, error=repr(fault), trace=trace)
            message = "Something went wrong here."
            if request.path.startswith("/workers"):
                return worker_error(request, 500, "INTERNAL_SERVER_ERROR", message)
            return error_answer(request, "internal_error", message)

    def _find(self, path: str) -> tuple[dict[str, Answerer] | None, str]:
        methods = self._paths.get(path)
        if methods is not None and "{" not in path:
            return methods, ""
        for pattern, found in self._templates:
            match = pattern.fullmatch(path)
            if match is not None:
                return found, unquote(match[1])
        return None, ""

    def __repr__(self) -> str:
        return f"AdminRoutes({sorted(self._paths)})"


def _pattern(template: str) -> re.Pattern[str]:
    before, after = _PLACEHOLDER.split(template)
    return re.compile(f"{re.escape(before)}([^/]+){re.escape(after)}")
