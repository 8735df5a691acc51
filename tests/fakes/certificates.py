"""Real certificates, made for one test run by an authority that nobody else trusts."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Pair:
    """A certificate chain and its key, as files."""

    cert: str
    key: str


class Authority:
    """A certificate authority; its files are in ``directory``."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._authority = trustme.CA()
        self._issued = 0
        self.path = str(directory / "authority.pem")
        self._authority.cert_pem.write_to_path(self.path)

    def issue(self, *names: str) -> Pair:
        """Issue a certificate for host names or addresses (default: this host's loopback)."""
        self._issued += 1
        issued = self._authority.issue_cert(*(names or ("127.0.0.1", "localhost")))
        pair = Pair(
            str(self._directory / f"{self._issued}.pem"), str(self._directory / f"{self._issued}.key")
        )
        for position, blob in enumerate(issued.cert_chain_pems):
            blob.write_to_path(pair.cert, append=position > 0)
        issued.private_key_pem.write_to_path(pair.key)
        return pair

    def server_context(self, *names: str, asks_for_certificate: bool = False) -> ssl.SSLContext:
        """Return the context of an ordinary https server; ``asks_for_certificate``: mutual TLS."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        pair = self.issue(*names)
        context.load_cert_chain(pair.cert, pair.key)
        if asks_for_certificate:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.path)
        return context

    def client_context(self, *alpn: str) -> ssl.SSLContext:
        """Return the context of an ordinary client that trusts this authority alone."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.path)
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context
