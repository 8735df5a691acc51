from __future__ import annotations

import os

from meshd.control import Manifest, Role, Topology


def test_seats_of_a_topology_are_distinct_and_within_the_board():
    topology = Topology.of(3, 8, ((0, 1, 2, 3), (4, 5, 6, 7)), backends=2)
    seats = [
        *(topology.board_io(seat) for seat in range(topology.io_seats)),
        *(topology.board_prepare(seat) for seat in range(topology.prepare_seats)),
        *(topology.board_leader(group, half) for group in range(len(topology.groups)) for half in (0, 1)),
        topology.board_controller,
        topology.board_controller + 1,
        topology.board_supervisor,
        *(topology.board_backend(number) for number in range(2)),
    ]
    assert sorted(seats) == list(range(topology.board_seats))
    assert topology.metric_rows == topology.board_seats
    assert (topology.io_seats, topology.prepare_seats) == (6, 16)


def test_a_manifest_survives_its_memfd():
    topology = Topology.of(1, 2, ((0, 1),), controller_socket="\0meshd-1", listen_port=1234)
    manifest = Manifest(
        role=Role.LEADER,
        index=0,
        seat=3,
        supervisor_pid=os.getpid(),
        topology=topology,
        settings={"worker_urls": ["http://ü"]},
        fds={"board": 3},
        cpus=(0, 1),
        prepare_cpus=((0,), (1,)),
        takes_over=True,
    )
    fd = manifest.to_memfd()
    assert Manifest.from_json(os.pread(fd, 1 << 20, 0)) == manifest
    os.close(fd)
