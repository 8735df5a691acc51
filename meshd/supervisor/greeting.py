"""What a person is told when the node is up."""

from __future__ import annotations

import shlex

from meshd.config import Settings
from meshd.control import Topology
from meshd.supervisor.node import DEMO_MODEL


def listening_urls(settings: Settings, topology: Topology) -> tuple[str, str]:
    """Return the URLs of traffic and metrics as this host reaches them."""
    scheme = "https" if settings.tls_cert_path else "http"
    return (
        f"{scheme}://{_reachable(settings.host)}:{topology.listen_port}",
        f"http://{_reachable(settings.prometheus_host)}:{topology.metrics_port}/metrics",
    )


def demo_text(settings: Settings, topology: Topology) -> str:
    """Say what runs and give a command line that works as it stands."""
    traffic, metrics = listening_urls(settings, topology)
    # The certificate itself is trusted as an authority: right for a self-signed one, harmless for others.
    trust = f"--cacert {shlex.quote(settings.tls_cert_path)} " if settings.tls_cert_path else ""
    servers = "1 demo server" if settings.demo == 1 else f"{settings.demo} demo servers"
    return f"""
meshd is serving {traffic} in front of {servers}. Try:

  curl -N {trust}{traffic}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model":"{DEMO_MODEL}","stream":true,"messages":[{{"role":"user","content":"Hello"}}]}}'

Metrics: {metrics}
Ctrl-C ends it.
"""


def _reachable(host: str) -> str:
    """Wildcard addresses are for listening; a client needs one of this host's own."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{name}]" if ":" in name else name
