"""The listening sockets. The supervisor holds them, so none is lost while a child is replaced."""

from __future__ import annotations

import errno
import os
import secrets
import socket
from typing import Final

from meshd.errors import StartupError

_BACKLOG: Final = 4096  # the kernel caps it at net.core.somaxconn


def bind_traffic(host: str, port: int, count: int) -> list[socket.socket]:
    """Bind ``count`` sockets to one address; the kernel spreads new connections over them.

    The first one binds without SO_REUSEPORT: with it, the port of another program of the same user that set
    it too would be shared silently. The option is set afterwards, before any of them listens. Port 0: the
    first bind chooses. Raises StartupError for an address that is in use or not ours.
    """
    first = _bind(host, port, "--port")
    _share_port(first)
    chosen = first.getsockname()[1]
    listeners = [first]
    for _ in range(count - 1):
        listener = _new_socket(host)
        _share_port(listener)
        listener.bind((host, chosen))
        listeners.append(listener)
    for listener in listeners:
        listener.listen(_BACKLOG)
    return listeners


def bind_metrics(host: str, port: int) -> socket.socket:
    """Bind the metrics listener. Raises StartupError as ``bind_traffic`` does."""
    listener = _bind(host, port, "--prometheus-port")
    listener.listen(_BACKLOG)
    return listener


def bind_loopback() -> socket.socket:
    """Bind a listener for a demo upstream, on a port that the system chooses."""
    listener = _bind("127.0.0.1", 0, "--demo")
    listener.listen(_BACKLOG)
    return listener


def bind_controller() -> tuple[socket.socket, str]:
    """Listen in the abstract Unix namespace: no file to leave behind, none to find in the way."""
    name = f"\0meshd-{os.getpid()}-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(name)
    listener.listen(_BACKLOG)
    return listener, name


def _bind(host: str, port: int, flag: str) -> socket.socket:
    listener = _new_socket(host)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartupError(_explain(error, host, port, flag)) from error
    return listener


def _new_socket(host: str) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    # Connections of a former run in TIME_WAIT do not hold the port; a listening socket still does.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit it
    return listener


def _share_port(listener: socket.socket) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _explain(error: OSError, host: str, port: int, flag: str) -> str:
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    match error.errno:
        case errno.EADDRINUSE:
            return f"{address} is in use by another program; stop it or choose another {flag}"
        case errno.EACCES:
            return f"{address}: no permission for this port; choose {flag} of 1024 or above"
        case errno.EADDRNOTAVAIL:
            return f"{address}: this host has no such address"
        case _:
            return f"{address}: cannot listen: {error.strerror}"
