"""A small API server for pods: it speaks the list and watch protocol of Kubernetes to any client.

Every change has a version; lists tell the version they were made at, in pages when a limit is asked for;
watches send the changes after theirs as lines of JSON in chunks, end after ``timeoutSeconds``, and follow
selectors: a pod that no longer matches is DELETED for whoever watches those that do. Versions before
``compact()`` are gone: 410.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

Pod = dict[str, Any]


@dataclass
class Change:
    version: int
    before: Pod | None
    after: Pod | None


@dataclass
class Seen:
    """One request."""

    path: str
    query: dict[str, str]
    authorization: str | None

    @property
    def is_watch(self) -> bool:
        return self.query.get("watch", "").lower() == "true"


@dataclass
class State:
    """What the server knows, under ``changed``, a condition that every watch waits for."""

    pods: dict[str, Pod] = field(default_factory=dict)
    history: list[Change] = field(default_factory=list)
    version: int = 100
    oldest: int = 0
    bookmarks: int = 0
    cuts: int = 0
    refusal: int = 0
    token: str = ""
    watches: int = 0
    is_closed: bool = False
    seen: list[Seen] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)


class KubernetesApi:
    """``certificate``: PEM file of chain and key for https. ``token``: what requests must carry then."""

    def __init__(self, certificate: Path | None = None, token: str = "") -> None:
        self.state = State(token=token)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.state = self.state  # type: ignore[attr-defined]
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        self.url = f"http{'s' if certificate else ''}://127.0.0.1:{self.port}"
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._change(is_closed=True)
        self._server.shutdown()
        self._server.server_close()

    # ------------------------------------------------------------------------------------ the cluster

    def put(
        self,
        uid: str,
        ip: str = "",
        *,
        ready: bool = True,
        labels: dict[str, str] | None = None,
        namespace: str = "default",
        terminating: bool = False,
    ) -> None:
        """Create a pod, or replace the one with this UID."""
        metadata: dict[str, Any] = {
            "name": f"engine-{uid}",
            "namespace": namespace,
            "uid": uid,
            "labels": {"app": "engine"} if labels is None else labels,
        }
        if terminating:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        conditions = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True" if ready else "False"},
        ]
        status = {"phase": "Running", "conditions": conditions, **({"podIP": ip} if ip else {})}
        self._store(uid, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status})

    def delete(self, uid: str) -> None:
        self._store(uid, None)

    # ------------------------------------------------------------------------------------- its faults

    def compact(self) -> None:
        """Forget all versions but the newest."""
        with self.state.changed:
            self._change(oldest=self.state.version)

    def bookmark(self) -> None:
        """Have every watch told the newest version."""
        with self.state.changed:
            self.state.version += 1
            self._change(bookmarks=self.state.bookmarks + 1)

    def cut(self) -> None:
        """Break every watch in the middle."""
        self._change(cuts=self.state.cuts + 1)

    def refuse(self, status: int) -> None:
        """Answer every request so, 0: answer properly."""
        self._change(refusal=status)

    # -------------------------------------------------------------------------------------- observing

    def lists(self) -> list[Seen]:
        return [each for each in self.state.seen if not each.is_watch]

    def watches(self) -> list[Seen]:
        return [each for each in self.state.seen if each.is_watch]

    def wait_for_watch(self, timeout_s: float = 10.0) -> None:
        """Wait until a watch is open that knows all there is."""
        with self.state.changed:
            assert self.state.changed.wait_for(lambda: self.state.watches > 0, timeout_s), "nobody watches"

    def _store(self, uid: str, pod: Pod | None) -> None:
        with self.state.changed:
            self.state.version += 1
            if pod is not None:
                pod["metadata"]["resourceVersion"] = str(self.state.version)
            before = self.state.pods.pop(uid, None)
            if pod is not None:
                self.state.pods[uid] = pod
            self.state.history.append(Change(self.state.version, before, pod))
            self._change()

    def _change(self, **values: Any) -> None:
        with self.state.changed:
            for name, value in values.items():
                setattr(self.state, name, value)
            self.state.changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def state(self) -> State:
        return self.server.state  # type: ignore[attr-defined,no-any-return]

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        seen = Seen(parts.path, query, self.headers.get("authorization"))
        with self.state.changed:
            self.state.seen.append(seen)
        namespace = self._namespace(parts.path)
        if self.state.refusal:
            self._refuse(self.state.refusal, "refused for a test")
        elif self.state.token and seen.authorization != f"bearer {self.state.token}":
            self._refuse(401, "Unauthorized")
        elif namespace is None:
            self._refuse(404, "the server could not find the requested resource")
        elif seen.is_watch:
            self._watch(namespace, query)
        else:
            self._list(namespace, query)

    def _namespace(self, path: str) -> str | None:
        """Return the namespace asked for, empty for all, None for another resource."""
        words = path.strip("/").split("/")
        if words == ["api", "v1", "pods"]:
            return ""
        if len(words) == 5 and words[:3] == ["api", "v1", "namespaces"] and words[4] == "pods":
            return words[3]
        return None

    def _list(self, namespace: str, query: dict[str, str]) -> None:
        with self.state.changed:
            version, *rest = query.get("continue", f"{self.state.version}/0").split("/")
            start = int(rest[0])
            found = [pod for pod in self.state.pods.values() if _matches(pod, namespace, query)]
            is_gone = int(version) < self.state.oldest
        if is_gone:
            self._refuse(410, "The provided continue parameter is too old")
            return
        limit = int(query.get("limit") or 0) or len(found) or 1
        metadata = {"resourceVersion": version}
        if start + limit < len(found):
            metadata["continue"] = f"{version}/{start + limit}"
        items = found[start : start + limit]
        self._answer(200, {"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items})

    def _watch(self, namespace: str, query: dict[str, str]) -> None:
        state = self.state
        version = int(query.get("resourceVersion") or 0)
        deadline_s = time.monotonic() + float(query.get("timeoutSeconds") or 3600)
        bookmarks, cuts = state.bookmarks, state.cuts
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                with state.changed:
                    is_gone = version < state.oldest
                    due = [] if is_gone else [change for change in state.history if change.version > version]
                    has_bookmark, bookmarks = state.bookmarks > bookmarks, state.bookmarks
                    newest = state.version
                if is_gone:
                    status = {
                        "kind": "Status",
                        "code": 410,
                        "reason": "Expired",
                        "message": "too old version",
                    }
                    self._send({"type": "ERROR", "object": status})
                    break
                for change in due:
                    self._send_change(change, namespace, query)
                    version = change.version
                if has_bookmark and query.get("allowWatchBookmarks", "").lower() == "true":
                    version = newest
                    told = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": str(newest)}}
                    self._send({"type": "BOOKMARK", "object": told})
                with state.changed:
                    if state.version == newest and state.cuts == cuts and not state.is_closed:
                        state.watches += 1
                        state.changed.notify_all()
                        state.changed.wait(max(0.0, deadline_s - time.monotonic()))
                        state.watches -= 1
                if state.cuts > cuts or state.is_closed:
                    self.wfile.write(b"40\r\n{")  # a chunk that never comes whole
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
                if time.monotonic() >= deadline_s:
                    break
            self.wfile.write(b"0\r\n\r\n")

    def _send_change(self, change: Change, namespace: str, query: dict[str, str]) -> None:
        was = change.before is not None and _matches(change.before, namespace, query)
        is_now = change.after is not None and _matches(change.after, namespace, query)
        if is_now:
            self._send({"type": "MODIFIED" if was else "ADDED", "object": change.after})
        elif was:
            assert change.before is not None
            last = change.after or change.before
            metadata = {**last["metadata"], "resourceVersion": str(change.version)}
            self._send({"type": "DELETED", "object": {**last, "metadata": metadata}})

    def _send(self, event: dict[str, Any]) -> None:
        data = json.dumps(event).encode() + b"\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _refuse(self, status: int, message: str) -> None:
        self._answer(status, {"kind": "Status", "status": "Failure", "code": status, "message": message})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _matches(pod: Pod, namespace: str, query: dict[str, str]) -> bool:
    metadata = pod["metadata"]
    wanted = dict(pair.split("=", 1) for pair in query.get("labelSelector", "").split(",") if pair)
    return (not namespace or metadata["namespace"] == namespace) and wanted.items() <= metadata[
        "labels"
    ].items()


def kubeconfig(url: str) -> str:
    """Return the text of a file for KUBECONFIG that points to ``url``, without credentials."""
    return json.dumps(  # JSON is YAML
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
    )
