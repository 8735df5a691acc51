"""Where the Kubernetes API is: what the cluster tells each pod, or the file that ``kubectl`` reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cluster:
    """``kubeconfig``: paths as in ``KUBECONFIG``, which win where set; else the service account of this pod,
    whose API server is at ``host`` and ``port``; those are empty outside of a cluster."""

    kubeconfig: str = ""
    host: str = ""
    port: str = ""


def find_cluster(environ: Mapping[str, str]) -> Cluster:
    """Read ``KUBECONFIG``, ``KUBERNETES_SERVICE_HOST`` and ``KUBERNETES_SERVICE_PORT``."""
    return Cluster(
        environ.get("KUBECONFIG", ""),
        environ.get("KUBERNETES_SERVICE_HOST", ""),
        environ.get("KUBERNETES_SERVICE_PORT", ""),
    )
