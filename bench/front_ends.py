"""The front ends under test, each declared once: what it is, what it needs, how it is started.

All of them do the same outward job: accept a completions request on one core, choose one of two upstreams,
forward the client's bytes over a kept-alive connection and relay the answer. `meshd` and `fastapi` also
parse the body, validate the prompt and apply the policy; `haproxy` and `nginx` never look into a body and
know round robin alone, so they are floors, not rivals. `meshd-compiled` is there after `make compiled`.
None of them writes an access log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from bench.machine import find_program

TOKEN_POLICIES: Final = frozenset({"prefix_hash"})  # policies that need a tokenizer
COMPILED_PYTHON: Final = Path(__file__).parents[1] / ".venv-compiled" / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Site:
    """What one start of a front end is given. ``directory`` is its own, empty and removed afterwards."""

    directory: Path
    port: int
    metrics_port: int
    upstreams: tuple[str, ...]
    policy: str
    tokenizer: Path | None
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """``policies``: those it can apply; empty means it knows round robin alone and is a floor for any.

    ``made_by``: the command that makes its programs, if they are no packages of the system.
    """

    name: str
    what: str
    programs: tuple[str, ...]
    policies: frozenset[str]
    command: Callable[[Site], list[str]]
    made_by: str = ""


def _meshd(site: Site) -> list[str]:
    return _launch(site, sys.executable)


def _meshd_compiled(site: Site) -> list[str]:
    # from elsewhere: the sources in the checkout would come before what is installed
    return ["env", f"--chdir={site.directory}", *_launch(site, str(COMPILED_PYTHON))]


def _launch(site: Site, python: str) -> list[str]:
    command = [python, "-m", "meshd", "launch", "--host", "127.0.0.1", "--port", str(site.port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.metrics_port)]
    command += ["--worker-urls", *site.upstreams, "--policy", site.policy]
    command += ["--io-processes", "1", "--prepare-workers", "1", "--disable-health-check"]
    # 256 streams that begin in one instant are more than the 64 jobs that may wait before one prepare worker;
    # the other front ends refuse nobody
    command += ["--prepare-queue-capacity", "4096"]
    # no access lines, as for the others; and no wait for load balancers at the end
    command += ["--log-level", "warn", "--shutdown-delay-secs", "0"]
    if site.tokenizer and site.policy in TOKEN_POLICIES:
        command += ["--tokenizer-path", str(site.tokenizer)]
    return [*command, *site.extra]


def _fastapi(site: Site) -> list[str]:
    command = [sys.executable, "-m", "bench.baseline", "--port", str(site.port), "--policy", site.policy]
    if site.tokenizer and site.policy in TOKEN_POLICIES:
        command += ["--tokenizer", str(site.tokenizer)]
    return [*command, "--upstreams", *site.upstreams]


HAPROXY_CONFIG: Final = """\
global
    nbthread 1
    maxconn 8192
defaults
    mode http
    http-reuse always
    timeout connect 5s
    timeout client 600s
    timeout server 600s
listen front
    bind 127.0.0.1:{port}
    balance roundrobin
{servers}
"""


def _haproxy(site: Site) -> list[str]:
    servers = "\n".join(f"    server u{i} {urlsplit(url).netloc}" for i, url in enumerate(site.upstreams))
    path = site.directory / "haproxy.cfg"
    path.write_text(HAPROXY_CONFIG.format(port=site.port, servers=servers))
    return [find_program("haproxy") or "haproxy", "-db", "-f", str(path)]


NGINX_CONFIG: Final = """\
{user}
daemon off;
worker_processes 1;
pid {directory}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    client_max_body_size 16m;
    client_body_buffer_size 2m;
    keepalive_requests 1000000000;
    upstream backends {{
{servers}
        keepalive 512;
        keepalive_requests 1000000000;
    }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://backends;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 600s;
        }}
    }}
}}
"""


def _nginx(site: Site) -> list[str]:
    servers = "\n".join(f"        server {urlsplit(url).netloc};" for url in site.upstreams)
    path = site.directory / "nginx.conf"
    # started by root, its worker would become a user who cannot enter the private directory
    user = "user root;" if os.geteuid() == 0 else ""
    path.write_text(NGINX_CONFIG.format(port=site.port, directory=site.directory, servers=servers, user=user))
    return [find_program("nginx") or "nginx", "-p", str(site.directory), "-e", "stderr", "-c", str(path)]


ALL_POLICIES: Final = frozenset(
    {"random", "round_robin", "power_of_two", "least_load", "cache_aware", "prefix_hash"}
)

FRONT_ENDS: Final[dict[str, FrontEnd]] = {
    front_end.name: front_end
    for front_end in (
        FrontEnd("meshd", "one I/O process, one prepare worker", (), ALL_POLICIES, _meshd),
        FrontEnd(
            "meshd-compiled",
            "the same from .venv-compiled",
            (str(COMPILED_PYTHON),),
            ALL_POLICIES,
            _meshd_compiled,
            "make compiled",
        ),
        FrontEnd(
            "fastapi",
            "FastAPI + uvicorn (uvloop, httptools) + aiohttp: the baseline",
            (),
            frozenset({"round_robin", "prefix_hash"}),
            _fastapi,
        ),
        FrontEnd("haproxy", "floor: C, bodies not parsed", ("haproxy",), frozenset(), _haproxy),
        FrontEnd("nginx", "floor: C, bodies not parsed", ("nginx",), frozenset(), _nginx),
    )
}
BASELINE: Final = "fastapi"
