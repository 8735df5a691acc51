"""TLS contexts: what the traffic port offers, and how https upstreams are trusted.

TLS 1.2 and later, ALPN `http/1.1` alone. Towards upstreams the chain and the name are always checked; no
setting turns that off. Errors are StartupErrors that name the flag, the file and what to do.

A reload makes a new context and replaces the old one only when it is whole: `load_cert_chain` on a context
in use would leave it with a new certificate and no key when the two do not match.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from typing import Final

from meshd.errors import StartupError

_ALPN: Final = ["http/1.1"]
_BAD_CONFIGURATION: Final = 2  # exit code
_KEY_MISMATCH: Final = "KEY_VALUES_MISMATCH"


class TlsContext:
    """A context made by ``build`` at its first use, so that who never needs it never pays for it.

    Loading the system's trust store takes some 10 ms and 1 MiB.
    """

    def __init__(self, build: Callable[[], ssl.SSLContext]) -> None:
        self._build = build
        self._context: ssl.SSLContext | None = None

    def get(self) -> ssl.SSLContext:
        """Return the context of new connections. Raises StartupError if its files have become unusable."""
        if self._context is None:
            self._context = self._build()
        return self._context

    def reload(self) -> bool:
        """Read the files again, unless nobody has read them yet; return whether that was done.

        Open connections keep what they have. Raises StartupError for files that cannot be used; then the old
        context stays.
        """
        if self._context is None:
            return False
        self._context = self._build()
        return True


def server_context(cert_path: str, key_path: str) -> ssl.SSLContext:
    """Return the context of the traffic port. Raises StartupError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _restrict(context)
    context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE | ssl.OP_NO_RENEGOTIATION
    _load_chain(context, ("--tls-cert-path", cert_path), ("--tls-key-path", key_path))
    return context


def client_context(ca_paths: Sequence[str], cert_path: str = "", key_path: str = "") -> ssl.SSLContext:
    """Return the context towards upstreams: it trusts the system's authorities and those of ``ca_paths``.

    ``cert_path``, ``key_path``: our own certificate, if upstreams ask for one. Raises StartupError.
    """
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    _restrict(context)
    context.check_hostname = True
    context.verify_mode = ssl.CERT_REQUIRED
    context.hostname_checks_common_name = False  # names are subjectAltNames (RFC 9110 §4.3.4)
    for path in ca_paths:
        _load_authority(context, path)
    if cert_path:
        _load_chain(context, ("--client-cert-path", cert_path), ("--client-key-path", key_path))
    return context


def _restrict(context: ssl.SSLContext) -> None:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_ALPN)


def _load_chain(context: ssl.SSLContext, cert: tuple[str, str], key: tuple[str, str]) -> None:
    """Load a pair of files, each given as (flag, path)."""
    for flag, path in (cert, key):
        _check_readable(flag, path)
    try:
        context.load_cert_chain(cert[1], key[1], password=_refuse_passphrase)
    except _EncryptedKey as locked:
        raise _error(
            *key, "the key is encrypted and nobody is there to be asked: store it decrypted"
        ) from locked
    except ssl.SSLError as exc:
        raise _chain_error(cert, key, exc) from exc


def _chain_error(cert: tuple[str, str], key: tuple[str, str], exc: ssl.SSLError) -> StartupError:
    if exc.reason == _KEY_MISMATCH:
        return _error(*key, f"is not the key of the certificate in {cert[1]}")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cert[1])
    except ssl.SSLError:
        return _error(*cert, "holds no certificate in PEM form")
    return _error(*key, f"holds no usable private key in PEM form ({exc.reason or exc})")


def _load_authority(context: ssl.SSLContext, path: str) -> None:
    flag = "--ca-cert-paths"
    _check_readable(flag, path)
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as exc:
        raise _error(flag, path, "holds no certificate in PEM form") from exc


def _check_readable(flag: str, path: str) -> None:
    """OpenSSL's own error does not say which file it means."""
    try:
        with open(path, "rb") as file:
            file.read(1)
    except (OSError, ValueError) as exc:
        raise _error(flag, path, f"cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc


def _error(flag: str, path: str, words: str) -> StartupError:
    return StartupError(f"{flag}: {path}: {words}", exit_code=_BAD_CONFIGURATION)


class _EncryptedKey(Exception):
    """A key that asks for a passphrase; OpenSSL would ask on the terminal."""


def _refuse_passphrase() -> str:
    raise _EncryptedKey
