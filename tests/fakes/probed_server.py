"""A server whose health, models and metrics a test sets, and that keeps who asked for what, and when."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass(frozen=True)
class Asked:
    at: float
    method: str
    path: str
    headers: dict[str, str]


@dataclass
class ProbedServer:
    """``answers``: by path, status and body; any other path is 404."""

    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answers = {
            "/health": (200, b""),
            "/v1/models": (200, b'{"data":[{"id":"m1","max_model_len":4096}]}'),
            "/v1/chat/completions": (200, b'{"choices":[]}'),
            **self.answers,
        }
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                self.rfile.read(length)
                path = self.path.partition("?")[0]
                headers = {name.lower(): value for name, value in self.headers.items()}
                server.asked.append(Asked(time.monotonic(), self.command, self.path, headers))
                status, body = server.answers.get(path, (404, b""))
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_HEAD = do_POST = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, path: str) -> list[Asked]:
        return [each for each in self.asked if each.path.partition("?")[0] == path]
