"""The URL of an upstream: what is accepted, and the normal form in which two are compared."""

from __future__ import annotations

import ipaddress
import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

_HOST_NAME: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?")
_BASE_PATH: Final = re.compile(r"[A-Za-z0-9/._~!$&'()*+,;=:@%-]*")
_SECOND_URL: Final = re.compile(r",https?://", re.IGNORECASE)


def normalize_url(url: str) -> str:
    """Return ``url`` with scheme and host in lower case and no trailing ``/``.

    Raises ``ValueError`` whose text says what to write instead. A default port stays as written.
    """
    authority = url.partition("//")[2].partition("/")[0]
    if "@" in authority:  # first: no message may repeat a password
        raise ValueError("an upstream URL has no user or password: give the key by api_key")
    parts = _split(url)
    _check_scheme(url, parts.scheme)
    if _SECOND_URL.search(url):  # commas, slashes and colons are legal in a path
        raise ValueError(f"{url!r} is more than one URL")
    # urlsplit drops an empty query or fragment, so the text itself is asked.
    if "?" in url or "#" in url:
        raise ValueError(
            f"{url!r} has a query or fragment: an upstream URL is scheme, host, port and base path"
        )
    if not _BASE_PATH.fullmatch(parts.path):
        raise ValueError(f"{url!r} has a character in its path that must be percent-encoded")
    return f"{parts.scheme}://{_authority(url, parts)}{parts.path.rstrip('/')}"


def _split(url: str) -> SplitResult:
    # urlsplit silently removes tabs and newlines and strips spaces, so they are refused before.
    if any(char <= " " or char == "\x7f" for char in url):
        raise ValueError(f"{url!r} contains a space or control character")
    try:
        return urlsplit(url)
    except ValueError as exc:
        raise ValueError(f"{url!r} is not a URL: {exc}") from exc


def _check_scheme(url: str, scheme: str) -> None:
    if scheme in ("grpc", "grpcs"):
        raise ValueError(
            f"{url!r}: meshd speaks HTTP to upstreams, not gRPC: write the http:// address of its HTTP server"
        )
    if scheme not in ("http", "https") or f"{scheme}://" != url[: len(scheme) + 3].lower():
        raise ValueError(f"{url!r} must start with http:// or https://")


def _authority(url: str, parts: SplitResult) -> str:
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError as exc:
        raise ValueError(f"{url!r}: the port must be a number from 1 to 65535") from exc
    if not host:
        raise ValueError(f"{url!r} has no host")
    if port == 0:
        raise ValueError(f"{url!r}: the port must be a number from 1 to 65535")
    if ":" in host:
        ipaddress.IPv6Address(_without_zone(host))
        host = f"[{host}]"
    elif not _HOST_NAME.fullmatch(host):
        raise ValueError(f"{url!r}: {host!r} is not a host name or address")
    return host if port is None else f"{host}:{port}"


def _without_zone(host: str) -> str:
    if "%" in host:
        raise ValueError(f"an IPv6 address with a zone ({host!r}) cannot be an upstream")
    return host
