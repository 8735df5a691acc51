from __future__ import annotations

import socket

import pytest

from meshd.errors import StartupError
from meshd.supervisor.listeners import bind_controller, bind_metrics, bind_traffic


def close(sockets):
    for each in sockets:
        each.close()


def test_port_zero_gives_all_listeners_the_same_port():
    listeners = bind_traffic("127.0.0.1", 0, 3)
    assert len({listener.getsockname() for listener in listeners}) == 1
    close(listeners)


def test_connections_are_spread_over_the_listeners():
    listeners = bind_traffic("127.0.0.1", 0, 2)
    clients = [socket.create_connection(listeners[0].getsockname()) for _ in range(64)]
    counts = []
    for listener in listeners:
        listener.setblocking(False)
        counts.append(0)
        try:
            while True:
                listener.accept()[0].close()
                counts[-1] += 1
        except BlockingIOError:
            pass
    assert sum(counts) == 64
    assert min(counts) > 0  # one in 2^63 otherwise
    close([*clients, *listeners])


@pytest.mark.parametrize("shares_port", [False, True])
def test_an_occupied_port_is_a_start_up_error_even_if_its_holder_would_share_it(shares_port):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares_port))
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port} is in use.*--port"):
            bind_traffic("127.0.0.1", port, 2)
        with pytest.raises(StartupError, match="--prometheus-port"):
            bind_metrics("127.0.0.1", port)


def test_an_address_of_another_host_is_a_start_up_error():
    with pytest.raises(StartupError, match="no such address"):
        bind_traffic("192.0.2.1", 0, 1)


def test_ipv6_addresses_are_bound_and_shown_in_brackets():
    listeners = bind_traffic("::1", 0, 2)
    port = listeners[0].getsockname()[1]
    with pytest.raises(StartupError, match=rf"\[::1\]:{port} is in use"):
        bind_metrics("::1", port)
    close(listeners)


def test_the_controller_listens_in_the_abstract_namespace():
    listener, name = bind_controller()
    assert name.startswith("\0")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(name)
    listener.close()
