"""List and watch pods with the official Kubernetes client; it blocks, so it belongs into a thread.

The client brings addresses, TLS and credentials, those of a service account refreshed when they rotate.
Bodies are read here from the JSON itself: the client's models cost a millisecond of the interpreter lock
for each pod, and the loop of the controller would pay for it.

Kubernetes, "API Concepts": a list tells the version it was made at; a watch from there tells every change
since, and bookmarks, which only tell a later version. 410 says that a version is too old: list again.

Needs the extra ``kubernetes``; the settings are refused without it, so that nobody else imports this module.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import orjson
import urllib3
import yaml
from kubernetes import client
from kubernetes import config as client_config
from kubernetes.config.incluster_config import InClusterConfigLoader
from kubernetes.watch.watch import iter_resp_lines

from meshd.config.cluster import Cluster
from meshd.controller.discovery.kubernetes import ApiFailed, Event, Expired

ACCOUNT: Final = "/var/run/secrets/kubernetes.io/serviceaccount"
PAGE: Final = 500  # pods in one answer
CONNECT_S: Final = 5.0
LIST_S: Final = 30.0
_GONE: Final = 410
# What the client lets through when a file is valid YAML and no kubeconfig.
_SHAPE: Final = (ValueError, TypeError, LookupError, AttributeError)
# A peer that vanished is noticed within a minute, though a watch may be silent for longer.
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class PodApi:
    """One connection's worth of the API. ``selector``: labels; ``namespace``: empty for all."""

    def __init__(
        self, cluster: Cluster, selector: Mapping[str, str], namespace: str, account: str = ACCOUNT
    ) -> None:
        """Read the credentials; ``account`` is the directory of the service account. Raises ApiFailed."""
        self._client = client.ApiClient(_configuration(cluster, account))
        pods = client.CoreV1Api(self._client)
        call = partial(pods.list_namespaced_pod, namespace) if namespace else pods.list_pod_for_all_namespaces
        labels = ",".join(f"{key}={value}" for key, value in selector.items())
        self._call = partial(call, label_selector=labels, _preload_content=False)

    def close(self) -> None:
        self._client.rest_client.pool_manager.clear()

    def list(self) -> tuple[list[dict[str, Any]], str]:
        """Return all pods that match, and the version. Raises ApiFailed, Expired."""
        found: list[dict[str, Any]] = []
        token = None
        while True:
            response = self._ask((CONNECT_S, LIST_S), limit=PAGE, _continue=token)
            try:
                page = _object(response.data)
            except urllib3.exceptions.HTTPError as exc:
                raise ApiFailed(_words(exc)) from exc
            finally:
                response.release_conn()
            found += page.get("items") or []
            metadata = page.get("metadata") or {}
            token = metadata.get("continue")
            if not token:
                return found, str(metadata.get("resourceVersion", ""))

    def watch(self, version: str, timeout_s: int) -> Iterator[Event]:
        """Begin to watch from ``version``; the events end after ``timeout_s``.

        Raises ApiFailed, Expired: now, and while the events are taken.
        """
        response = self._ask(
            (CONNECT_S, timeout_s + LIST_S),
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=timeout_s,
        )
        return _events(response)

    def _ask(self, timeouts_s: tuple[float, float], **query: Any) -> urllib3.HTTPResponse:
        """Send the request; ``timeouts_s``: to connect, and of silence."""
        try:
            answer = self._call(_request_timeout=timeouts_s, **query)
        except client.ApiException as refusal:
            if not refusal.status:  # faults of TLS come so
                raise ApiFailed(_words(refusal)) from refusal
            raise _refusal(refusal.status, refusal.body or b"") from refusal
        except (urllib3.exceptions.HTTPError, OSError, client_config.ConfigException) as exc:
            raise ApiFailed(_words(exc)) from exc
        response: urllib3.HTTPResponse = answer
        if response.status != 200:
            try:
                body = response.data
            except urllib3.exceptions.HTTPError:
                body = b""
            response.release_conn()
            raise _refusal(response.status, body)
        return response


def _configuration(cluster: Cluster, account: str) -> client.Configuration:
    configuration = client.Configuration()
    try:
        if cluster.kubeconfig:
            client_config.load_kube_config(cluster.kubeconfig, client_configuration=configuration)
        else:
            environ = {"KUBERNETES_SERVICE_HOST": cluster.host, "KUBERNETES_SERVICE_PORT": cluster.port}
            loader = InClusterConfigLoader(f"{account}/token", f"{account}/ca.crt", environ=environ)
            loader.load_and_set(configuration)
    except (client_config.ConfigException, OSError, yaml.YAMLError, *_SHAPE) as exc:
        where = cluster.kubeconfig or f"no KUBECONFIG, and no service account in {account}"
        raise ApiFailed(f"{where}: {exc}") from exc
    configuration.retries = False  # failures are seen and told here, and tried again with back-off
    configuration.socket_options = list(_KEEPALIVE)
    return configuration


def _events(response: urllib3.HTTPResponse) -> Iterator[Event]:
    try:
        for line in iter_resp_lines(response):
            if line:
                event = _object(line)
                if event.get("type") == "ERROR":
                    status = event.get("object") or {}
                    raise _failure(status.get("code"), str(status.get("message") or status.get("reason")))
                yield event
    except (urllib3.exceptions.HTTPError, OSError) as exc:
        raise ApiFailed(f"the watch broke: {_words(exc)}") from exc
    finally:
        response.close()  # what is left of it cannot be reused
        response.release_conn()


def _object(data: bytes | str) -> dict[str, Any]:
    try:
        read = orjson.loads(data)
    except orjson.JSONDecodeError as exc:
        raise ApiFailed(f"the API server answered no JSON: {exc}") from exc
    if not isinstance(read, dict):
        raise ApiFailed("the API server answered no JSON object")
    return read


def _refusal(status: int, body: bytes | str) -> Exception:
    """Make the exception of an answer that is a refusal; its body is a Status object, as a rule."""
    try:
        message = str(_object(body).get("message", ""))
    except ApiFailed:
        message = ""
    return _failure(status, f"HTTP {status} {message}".strip())


def _failure(code: object, words: str) -> Exception:
    return Expired(words) if code == _GONE else ApiFailed(f"the API server refuses: {words}")


def _words(exc: Exception) -> str:
    reason = getattr(exc, "reason", None)
    return str(reason or exc) or type(exc).__name__
