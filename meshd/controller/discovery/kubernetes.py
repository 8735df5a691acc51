"""Upstreams that are Kubernetes pods: listed once, then watched.

The client of the API blocks, so a thread of its own runs it. The thread knows all pods that match, and hands
what they come to, whole, to the controller's loop; nothing else is shared.

    list ──> watch ──ends──> watch from the last version ...
     ^         │ broken, refused, or 410: the version is too old
     └─────────┘ after a back-off; until the next list has arrived, nothing is removed

A watch ends by itself after some minutes and goes on from the last version that it told, in an event or a
bookmark, without a list.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

from meshd.controller.announcement import Announcement
from meshd.controller.discovery.pods import Pod, serving_pod, uid_of
from meshd.controller.discovery.source import Backoff, Listed, Outage, Reconciler
from meshd.log import Log

SOURCE: Final = "kubernetes"
SCOPES: Final = ("",)  # all pods are listed as a whole
WATCH_S: Final = (240, 300)  # range of how long one watch lasts, so that nodes do not renew together
_SHORTEST_WATCH_S: Final = 1.0


Event = Mapping[str, Any]


class ApiFailed(Exception):
    """The API cannot be used now; text for operators."""


class Expired(Exception):
    """The version is too old: what happened since is not known any more."""


class Api(Protocol):
    """What the watch needs of ``pod_api.PodApi``."""

    def list(self) -> tuple[list[dict[str, Any]], str]: ...

    def watch(self, version: str, timeout_s: int) -> Iterator[Event]: ...

    def close(self) -> None: ...


class PodWatch:
    """The blocking half. ``connect`` raises ApiFailed. ``tell``: all pods that serve, when they are others
    than before; ``note``: the problem of an attempt, empty when it succeeded.
    """

    def __init__(
        self,
        connect: Callable[[], Api],
        port: int,
        tell: Callable[[tuple[Pod, ...]], None],
        note: Callable[[str], None],
        *,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._port = port
        self._tell = tell
        self._note = note
        self._rng = rng
        self._clock = clock
        self._backoff = Backoff(rng)
        self._stopped = threading.Event()
        self._pods: dict[str, Pod] = {}  # those that serve, by UID
        self._told: tuple[Pod, ...] | None = None

    def stop(self) -> None:
        """Have ``run`` return when it next looks; a silent watch keeps it until the watch ends."""
        self._stopped.set()

    def run(self) -> None:
        """Follow the pods until stopped."""
        while not self._stopped.is_set():
            try:
                with contextlib.closing(self._connect()) as api:
                    self._follow(api)
            except Expired:
                pass  # not a problem: a list tells what is so now
            except ApiFailed as failure:
                self._note(str(failure))
            self._stopped.wait(self._backoff.take())

    def _follow(self, api: Api) -> None:
        pods, version = api.list()
        self._take_all(pods)
        while not self._stopped.is_set():
            start_s = self._clock()
            events = api.watch(version, self._rng.randint(*WATCH_S))
            self._note("")
            for event in events:
                version = self._take(event) or version
                self._backoff.reset()
            if self._clock() - start_s < _SHORTEST_WATCH_S:
                self._stopped.wait(self._backoff.take())  # a server that ends each watch at once
            else:
                self._backoff.reset()

    def _take_all(self, pods: Iterable[dict[str, Any]]) -> None:
        try:
            read = [serving_pod(pod, self._port) for pod in pods]
        except (ValueError, TypeError, AttributeError) as exc:
            raise ApiFailed(f"a pod in the list cannot be read: {exc}") from exc
        self._pods = {pod.uid: pod for pod in read if pod is not None}
        self._tell_if_changed()

    def _take(self, event: Event) -> str:
        """Take one event and return its version, empty if it has none. Raises ApiFailed."""
        kind, told = event.get("type"), event.get("object") or {}
        try:
            if kind != "BOOKMARK":
                uid = uid_of(told)
                pod = None if kind == "DELETED" else serving_pod(told, self._port)
                if pod is None:
                    self._pods.pop(uid, None)
                else:
                    self._pods[uid] = pod
            version = told["metadata"].get("resourceVersion")
        except (ValueError, TypeError, AttributeError, KeyError) as exc:
            raise ApiFailed(f"an event of the watch cannot be read: {exc}") from exc
        self._tell_if_changed()
        return str(version or "")

    def _tell_if_changed(self) -> None:
        # Pods change all the time in what does not matter here.
        pods = tuple(self._pods.values())
        if self._told is None or set(pods) != set(self._told):
            self._told = pods
            self._tell(pods)


class KubernetesSource:
    """The half on the controller's loop. ``announce``: makes an announcement of a pod."""

    def __init__(
        self,
        connect: Callable[[], Api],
        name: str,
        port: int,
        reconciler: Reconciler,
        announce: Callable[[Pod], Announcement],
        log: Log,
        *,
        rng: random.Random | None = None,
    ) -> None:
        self._connect = connect
        self._port = port
        self._reconciler = reconciler
        self._announce = announce
        self._outage = Outage(SOURCE, name, log)
        self._rng = rng or random.Random()

    async def run(self) -> None:
        """Follow the pods until cancelled. Raises what the thread did not expect."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def post(call: Callable[..., object], *arguments: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: the process ends
                loop.call_soon_threadsafe(call, *arguments)

        def follow() -> None:
            try:
                watch.run()
            except BaseException as fault:  # a thread's main loop: the controller must hear of its end
                post(_fail, ended, fault)

        watch = PodWatch(
            self._connect,
            self._port,
            lambda pods: post(self._take, pods),
            lambda problem: post(self._outage.note, problem),
            rng=self._rng,
        )
        # A daemon: it may be in a read of minutes when the controller ends.
        threading.Thread(target=follow, name="pods", daemon=True).start()
        try:
            await ended
        finally:
            watch.stop()

    def _take(self, pods: tuple[Pod, ...]) -> None:
        listed: Listed = {pod.key: self._announce(pod) for pod in pods}
        self._reconciler.want("", listed)


def _fail(ended: asyncio.Future[None], fault: BaseException) -> None:
    if not ended.done():
        ended.set_exception(fault)
