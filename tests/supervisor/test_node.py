from __future__ import annotations

import os
import socket

import pytest

from meshd.config import Settings
from meshd.control import Role
from meshd.errors import StartupError
from meshd.supervisor.node import DEMO_MODEL, build_node, default_body_memory, derived_settings

LOOPBACK = {"host": "127.0.0.1", "port": 0, "prometheus_host": "127.0.0.1", "prometheus_port": 0}


def close(node):
    for each in [
        *node.sockets.traffic,
        node.sockets.metrics,
        node.sockets.controller,
        *node.sockets.backends,
    ]:
        each.close()


@pytest.fixture
def node():
    cpu = str(min(os.sched_getaffinity(0)))
    node = build_node(
        Settings(
            **LOOPBACK, demo=2, io_processes=2, prepare_workers=5, io_cpus=cpu, worker_urls=("http://a",)
        ),
        {},
    )
    yield node
    close(node)


def test_children_are_listed_in_the_order_of_their_start_in_seats_of_their_own(node):
    roles = [spec.role for spec in node.specs]
    assert roles == [Role.BACKEND] * 2 + [Role.CONTROLLER] + [Role.LEADER] * 2 + [Role.IO] * 2
    assert len({spec.seat for spec in node.specs}) == len(node.specs)


def test_an_io_process_sees_its_own_listener_and_bodies_alone(node):
    first, second = (spec for spec in node.specs if spec.role is Role.IO)
    assert first.fds["listen"] != second.fds["listen"]
    assert [name for name in first.fds if name.startswith("slab")] == ["slab0"]
    assert [name for name in second.fds if name.startswith("slab")] == ["slab1"]
    assert "metrics_listen" not in first.fds and "bell_prepare9" in first.fds


def test_leaders_see_all_bodies_and_pin_each_worker_of_their_group(node):
    leader = next(spec for spec in node.specs if spec.role is Role.LEADER)
    assert {f"slab{seat}" for seat in range(node.topology.io_seats)} <= set(leader.fds)
    assert len(leader.prepare_cpus) == len(node.topology.groups[0])
    assert all(cpus[0] in node.plan.prepare_cpus for cpus in leader.prepare_cpus)


def test_only_the_controller_gets_its_listeners(node):
    holders = {spec.role for spec in node.specs if {"metrics_listen", "controller_listen"} & set(spec.fds)}
    assert holders == {Role.CONTROLLER}


def test_demo_upstreams_are_added_to_the_given_ones_and_bring_a_tokenizer(node):
    ports = [backend.getsockname()[1] for backend in node.sockets.backends]
    assert node.settings.worker_urls == ("http://a", *(f"http://127.0.0.1:{port}" for port in ports))
    assert os.path.exists(node.settings.tokenizer_path)
    backends = [spec for spec in node.specs if spec.role is Role.BACKEND]
    assert all(DEMO_MODEL in spec.program and "--die-with-parent" in spec.program for spec in backends)


def test_derived_numbers_are_filled_in(node):
    assert 0 < node.settings.max_payload_size <= node.settings.body_memory_bytes
    assert node.topology.slab_bytes > node.topology.body_memory_bytes == node.settings.body_memory_bytes
    assert node.topology.listen_port == node.sockets.traffic[1].getsockname()[1]


def test_derived_numbers_are_told_without_a_start_and_given_ones_are_not_derived(node):
    given = Settings(io_processes=2, prepare_workers=5, max_payload_size=1)
    assert derived_settings(given) == {"body_memory_bytes": node.settings.body_memory_bytes}
    told = derived_settings(Settings(body_memory_bytes=1 << 20))
    assert told["max_payload_size"] == 1 << 20
    assert told["io_processes"] >= 1 and told["prepare_workers"] >= 1


def test_more_processes_than_cpus_is_a_warning(node):
    assert any("share" in warning for warning in node.warnings)


def test_a_small_body_memory_bounds_the_payload():
    node = build_node(Settings(**LOOPBACK, body_memory_bytes=1 << 20), {})
    assert node.settings.max_payload_size == 1 << 20
    close(node)


def test_an_occupied_port_is_a_start_up_error():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(StartupError, match="is in use"):
            build_node(Settings(**LOOPBACK | {"port": other.getsockname()[1]}), {})


def test_body_memory_is_a_quarter_of_the_smaller_of_ram_and_limit():
    assert default_body_memory(1 << 30, None) == 1 << 28
    assert default_body_memory(1 << 30, 1 << 20) == 1 << 18
    assert default_body_memory(1 << 20, 1 << 30) == 1 << 18
