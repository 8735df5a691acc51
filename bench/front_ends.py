"""The front ends under test, each declared once: what it is, what it needs, how it is started.

All of them do the same outward job: accept a completions request on the given cores, choose an upstream,
forward the body over a kept-alive connection and relay the answer. `meshd` and `fastapi` also parse the body,
validate the prompt and apply the policy; other routers (peers.py) do so in their own ways; `haproxy` and
`nginx` never look into a body and know round robin alone, so they are floors, not rivals. `meshd-compiled` is
there after `make compiled`. None of them writes an access log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from bench.front_end import TOKEN_POLICIES, FrontEnd, Site
from bench.machine import find_program, missing
from bench.peers import PEERS, find_peer

ROOT: Final = Path(__file__).parents[1]
COMPILED_PYTHON: Final = ROOT / ".venv-compiled" / "bin" / "python"
COMPILED_STAMP: Final = ROOT / ".venv-compiled" / ".built"


def _meshd(site: Site) -> list[str]:
    return _launch(site, sys.executable)


def _meshd_compiled(site: Site) -> list[str]:
    # from elsewhere: the sources in the checkout would come before what is installed
    return ["env", f"--chdir={site.directory}", *_launch(site, str(COMPILED_PYTHON))]


def _launch(site: Site, python: str) -> list[str]:
    command = [python, "-m", "meshd", "launch", "--host", "127.0.0.1", "--port", str(site.port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.metrics_port)]
    command += ["--worker-urls", *site.upstreams, "--policy", site.policy]
    # on one core both share it; on more, bytes cost more than bodies do (`python -m bench scaling`)
    prepare = max(1, site.cores // 3)
    command += ["--io-processes", str(max(1, site.cores - prepare)), "--prepare-workers", str(prepare)]
    command += ["--disable-health-check"]
    # no access lines, as for the others; and no wait for load balancers at the end
    command += ["--log-level", "warn", "--shutdown-delay-secs", "0"]
    if site.tokenizer and site.policy in TOKEN_POLICIES:
        command += ["--tokenizer-path", str(site.tokenizer)]
    return [*command, *site.extra]


def _fastapi(site: Site) -> list[str]:
    command = [sys.executable, "-m", "bench.baseline", "--port", str(site.port), "--policy", site.policy]
    if site.tokenizer and site.policy in TOKEN_POLICIES:
        command += ["--tokenizer", str(site.tokenizer)]
    return [*command, "--workers", str(site.cores), "--upstreams", *site.upstreams]


HAPROXY_CONFIG: Final = """\
global
    nbthread {cores}
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
    path.write_text(HAPROXY_CONFIG.format(port=site.port, servers=servers, cores=site.cores))
    return [find_program("haproxy") or "haproxy", "-db", "-f", str(path)]


NGINX_CONFIG: Final = """\
{user}
daemon off;
worker_processes {cores};
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
    path.write_text(
        NGINX_CONFIG.format(
            port=site.port, directory=site.directory, servers=servers, user=user, cores=site.cores
        )
    )
    return [find_program("nginx") or "nginx", "-p", str(site.directory), "-e", "stderr", "-c", str(path)]


ALL_POLICIES: Final = frozenset(
    {"random", "round_robin", "power_of_two", "least_load", "cache_aware", "prefix_hash"}
)
OURS: Final = {policy: policy for policy in ALL_POLICIES}
FRONT_ENDS: Final[dict[str, FrontEnd]] = {
    front_end.name: front_end
    for front_end in (
        FrontEnd(
            name="meshd",
            what="I/O processes and prepare workers",
            programs=(),
            policies=OURS,
            command=_meshd,
            tokenizes=True,
        ),
        FrontEnd(
            name="meshd-compiled",
            what="the same from .venv-compiled",
            programs=(str(COMPILED_PYTHON),),
            policies=OURS,
            command=_meshd_compiled,
            made_by="make compiled",
            tokenizes=True,
        ),
        FrontEnd(
            name="fastapi",
            what="FastAPI + uvicorn (uvloop, httptools) + aiohttp: the baseline",
            programs=(),
            policies={"round_robin": "round_robin", "prefix_hash": "prefix_hash"},
            command=_fastapi,
            tokenizes=True,
        ),
        *PEERS,
        FrontEnd("haproxy", "floor: C, bodies not parsed", ("haproxy",), {}, _haproxy),
        FrontEnd("nginx", "floor: C, bodies not parsed", ("nginx",), {}, _nginx),
    )
}
BASELINE: Final = "fastapi"


def absent_programs(front_end: FrontEnd) -> list[str]:
    """What must be installed before the front end can run."""
    if front_end.distribution:
        found = find_peer(front_end.programs[0], front_end.distribution)
        return [] if found else list(front_end.programs)
    return missing(front_end.programs)


def is_stale(stamp: Path, sources: Path) -> bool:
    """Whether a Python source is younger than the build, or the build left no stamp."""
    if not stamp.exists():
        return True
    built_s = stamp.stat().st_mtime
    return any(source.stat().st_mtime > built_s for source in sources.rglob("*.py"))


def stale_builds(front_ends: Iterable[FrontEnd]) -> list[str]:
    """Those front ends that were built from older sources than lie here."""
    names = [one.name for one in front_ends if one.name == "meshd-compiled"]
    return names if names and is_stale(COMPILED_STAMP, ROOT / "meshd") else []
