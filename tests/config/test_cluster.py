from __future__ import annotations

from meshd.config.cluster import Cluster, find_cluster


def test_a_pod_is_told_where_the_api_is() -> None:
    environ = {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_SERVICE_PORT": "443",
        "KUBERNETES_PORT": "x",
    }
    assert find_cluster(environ) == Cluster(host="10.96.0.1", port="443")


def test_a_kubeconfig_is_found_and_nothing_is_nothing() -> None:
    assert find_cluster({"KUBECONFIG": "/a:/b"}).kubeconfig == "/a:/b"
    assert find_cluster({}) == Cluster()
