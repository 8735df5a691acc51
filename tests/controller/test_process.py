"""The real controller process, with this test as its supervisor."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from meshd.config.sources import load_settings
from meshd.control import Manifest, Role, State, Topology
from meshd.control.child import receive_messages
from meshd.memory import Segment
from meshd.routing.load import SEGMENT_KIND, LoadTable
from meshd.routing.registry import Registry, RegistryBoard
from meshd.supervisor.segments import NodeMemory

PATIENCE_S = 30.0


class PlayedUpstream(BaseHTTPRequestHandler):
    """Healthy, and serves one model."""

    def do_GET(self) -> None:
        body = b'{"data":[{"id":"m1","root":"/models/m1"}]}' if self.path == "/v1/models" else b""
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Supervisor:
    """Makes what a supervisor makes, and starts controllers one after the other."""

    def __init__(self, worker_url: str) -> None:
        self.topology = Topology.of(1, 1)
        self.memory = NodeMemory(self.topology)
        self.board = self.memory.board
        self.shared = self.memory.fds_for(Role.CONTROLLER, 0)
        self.bell = self.shared["bell_io0"]
        self.registry = Segment.attach(self.shared["registry"], "registry")
        self.load = Segment.attach(self.shared["load"], SEGMENT_KIND)
        self.metrics_listener = socket.create_server(("127.0.0.1", 0))
        self.admin_listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.admin_listener.bind("")  # a free name in the abstract namespace
        self.admin_listener.listen()
        flags = ["--worker-urls", worker_url, "--api-key", "sk-1", "--health-check-interval-secs", "60"]
        self.settings = load_settings(flags, {}).settings
        self.link: socket.socket | None = None
        self.child: subprocess.Popen[bytes] | None = None

    def start(self, takes_over: bool = False) -> None:
        """Start a controller and wait until it says ready, or as a successor that it has loaded."""
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.setblocking(False)
        fds = {
            **self.shared,
            "metrics_listen": self.metrics_listener.fileno(),
            "controller_listen": self.admin_listener.fileno(),
            "link": theirs.fileno(),
        }
        manifest = Manifest(
            role=Role.CONTROLLER,
            index=0,
            seat=self.topology.board_controller,
            supervisor_pid=os.getpid(),
            topology=self.topology,
            settings=self.settings.to_dict(),
            fds=fds,
            takes_over=takes_over,
        )
        fd = manifest.to_memfd()
        command = [sys.executable, "-m", "meshd.birth", "meshd.controller.process", "--manifest-fd", str(fd)]
        self.child = subprocess.Popen(command, pass_fds={fd, *fds.values()})
        os.close(fd)
        theirs.close()
        self.board.row(self.topology.board_controller).open(Role.CONTROLLER, 0, self.child.pid, "")
        wait_for(self.link)
        assert receive_messages(self.link)[0] == [{"t": "loaded" if takes_over else "ready"}]

    def end(self, send: bytes | None = None) -> int:
        """Send a message, or kill without one; return the exit status."""
        assert self.link is not None
        assert self.child is not None
        if send is None:
            self.child.kill()
        else:
            self.link.send(send)
        status = self.child.wait(PATIENCE_S)
        self.link.close()
        self.board.row(self.topology.board_controller).close()
        return status

    def close(self) -> None:
        if self.child is not None and self.child.poll() is None:
            self.end()
        for owned in (self.metrics_listener, self.admin_listener):
            owned.close()

    def registry_when(self, is_healthy: bool) -> Registry:
        """Wait, woken by the doorbell, until all upstreams have this health."""
        board = RegistryBoard(self.registry)
        while True:
            found = board.read()
            if found.upstreams and all(u.is_healthy == is_healthy for u in found.upstreams):
                return found
            wait_for(self.bell)
            os.eventfd_read(self.bell)

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self.metrics_listener.getsockname(), timeout=PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def get_admin(self, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("controller", timeout=PATIENCE_S)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.connect(self.admin_listener.getsockname())
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())


def wait_for(readable: Any) -> None:
    assert select.select([readable], [], [], PATIENCE_S)[0], "nothing happened"


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), PlayedUpstream)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    supervisor = Supervisor(f"http://127.0.0.1:{server.server_port}")
    try:
        yield supervisor
    finally:
        supervisor.close()
        server.shutdown()
        thread.join()
        server.server_close()


def test_controller_registers_serves_survives_its_death_and_drains(supervisor: Supervisor) -> None:
    supervisor.start()
    row = supervisor.board.row(supervisor.topology.board_controller)
    assert row.state is State.READY
    first = supervisor.registry_when(is_healthy=True)
    assert first.upstreams[0].models == ("m1",)
    assert first.upstreams[0].labels == {"model_path": "/models/m1"}
    status, workers = supervisor.get_admin("/workers")
    assert (status, workers["total"], workers["workers"][0]["available"]) == (200, 1, True)
    assert "sk-1" not in json.dumps(workers)

    assert supervisor.end() == -signal.SIGKILL
    supervisor.start()
    second = RegistryBoard(supervisor.registry).read()
    assert second.upstreams == first.upstreams
    assert supervisor.get_admin("/workers")[1]["workers"][0]["is_healthy"]
    assert supervisor.end(b'{"t":"drain","grace_s":1}') == 0


def test_a_successor_writes_nothing_before_its_predecessor_has_handed_over(supervisor: Supervisor) -> None:
    supervisor.start(takes_over=True)
    assert supervisor.link is not None
    assert RegistryBoard(supervisor.registry).generation() == 0
    supervisor.link.send(b'{"t":"take_over"}')
    wait_for(supervisor.link)
    assert receive_messages(supervisor.link)[0] == [{"t": "ready"}]
    assert supervisor.registry_when(is_healthy=True).upstreams
    assert supervisor.end(b'{"t":"hand_over"}') == 0


def test_a_successor_that_nobody_wants_ends_without_a_trace(supervisor: Supervisor) -> None:
    supervisor.start(takes_over=True)
    assert supervisor.end(b'{"t":"quit"}') == 0
    assert RegistryBoard(supervisor.registry).generation() == 0


def test_a_successor_that_could_not_work_says_so_instead_of_waiting(supervisor: Supervisor, tmp_path) -> None:
    broken = tmp_path / "authorities.pem"
    broken.write_text("none")
    supervisor.settings = replace(supervisor.settings, ca_cert_paths=(str(broken),))
    with pytest.raises(AssertionError):
        supervisor.start(takes_over=True)
    assert supervisor.child is not None and supervisor.child.wait(PATIENCE_S) != 0


def test_scrape_and_health_routes_answer_on_the_metrics_port(supervisor: Supervisor) -> None:
    supervisor.start()
    upstream = supervisor.registry_when(is_healthy=True).upstreams[0]
    status, text = supervisor.get("/metrics")
    found = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    assert status == 200
    assert found["mesh_worker_health", (upstream.url,)] == 1
    assert found["mesh_worker_health_checks_total", ("success", "regular")] >= 1
    assert found["mesh_processes", ("controller",)] == 1
    assert found["mesh_process_resident_memory_bytes", ("controller",)] > 1 << 20
    assert supervisor.get("/liveness") == (200, b'{"status":"ok","reason":null}')
    assert json.loads(supervisor.get("/readiness")[1])["healthy_workers"] == 1
    assert supervisor.get("/workers")[0] == 404


def test_load_of_a_dead_io_process_is_swept_by_a_starting_controller(supervisor: Supervisor) -> None:
    row = supervisor.board.row(0)
    row.open(Role.IO, 0, 1, "0")
    table = LoadTable(supervisor.load, 0, supervisor.topology.io_seats)
    table.add(0)
    row.close()
    supervisor.start()
    assert table.load(0) == 0


def test_disabled_health_check_makes_an_absent_upstream_available(supervisor: Supervisor) -> None:
    supervisor.settings = replace(
        supervisor.settings, disable_health_check=True, worker_urls=("http://127.0.0.1:9",)
    )
    supervisor.start()
    assert supervisor.registry_when(is_healthy=True).upstreams[0].state == "active"


def test_controller_ends_when_its_link_closes(supervisor: Supervisor) -> None:
    supervisor.start()
    assert supervisor.link is not None
    assert supervisor.child is not None
    supervisor.link.close()
    assert supervisor.child.wait(PATIENCE_S) == 0
    supervisor.child = None


def test_module_started_by_hand_says_who_starts_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meshd.birth", "meshd.controller.process"], capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"supervisor" in done.stderr
