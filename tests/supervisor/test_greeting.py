from __future__ import annotations

from meshd.config import Settings
from meshd.control import Topology
from meshd.supervisor.greeting import demo_text, listening_urls
from meshd.supervisor.node import DEMO_MODEL


def test_urls_name_an_address_that_a_client_can_reach():
    topology = Topology.of(1, 1, listen_port=1, metrics_port=2)
    assert listening_urls(Settings(), topology) == ("http://127.0.0.1:1", "http://127.0.0.1:2/metrics")
    assert listening_urls(Settings(host="::"), topology)[0] == "http://[::1]:1"
    text = demo_text(Settings(demo=1), topology)
    assert "in front of 1 demo server." in text and f'"model":"{DEMO_MODEL}"' in text
    assert "--cacert" not in text


def test_the_command_line_of_a_tls_demo_trusts_its_certificate():
    settings = Settings(demo=1, tls_cert_path="/a b/cert.pem", tls_key_path="/k")
    text = demo_text(settings, Topology.of(1, 1, listen_port=1, metrics_port=2))
    assert "curl -N --cacert '/a b/cert.pem' https://127.0.0.1:1/v1/chat/completions" in text
