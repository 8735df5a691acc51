"""From settings to a node that can be started: CPUs, listeners, memory, and what belongs in each seat."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import meshd
from meshd import cgroup
from meshd.api.block_keys import KEYS_MAX
from meshd.config import Settings
from meshd.control import Role, Topology
from meshd.cpus import CpuPlan, CpuTopology, cap_by_quota, plan_cpus, read_topology
from meshd.memory import PAGE, round_up
from meshd.supervisor import listeners
from meshd.supervisor.child import ChildSpec
from meshd.supervisor.segments import NodeMemory

DEMO_MODEL: Final = "meshd-demo"
_DEMO_TOKENIZER: Final = Path(meshd.__file__).parent / "backend" / "tokenizer"
_GIB: Final = 1 << 30


@dataclass(frozen=True)
class Sockets:
    """The listening sockets; ``traffic`` has one an I/O process, ``backends`` one a demo upstream."""

    traffic: list[socket.socket]
    metrics: socket.socket
    controller: socket.socket
    backends: list[socket.socket]


@dataclass(frozen=True)
class Node:
    """Everything made at start. ``settings`` are those of the children: derived values filled in.

    ``spares``: the second seats of those that can be replaced while they serve. ``complete`` fills in the
    derived values of settings that are read later.
    """

    settings: Settings
    topology: Topology
    plan: CpuPlan
    memory: NodeMemory
    sockets: Sockets
    specs: tuple[ChildSpec, ...]
    warnings: tuple[str, ...]
    spares: tuple[ChildSpec, ...] = ()
    complete: Callable[[Settings], Settings] = lambda settings: settings

    def close_traffic(self) -> None:
        """Close the listening sockets of the traffic; children hold them on."""
        for listener in self.sockets.traffic:
            listener.close()


def build_node(settings: Settings, sources: Mapping[str, str]) -> Node:
    """Bind, map and plan. Raises StartupError when an address is taken or a CPU list cannot be."""
    plan = plan_on_this_machine(settings)
    traffic = listeners.bind_traffic(settings.host, settings.port, len(plan.io_pins))
    metrics = listeners.bind_metrics(settings.prometheus_host, settings.prometheus_port)
    controller, controller_name = listeners.bind_controller()
    sockets = Sockets(traffic, metrics, controller, [listeners.bind_loopback() for _ in range(settings.demo)])
    settings, warnings = _complete(settings, sockets)
    body_memory = settings.body_memory_bytes

    def complete(found: Settings) -> Settings:
        return _complete(replace(found, body_memory_bytes=body_memory), sockets)[0]

    topology = Topology.of(
        len(plan.io_pins),
        len(plan.prepare_pins),
        plan.groups,
        backends=settings.demo,
        listen_port=traffic[0].getsockname()[1],
        metrics_port=metrics.getsockname()[1],
        controller_socket=controller_name,
        view_bytes=_view_bytes(settings.prefix_token_count),
        body_memory_bytes=settings.body_memory_bytes,
        slab_bytes=_slab_bytes(settings.body_memory_bytes),
        prefix_index_bytes=settings.max_tree_size,
    )
    memory = NodeMemory(topology)
    return Node(
        settings, topology, plan, memory, sockets,
        specs=_specs(topology, plan, memory, sockets),
        warnings=(*plan.warnings, *warnings),
        spares=_spares(topology, plan, memory, sockets),
        complete=complete,
    )  # fmt: skip


def plan_on_this_machine(settings: Settings) -> CpuPlan:
    affinity = os.sched_getaffinity(0)
    topology = read_topology(affinity)
    available = cap_by_quota(affinity, cgroup.cpu_quota(), topology, rotation=int.from_bytes(os.urandom(2)))
    return _plan(settings, available, topology)


def _plan(settings: Settings, available: tuple[int, ...], topology: CpuTopology) -> CpuPlan:
    return plan_cpus(
        available,
        topology,
        io_processes=settings.io_processes,
        prepare_workers=settings.prepare_workers,
        io_cpus=settings.io_cpus,
        prepare_cpus=settings.prepare_cpus,
        group_size=settings.prepare_group_size,
    )


# -------------------------------------------------------------------------------------- derived settings


def _complete(settings: Settings, sockets: Sockets) -> tuple[Settings, list[str]]:
    """Fill in what stands for "derive it", and what --demo adds."""
    warnings = []
    body_memory, payload = _body_bounds(settings)
    if payload < settings.max_payload_size and not settings.body_memory_bytes:
        warnings.append(f"request bodies are bounded by the {body_memory} bytes of body memory on this host")
    urls = [f"http://127.0.0.1:{backend.getsockname()[1]}" for backend in sockets.backends]
    tokenizer = settings.tokenizer_path
    if settings.demo and not (tokenizer or settings.model_path):
        tokenizer = str(_DEMO_TOKENIZER)
    completed = replace(
        settings,
        body_memory_bytes=body_memory,
        max_payload_size=payload,
        worker_urls=(*settings.worker_urls, *urls),
        tokenizer_path=tokenizer,
    )
    return completed, warnings


def derived_settings(settings: Settings) -> dict[str, int]:
    """Return by name what a start on this host would fill in. Binds and makes nothing."""
    plan = plan_on_this_machine(settings)
    body_memory, payload = _body_bounds(settings)
    in_force = {
        "max_payload_size": payload,
        "body_memory_bytes": body_memory,
        "io_processes": len(plan.io_pins),
        "prepare_workers": len(plan.prepare_pins),
    }
    return {name: value for name, value in in_force.items() if getattr(settings, name) != value}


def _body_bounds(settings: Settings) -> tuple[int, int]:
    """Return the body memory of the node and the largest body."""
    body_memory = settings.body_memory_bytes or default_body_memory(_ram_bytes(), cgroup.memory_limit())
    return body_memory, min(settings.max_payload_size, body_memory)


def default_body_memory(ram_bytes: int, limit_bytes: int | None) -> int:
    """A quarter of what this node may use."""
    return min(ram_bytes, limit_bytes or ram_bytes) // 4


def _ram_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _view_bytes(prefix_token_count: int) -> int:
    """Room for a routing view: token ids of four bytes, block keys, and the model name with the rest."""
    return round_up(4 * prefix_token_count + 8 * KEYS_MAX + PAGE, PAGE)


def _slab_bytes(body_memory_bytes: int) -> int:
    """Virtual size of one slab: any I/O process may hold all body memory of the node.

    Size classes are steps of four and a slot has its view area, so up to four times the bytes, and a GiB for
    many tiny bodies. Beyond 32 GiB bodies that large are extents of their own and waste nothing; the bound
    keeps hundreds of slabs within the 128 TiB that a process can map.
    """
    return round_up(body_memory_bytes + min(3 * body_memory_bytes, 32 * _GIB) + _GIB, PAGE)


# -------------------------------------------------------------------------------------- who sits where


def _specs(topology: Topology, plan: CpuPlan, memory: NodeMemory, sockets: Sockets) -> tuple[ChildSpec, ...]:
    """List the children in the order of their start."""
    return (
        *(_backend(topology, plan, number, listener) for number, listener in enumerate(sockets.backends)),
        _controller(topology, plan, memory, sockets),
        *(_leader(topology, plan, memory, group) for group in range(len(topology.groups))),
        *(_io_process(topology, plan, memory, seat, sockets) for seat in range(topology.io_processes)),
    )


def _spares(topology: Topology, plan: CpuPlan, memory: NodeMemory, sockets: Sockets) -> tuple[ChildSpec, ...]:
    """List the second seats: same sockets, same CPUs, memory of their own."""
    io_seats = range(topology.io_processes, topology.io_seats)
    return (
        _controller(topology, plan, memory, sockets, half=1),
        *(_leader(topology, plan, memory, group, half=1) for group in range(len(topology.groups))),
        *(_io_process(topology, plan, memory, seat, sockets) for seat in io_seats),
    )


def _backend(topology: Topology, plan: CpuPlan, number: int, listener: socket.socket) -> ChildSpec:
    fd = listener.fileno()
    program = ("-m", "meshd.backend", "--listen-fd", str(fd), "--die-with-parent", "--model", DEMO_MODEL)
    return ChildSpec(
        role=Role.BACKEND,
        index=number,
        seat=topology.board_backend(number),
        program=program,
        cpus=plan.cpus,
        fds={"listen": fd},
        has_manifest=False,
    )


def _controller(
    topology: Topology, plan: CpuPlan, memory: NodeMemory, sockets: Sockets, half: int = 0
) -> ChildSpec:
    fds = memory.fds_for(Role.CONTROLLER, 0)
    fds["metrics_listen"] = sockets.metrics.fileno()
    fds["controller_listen"] = sockets.controller.fileno()
    return ChildSpec(
        role=Role.CONTROLLER,
        index=0,
        seat=topology.board_controller + half,
        program=("-m", "meshd.birth", "meshd.controller.process"),
        cpus=plan.io_cpus,
        fds=fds,
    )


def _leader(topology: Topology, plan: CpuPlan, memory: NodeMemory, group: int, half: int = 0) -> ChildSpec:
    return ChildSpec(
        role=Role.LEADER,
        index=group,
        seat=topology.board_leader(group, half),
        program=("-m", "meshd.birth", "meshd.prepare.zygote"),
        cpus=plan.io_cpus,
        prepare_cpus=tuple((plan.prepare_pins[seat],) for seat in topology.groups[group]),
        fds=memory.fds_for(Role.LEADER, group),
    )


def _io_process(
    topology: Topology, plan: CpuPlan, memory: NodeMemory, seat: int, sockets: Sockets
) -> ChildSpec:
    fds = memory.fds_for(Role.IO, seat)
    number = seat % topology.io_processes
    fds["listen"] = sockets.traffic[number].fileno()
    return ChildSpec(
        role=Role.IO,
        index=seat,
        seat=topology.board_io(seat),
        program=("-m", "meshd.birth", "meshd.io.process"),
        cpus=(plan.io_pins[number],),
        fds=fds,
        post=number,
        may_be_forked=True,
    )
