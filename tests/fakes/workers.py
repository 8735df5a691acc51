"""The worker API of a running node, as a user calls it."""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.fakes.node import Node, wait_until

ABSENT = str(uuid.UUID(int=7))


def call(node: Node, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Return status and JSON of one request."""
    status, _, data = node.request(method, path, body)
    return status, json.loads(data) if data else None


def workers(node: Node) -> dict[str, dict[str, Any]]:
    """Return what is told of each upstream, by URL."""
    _, body = call(node, "GET", "/workers")
    return {info["url"]: info for info in body["workers"]}


def add(node: Node, url: str, **members: Any) -> str:
    """Register an upstream and wait until it is in use; return its id."""
    status, body = call(node, "POST", "/workers", {"url": url, **members})
    assert status == 202, body
    wait_until(lambda: workers(node)[url]["available"], f"{url} is not in use")
    return str(body["worker_id"])


def remove_all(node: Node) -> None:
    """Leave an empty set, whatever runs."""
    for info in workers(node).values():
        call(node, "DELETE", f"/workers/{info['id']}?force=true")
    wait_until(lambda: not workers(node), "the set is not empty")


def chat(node: Node, text: str = "hi", **members: Any) -> tuple[int, dict[str, str], bytes]:
    body = {"model": "m1", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **members}
    return node.request("POST", "/v1/chat/completions", body)


def served_by(node: Node, **members: Any) -> str:
    """Send a chat request and return the upstream that answered; needs ``--route-headers``."""
    status, headers, data = chat(node, **members)
    assert status == 200, data
    return headers["x-mesh-upstream"]


@contextmanager
def front_doors(node: Node) -> Iterator[dict[int, http.client.HTTPConnection]]:
    """Give one open connection to each I/O process, by its number."""
    doors: dict[int, http.client.HTTPConnection] = {}
    others = []
    try:
        for attempt in range(200):
            connection = http.client.HTTPConnection(node.host, node.port, timeout=30)
            name = f"door-{attempt}-{uuid.uuid4().hex}"
            connection.request("GET", "/get_server_info", headers={"x-request-id": name})
            connection.getresponse().read()
            wait_until(lambda: _line(node, name) is not None, "no access line")  # noqa: B023
            line = _line(node, name)
            assert line is not None
            if line["io_process"] in doors:
                others.append(connection)
            else:
                doors[line["io_process"]] = connection
            if len(doors) == 2:
                break
        assert len(doors) == 2
        yield doors
    finally:
        for connection in (*doors.values(), *others):
            connection.close()


def _line(node: Node, request_id: str) -> dict[str, Any] | None:
    return next((line for line in node.access_lines() if line.get("request_id") == request_id), None)
