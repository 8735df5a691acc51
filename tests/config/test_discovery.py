from __future__ import annotations

import pytest

from meshd.config.discovery import (
    DnsName,
    check_dns_names,
    check_namespace,
    check_selector,
    read_dns_name,
)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("engines.example", DnsName("engines.example", 80)),
        ("Engines.Example.:8000", DnsName("engines.example.", 8000)),
        ("localhost:1", DnsName("localhost", 1)),
        ("_http._tcp.engines.example", DnsName("_http._tcp.engines.example", None)),
    ],
)
def test_a_dns_name_is_read_with_its_port_or_as_srv(text: str, name: DnsName) -> None:
    assert read_dns_name(text) == name
    assert name.is_service == text.startswith("_")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10.0.0.1", "is an address, not a name"),
        ("10.0.0.1:80", "is an address, not a name"),
        ("::1", "is an address, not a name"),
        ("[::1]", "is an address, not a name"),
        ("", "is not a DNS name"),
        ("a/b", "is not a DNS name"),
        ("a b", "is not a DNS name"),
        ("a..b", "is not a DNS name"),
        ("a" * 64, "is not a DNS name"),
        (".".join(["abcdefg"] * 32), "is not a DNS name"),
        ("a:0", "must be a number from 1 to 65535"),
        ("a:65536", "must be a number from 1 to 65535"),
        ("a:", "must be a number from 1 to 65535"),
        ("_http._tcp.a:80", "come from its SRV records"),
    ],
)
def test_what_is_no_dns_name_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_dns_name(text)


def test_equal_dns_names_are_one() -> None:
    assert check_dns_names(("a", "A:80", "a:81", "_x._tcp.a")) == ("a:80", "a:81", "_x._tcp.a")
    assert check_dns_names(check_dns_names(("a",))) == ("a:80",)


def test_a_selector_of_legal_labels_is_kept() -> None:
    value = (("app", "engine"), ("app.kubernetes.io/part-of", "v1.2_x"), ("spare", ""))
    assert check_selector(value) == value


@pytest.mark.parametrize(
    ("key", "value"),
    [("", "x"), ("-a", "x"), ("a/b/c", "x"), ("A.B/c", "x"), ("a", "x,y=z"), ("a", "x y"), ("a", "y" * 64)],
)
def test_what_is_no_label_of_a_pod_is_refused(key: str, value: str) -> None:
    with pytest.raises(ValueError, match="of a Kubernetes label"):
        check_selector(((key, value),))


def test_a_label_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="app is given twice"):
        check_selector((("app", "a"), ("app", "b")))


def test_a_namespace_is_a_dns_label_or_nothing() -> None:
    assert check_namespace("") == ""
    assert check_namespace("team-1") == "team-1"
    for wrong in ("Team", "a.b", "-a", "a" * 64):
        with pytest.raises(ValueError, match="namespace"):
            check_namespace(wrong)
