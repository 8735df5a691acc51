"""Checks of single values that bounds and choices cannot express.

Each takes a value of the setting's kind, and returns it, in normal form where there is one, or raises
``ValueError`` with words that can follow the setting's name and a colon.
"""

from __future__ import annotations

import ipaddress
import re
from itertools import pairwise
from typing import Final
from urllib.parse import urlsplit

from meshd.config.urls import normalize_url

_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 §5.6.2
_FIELD_VALUE: Final = re.compile(r"[\x21-\x7e]([\x20-\x7e\t]*[\x21-\x7e])?")  # RFC 9110 §5.5, ASCII only
_CPU_LIST: Final = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_ORIGIN: Final = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_DEFAULT_PORTS: Final = {"http": "80", "https": "443"}
_MAX_CPU: Final = 8191  # CONFIG_NR_CPUS of the largest kernels


def check_address(value: str) -> str:
    """Accept a literal IPv4 or IPv6 address, with or without brackets; return it without."""
    bare = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    try:
        ipaddress.ip_address(bare)
    except ValueError as exc:
        raise ValueError(f"{value!r} is not an IPv4 or IPv6 address (this host alone: 127.0.0.1)") from exc
    return bare


def check_urls(value: tuple[str, ...]) -> tuple[str, ...]:
    """Normalise upstream URLs; ``meshd.config.rules`` looks for equal ones."""
    return tuple(normalize_url(url) for url in value)


def check_endpoint(value: str) -> str:
    """Accept host:port, or an http or https URL without more than an authority."""
    try:
        url = urlsplit(value if "://" in value else f"http://{value}")
        is_whole = url.scheme in ("http", "https") and url.hostname and url.port and url.path in ("", "/")
    except ValueError:
        is_whole = False
    if not is_whole or url.query or url.fragment or url.username is not None or not value.isprintable():
        raise ValueError(f"{value!r} is neither host:port nor a URL of one, such as http://localhost:4317")
    return value.removesuffix("/")


def check_header_value(value: str) -> str:
    """Accept what may stand in a header; the value itself, a secret, is never quoted."""
    if value and not _FIELD_VALUE.fullmatch(value):
        raise ValueError("not a legal header value: printable ASCII, no space at either end")
    return value


def check_header_names(value: tuple[str, ...]) -> tuple[str, ...]:
    """Accept header names; return them in lower case."""
    for name in value:
        if not _TOKEN.fullmatch(name):
            raise ValueError(f"{name!r} is not a header name")
    return tuple(name.lower() for name in value)


def check_origins(value: tuple[str, ...]) -> tuple[str, ...]:
    """Accept web origins (RFC 6454 §6.2) and ``*``; return them as browsers write them."""
    return tuple(origin if origin == "*" else _normal_origin(origin) for origin in value)


def _normal_origin(value: str) -> str:
    match = _ORIGIN.fullmatch(value.lower())
    if match is None or int(match[3] or 0) > 65535:
        raise ValueError(f"{value!r} is not an origin: scheme://host or scheme://host:port, without a path")
    scheme, host, port = match[1], match[2], match[3]
    return f"{scheme}://{host}" if port in (None, _DEFAULT_PORTS.get(scheme)) else f"{scheme}://{host}:{port}"


def check_path(value: str) -> str:
    """Accept the path of a request line."""
    if (
        not value.startswith("/")
        or not value.isascii()
        or any(char <= " " or char in "#\x7f" for char in value)
    ):
        raise ValueError(f"{value!r} is not a path that starts with /")
    return value


def check_passthrough_paths(value: tuple[str, ...]) -> tuple[str, ...]:
    """Accept exact paths, and prefixes that end in ``*``; a path has no query and no dot segment."""
    for pattern in value:
        path = check_path(pattern).removesuffix("*")
        if "?" in path or "*" in path or not {".", ".."}.isdisjoint(path.split("/")):
            raise ValueError(
                f"{pattern!r} is neither a path nor the beginning of one followed by *, without query"
            )
    return value


def check_ascending(value: tuple[float, ...]) -> tuple[float, ...]:
    """Accept bucket bounds: at least one, each above the one before."""
    if not value:
        raise ValueError("needs at least one number")
    for low, high in pairwise(value):
        if low >= high:
            raise ValueError(f"must ascend, but {high:g} follows {low:g}")
    return value


def check_cpu_list(value: str) -> str:
    """Accept a list such as ``0-7,16``, or nothing."""
    if value:
        expand_cpu_list(value)
    return value


def expand_cpu_list(value: str) -> tuple[int, ...]:
    """Return the CPU numbers of a list such as ``0-7,16``, ascending."""
    if not _CPU_LIST.fullmatch(value):
        raise ValueError(f"{value!r} is not a list of CPUs such as 0-7,16")
    cpus: set[int] = set()
    for part in value.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if low > high or high > _MAX_CPU:
            raise ValueError(f"{part!r} is not a range of CPUs")
        cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))
