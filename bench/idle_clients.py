"""What an idle keep-alive client costs a front end: private memory of its processes, before and after many.

Each client connects, has one completion of 1 KiB answered, and then keeps silent, its connection open. The
growth of Private_Clean + Private_Dirty over the whole tree, divided by the clients, is the figure; what the
kernel holds for a socket is not in it, nor is what was grown by the clients that warmed the front end up.
"""

from __future__ import annotations

import resource
import socket
import time
from contextlib import ExitStack, suppress
from math import ceil
from typing import Final

from bench import BenchError, tree
from bench.launch import Running

CLIENTS: Final = 10_000
WARM_CLIENTS: Final = 64
SPARE_DESCRIPTORS: Final = 500
SETTLE_S: Final = 1.0
TIMEOUT_S: Final = 20.0
BODY: Final = b'{"model":"m1","prompt":"%s","max_tokens":16}'
REQUEST: Final = (
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s"
)
# the front end would else close the first while the last connects on a slow machine
PATIENT: Final = ("--client-idle-timeout-secs", "600")
SHARE_FOR_CLIENTS: Final = 0.4  # of its descriptors; an I/O process keeps the rest for upstreams and spare
EVEN: Final = 0.8  # the kernel does not give each process just as many connections


def flags_for(hard_limit: int, clients: int = CLIENTS) -> tuple[str, ...]:
    """For meshd: as many I/O processes as it takes to hold the clients under the limit of descriptors."""
    if hard_limit == resource.RLIM_INFINITY:
        return PATIENT
    each = hard_limit * SHARE_FOR_CLIENTS * EVEN
    return (*PATIENT, "--io-processes", str(ceil((clients + WARM_CLIENTS) / each)))


def raise_descriptor_limit(clients: int = CLIENTS) -> int:
    """Let this process hold so many; returns the hard limit, which the front end inherits.

    Raises `BenchError` where it cannot be enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = clients + SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise BenchError(f"{wanted} open files are needed, the hard limit is {hard}: ulimit -Hn {wanted}")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return hard


def measure_idle_clients(running: Running, clients: int = CLIENTS) -> float:
    """KiB of private memory for each idle client. The connections are closed again."""
    request = request_of(1024)
    with ExitStack() as stack:
        _connect(stack, running.port, request, WARM_CLIENTS)
        time.sleep(SETTLE_S)
        before_kib = private_kib(running.pid)
        held = _connect(stack, running.port, request, clients)
        time.sleep(SETTLE_S)
        grown_kib = private_kib(running.pid) - before_kib
        if closed := sum(_is_closed(one) for one in held):
            raise BenchError(f"{closed} of {clients} idle connections were closed by {running.name}")
    return grown_kib / clients


def request_of(body_bytes: int) -> bytes:
    """A whole completions request with a body of that size."""
    body = BODY % (b"x" * (body_bytes - len(BODY) + 2))
    return REQUEST % (len(body), body)


def private_kib(root: int) -> int:
    """The private memory of all processes of a tree."""
    total = 0
    for process in tree.tree(root):
        with suppress(FileNotFoundError, ProcessLookupError):
            sums = tree.smaps_kib(process.pid)
            total += sums.get("Private_Clean", 0) + sums.get("Private_Dirty", 0)
    return total


def _connect(stack: ExitStack, port: int, request: bytes, count: int) -> list[socket.socket]:
    found = []
    for number in range(count):
        try:
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
            one.sendall(request)
            _read_answer(one)
        except (OSError, BenchError) as error:
            raise BenchError(f"client {number} of {count} failed: {error}") from error
        found.append(one)
    return found


def _read_answer(client: socket.socket) -> None:
    """Read a response with a content-length to its end, so that the connection is idle."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += _some(client)
    head, _, body = data.partition(b"\r\n\r\n")
    if b" 200 " not in head[:16]:
        raise BenchError(f"a client was answered {head.splitlines()[0]!r} {body[:300]!r}")
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
    left = int(fields[b"content-length"]) - len(body)
    while left > 0:
        left -= len(_some(client))


def _some(client: socket.socket) -> bytes:
    data = client.recv(65536)
    if not data:
        raise ConnectionError("the connection was closed")
    return data


def _is_closed(client: socket.socket) -> bool:
    """Whether the other side has ended it; nothing else may come on an idle connection."""
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
