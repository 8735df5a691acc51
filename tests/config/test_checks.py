from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshd.config import checks


@pytest.mark.parametrize(
    ("check", "value", "expected"),
    [
        (checks.check_address, "::1", "::1"),
        (checks.check_address, "[::1]", "::1"),
        (checks.check_header_value, "", ""),
        (checks.check_header_value, "a b", "a b"),
        (checks.check_header_names, ("X-Request-Id",), ("x-request-id",)),
        (checks.check_header_names, (), ()),
        (checks.check_endpoint, "localhost:4317", "localhost:4317"),
        (checks.check_endpoint, "[::1]:4317", "[::1]:4317"),
        (checks.check_endpoint, "https://collector.example:4317/", "https://collector.example:4317"),
        (checks.check_path, "/health?deep=1", "/health?deep=1"),
        (checks.check_passthrough_paths, ("/v1/score", "/v1/audio/*"), ("/v1/score", "/v1/audio/*")),
        (checks.check_passthrough_paths, ("/*", "/v1/rer*"), ("/*", "/v1/rer*")),
        (checks.check_ascending, (0.5, 1.0), (0.5, 1.0)),
        (checks.check_cpu_list, "", ""),
        (checks.check_cpu_list, "0-7,16", "0-7,16"),
    ],
)
def test_good_values_pass_in_normal_form(check: Callable[[Any], Any], value: Any, expected: Any) -> None:
    assert check(value) == expected


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (checks.check_address, "localhost"),
        (checks.check_address, ""),
        (checks.check_header_value, "a\nb"),
        (checks.check_header_value, " a"),
        (checks.check_header_value, "é"),
        (checks.check_header_names, ("a b",)),
        *(
            (checks.check_endpoint, value)
            for value in (
                "",
                "localhost",
                "4317",
                "localhost:x",
                "localhost:99999",
                "grpc://localhost:4317",
                "http://localhost:4317/v1/traces",
                "http://user:key@localhost:4317",
                "http://localhost:4317?a",
            )
        ),
        (checks.check_origins, ("https://a.example/",)),
        (checks.check_origins, ("a.example",)),
        (checks.check_origins, ("null",)),
        (checks.check_origins, ("https://a.example:99999",)),
        (checks.check_origins, ("https://user@a.example",)),
        (checks.check_path, "health"),
        (checks.check_path, "/a b"),
        (checks.check_passthrough_paths, ("v1/score",)),
        (checks.check_passthrough_paths, ("*",)),
        (checks.check_passthrough_paths, ("/v1/*/x",)),
        (checks.check_passthrough_paths, ("/v1/**",)),
        (checks.check_passthrough_paths, ("/v1/score?x=1",)),
        (checks.check_passthrough_paths, ("/v1/../score",)),
        (checks.check_passthrough_paths, ("/v1/score", "/a b")),
        (checks.check_ascending, ()),
        (checks.check_ascending, (1.0, 1.0)),
        (checks.check_cpu_list, "1,"),
        (checks.check_cpu_list, "3-1"),
        (checks.check_cpu_list, "0-99999999"),
    ],
)
def test_bad_values_are_refused(check: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(ValueError):
        check(value)


def test_a_refused_key_is_not_quoted() -> None:
    with pytest.raises(ValueError) as caught:
        checks.check_header_value("hunter2\n")
    assert "hunter2" not in str(caught.value)


def test_origins_are_kept_as_browsers_write_them() -> None:
    given = (
        "https://Chat.Example:443",
        "http://a:80",
        "http://a:443",
        "*",
        "https://[::1]:8443",
        "app+x://local",
    )
    kept = ("https://chat.example", "http://a", "http://a:443", "*", "https://[::1]:8443", "app+x://local")
    assert checks.check_origins(given) == kept


def test_a_cpu_list_is_expanded_once_and_in_order() -> None:
    assert checks.expand_cpu_list("4,0-2,1") == (0, 1, 2, 4)
    assert checks.expand_cpu_list("0-2,16,4-4") == (0, 1, 2, 4, 16)


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "0,,2", "0-99999999"])
def test_a_bad_cpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        checks.expand_cpu_list(text)
