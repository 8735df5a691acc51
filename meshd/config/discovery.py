"""Checks of the settings of discovery: DNS names, selectors of pods, namespaces.

Like ``checks``: each returns the value, in normal form where there is one, or raises ``ValueError`` with
words that can follow the setting's name and a colon.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

_DNS_LABEL: Final = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_DNS_NAME: Final = re.compile(rf"{_DNS_LABEL}(\.{_DNS_LABEL})*\.?")
_MAX_DNS_NAME: Final = 253
_PORT: Final = re.compile(r"[0-9]{1,5}")
_MAX_PORT: Final = 65535
# Kubernetes, "Labels and Selectors": an optional prefix, then a name; a value may be empty.
_LABEL_TEXT: Final = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_LABEL_PREFIX: Final = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*"
_LABEL_KEY: Final = re.compile(rf"({_LABEL_PREFIX}/)?{_LABEL_TEXT}")
_LABEL_VALUE: Final = re.compile(rf"({_LABEL_TEXT})?")
_NAMESPACE: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class DnsName:
    """A name to ask for. ``port``: of the addresses found; None with SRV, whose records have their own."""

    name: str
    port: int | None

    @property
    def is_service(self) -> bool:
        """Whether it is looked up as SRV."""
        return self.port is None

    def __str__(self) -> str:
        return self.name if self.port is None else f"{self.name}:{self.port}"


def read_dns_name(value: str, default_port: int = 80) -> DnsName:
    """Read ``NAME[:PORT]``; a name that starts with ``_`` takes no port. Raises ``ValueError``."""
    name, has_port, port = value.lower().partition(":")
    if _is_address(value) or _is_address(name):
        raise ValueError(f"{value!r} is an address, not a name: give it by --worker-urls")
    if len(name.rstrip(".")) > _MAX_DNS_NAME or not _DNS_NAME.fullmatch(name):
        raise ValueError(f"{value!r} is not a DNS name, or one with a port: NAME[:PORT]")
    if name.startswith("_"):
        if has_port:
            raise ValueError(f"{value!r}: the ports of a name that starts with _ come from its SRV records")
        return DnsName(name, None)
    if has_port and not (_PORT.fullmatch(port) and 0 < int(port) <= _MAX_PORT):
        raise ValueError(f"{value!r}: the port must be a number from 1 to {_MAX_PORT}")
    return DnsName(name, int(port) if has_port else default_port)


def check_dns_names(value: tuple[str, ...]) -> tuple[str, ...]:
    """Accept ``NAME[:PORT]`` items; return each once, in lower case, with its port."""
    return tuple(dict.fromkeys(str(read_dns_name(item)) for item in value))


def check_selector(value: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Accept labels of Kubernetes objects, no key twice."""
    keys: set[str] = set()
    for key, text in value:
        if not _LABEL_KEY.fullmatch(key):
            raise ValueError(f"{key!r} is not the key of a Kubernetes label")
        if not _LABEL_VALUE.fullmatch(text):
            raise ValueError(f"{text!r} is not the value of a Kubernetes label")
        if key in keys:
            raise ValueError(f"{key} is given twice")
        keys.add(key)
    return value


def check_namespace(value: str) -> str:
    """Accept the name of a namespace, or nothing for all of them."""
    if value and not _NAMESPACE.fullmatch(value):
        raise ValueError(f"{value!r} is not the name of a Kubernetes namespace")
    return value


def _is_address(value: str) -> bool:
    try:
        ipaddress.ip_address(value.strip("[]"))
    except ValueError:
        return False
    return True
