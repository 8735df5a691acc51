from __future__ import annotations

import pytest

from meshd.config.urls import normalize_url


@pytest.mark.parametrize(
    ("url", "normal"),
    [
        ("http://h:8000/", "http://h:8000"),
        ("HTTP://Host.Example:8000", "http://host.example:8000"),
        ("https://h/base/Path/", "https://h/base/Path"),
        ("http://[FE80::1]:80", "http://[fe80::1]:80"),
        ("http://10.0.0.1", "http://10.0.0.1"),
        ("http://a_b-c.svc.:1/", "http://a_b-c.svc.:1"),
        ("http://h/a,b", "http://h/a,b"),
    ],
)
def test_normal_form(url: str, normal: str) -> None:
    assert normalize_url(url) == normal
    assert normalize_url(normal) == normal


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("grpc://h:1", "not gRPC"),
        ("ftp://h", "must start with http"),
        ("h:8000", "must start with http"),
        ("http:h", "must start with http"),
        ("", "must start with http"),
        ("http://", "has no host"),
        ("http://:80", "has no host"),
        ("http://u:p@h", "user or password"),
        ("http://@h", "user or password"),
        ("http://h?", "query or fragment"),
        ("http://h/#x", "query or fragment"),
        ("http://h:0", "port must be"),
        ("http://h:65536", "port must be"),
        ("http://h:x", "port must be"),
        ("http://h /", "space or control"),
        ("http://h\n", "space or control"),
        ("http://[::1", "not a URL"),
        ("http://[::g]", "not"),
        ("http://a/x,http://b", "more than one URL"),
        ("http://a..b", "not a host name"),
        ("http://hé", "not a host name"),
        ("http://h/é", "percent-encoded"),
    ],
)
def test_other_urls_are_refused_with_words(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        normalize_url(url)


@pytest.mark.parametrize("url", ["http://user:hunter2@h", "ftp://user:hunter2@h", "http://user:hunter2@h /"])
def test_a_password_is_not_quoted_in_the_refusal(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        normalize_url(url)
    assert "hunter2" not in str(caught.value)
