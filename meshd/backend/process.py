"""``meshd backend``: flags, the listening socket, and the loop of the bundled upstream."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Final

import uvloop

from meshd.backend.connection import Connection
from meshd.backend.faults import Faults, parse_faults
from meshd.backend.service import Options, Service
from meshd.backend.wire import DateLine
from meshd.control import die_with_parent
from meshd.errors import StartupError

BACKLOG: Final = 1024
_FAULTS: Final = """\
A fault SPEC is a list of items, separated by commas:
  status=N          answer with this status
  retry-after=TEXT  send this header
  delay-head-ms=N   wait before the head
  token-delay-ms=N  wait before each event
  error-event=N     event N of a stream is an error, and the last
  no-done           leave out the end-of-stream event
  no-usage          leave out the usage
  bad-json          break the JSON
  split=N           send pieces of N bytes
  cut=N             close after N bytes of the body
  reset-at=N        reset the connection there
  stall=N           send nothing more there
  close             close the connection in place of an answer
  reset             reset it
  malformed-head    answer with a head that is none
  times=N           only for the next N requests (0: for none)
"""


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises ``SystemExit`` for wrong flags."""
    arguments = build_parser().parse_args(argv)
    try:
        if arguments.die_with_parent:
            die_with_parent(os.getppid())
        listener = open_listener(arguments)
        options = options_of(arguments)
    except StartupError as error:
        sys.stderr.write(f"meshd backend: {error}\n")
        return error.exit_code
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(listener, options))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshd backend",
        description="The bundled deterministic upstream, for tests and demos.",
        epilog=_FAULTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=_Number(0, 65535), default=18000, help="port, 0 = chosen by the system (%(default)s)")
    add("--listen-fd", type=_Number(0), metavar="N", help="inherited listening socket, instead of a port")
    add("--die-with-parent", action="store_true", help="end when the parent process ends")
    add("--model", action="append", metavar="ID", help="served model, repeatable (meshd-demo)")
    add("--api-key", metavar="KEY", help="key that requests must carry")
    add("--ranks", type=_Number(1), default=1, help="data-parallel ranks to report (%(default)s)")
    add("--embedding-dimensions", type=_Number(1, 4096), default=16, help="vector size (%(default)s)")
    add("--token-delay-ms", type=_Number(0), default=0, help="wait before each event (%(default)s)")
    add(
        "--first-token-delay-ms", type=_Number(0), default=0, help="wait before the first event (%(default)s)"
    )
    add(
        "--capacity",
        type=_Number(0),
        default=0,
        help="requests at once, more get 429; 0 = no bound (%(default)s)",
    )
    add(
        "--keepalive-secs",
        type=_seconds,
        default=5.0,
        help="idle connections live so long, 0 = one request (5)",
    )
    add(
        "--fault",
        type=_faults,
        default="",
        metavar="SPEC",
        help="what to do wrong, such as status=503,times=2; a request may ask for it too, in x-backend-fault",
    )
    return parser


def options_of(arguments: argparse.Namespace) -> Options:
    return Options(
        models=tuple(arguments.model or ("meshd-demo",)),
        api_key=arguments.api_key,
        ranks=arguments.ranks,
        embedding_dimensions=arguments.embedding_dimensions,
        token_delay_s=arguments.token_delay_ms / 1000,
        first_token_delay_s=arguments.first_token_delay_ms / 1000,
        capacity=arguments.capacity,
        keepalive_s=arguments.keepalive_secs,
        faults=arguments.fault,
    )


def open_listener(arguments: argparse.Namespace) -> socket.socket:
    """Return the inherited socket, or a new listening one; raises ``StartupError``."""
    try:
        if arguments.listen_fd is not None:
            return socket.socket(fileno=arguments.listen_fd)
        family = socket.AF_INET6 if ":" in arguments.host else socket.AF_INET
        return socket.create_server((arguments.host, arguments.port), family=family, backlog=BACKLOG)
    except OSError as error:
        place = (
            f"{arguments.host}:{arguments.port}" if arguments.listen_fd is None else "the inherited socket"
        )
        # create_server's own words repeat the address as a tuple. Look-ups of names have numbers below 0.
        words = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)
        raise StartupError(f"cannot listen on {place}: {words}") from error


async def serve(listener: socket.socket, options: Options) -> None:
    """Serve on ``listener`` until a signal; connections still open then are dropped."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    service, dates = Service(options), DateLine()
    server = await loop.create_server(
        lambda: Connection(service, dates, loop), sock=listener, backlog=BACKLOG
    )
    print(f"listening on {url_of(listener)}", flush=True)
    await stopped.wait()
    server.close()


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Number:
    """An argparse type: an integer within bounds."""

    def __init__(self, low: int, high: int = 2**31 - 1) -> None:
        self._low, self._high = low, high

    def __call__(self, text: str) -> int:
        if not text.isdigit() or not self._low <= int(text) <= self._high:
            raise argparse.ArgumentTypeError(f"must be an integer from {self._low} to {self._high}")
        return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError("must be a number of seconds, 0 or more")
    return seconds


def _faults(text: str) -> Faults:
    try:
        return parse_faults(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
