"""TLS contexts over memory: two ends of a handshake without a socket."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from meshd.errors import StartupError
from meshd.tls import TlsContext, client_context, server_context
from tests.fakes.certificates import Authority, Pair


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def shake_hands(
    server: ssl.SSLContext, client: ssl.SSLContext, name: str = "localhost"
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Run a handshake to its end; return both sides. Raises what the first side to fail raises."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    done = [False, False]
    for _ in range(10):
        for position, end in enumerate(ends):
            if not done[position]:
                try:
                    end.do_handshake()
                    done[position] = True
                except ssl.SSLWantReadError:
                    pass
    assert all(done)
    with pytest.raises(ssl.SSLWantReadError):
        ends[0].read(1)  # what a server says of a client's certificate arrives after the client's handshake
    return ends


def message(cert: str, key: str) -> str:
    with pytest.raises(StartupError) as caught:
        server_context(cert, key)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_http11_is_chosen_of_what_a_client_offers_and_h2_never_is(authority: Authority) -> None:
    pair = authority.issue()
    both, _ = shake_hands(server_context(pair.cert, pair.key), authority.client_context("h2", "http/1.1"))
    assert both.selected_alpn_protocol() == "http/1.1"
    h2, _ = shake_hands(server_context(pair.cert, pair.key), authority.client_context("h2"))
    assert h2.selected_alpn_protocol() is None


def test_upstreams_are_offered_http11_alone(authority: Authority) -> None:
    server = authority.server_context()
    server.set_alpn_protocols(["h2", "http/1.1"])
    ours, _ = shake_hands(server, client_context((authority.path,)))
    assert ours.selected_alpn_protocol() == "http/1.1"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tls_11_is_refused_and_12_and_13_are_taken(authority: Authority) -> None:
    pair = authority.issue()
    for version, is_taken in (
        (ssl.TLSVersion.TLSv1_1, False),
        (ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_3, True),
    ):
        client = authority.client_context()
        client.set_ciphers("DEFAULT:@SECLEVEL=0")  # else the client's own library refuses 1.1
        client.minimum_version = client.maximum_version = version
        if is_taken:
            shake_hands(server_context(pair.cert, pair.key), client)
        else:
            with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
                shake_hands(server_context(pair.cert, pair.key), client)


def test_an_upstream_of_an_unknown_authority_is_not_trusted(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
        shake_hands(stranger.server_context(), client_context((authority.path,)))
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(authority.server_context(), client_context(()))


def test_several_authorities_are_trusted_besides_the_systems(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path)
    client = client_context((authority.path, other.path))
    shake_hands(authority.server_context(), client)
    shake_hands(other.server_context(), client)
    assert (
        client.cert_store_stats()["x509_ca"] >= ssl.create_default_context().cert_store_stats()["x509_ca"] + 2
    )


def test_an_upstream_with_another_name_is_not_trusted(authority: Authority) -> None:
    client = client_context((authority.path,))
    shake_hands(authority.server_context("llm.internal", "10.0.0.1"), client, "llm.internal")
    shake_hands(authority.server_context("llm.internal", "10.0.0.1"), client, "10.0.0.1")
    for name in ("other.internal", "10.0.0.2"):
        with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            shake_hands(authority.server_context("llm.internal", "10.0.0.1"), client, name)


def test_our_certificate_is_shown_to_an_upstream_that_asks(authority: Authority) -> None:
    pair = authority.issue("meshd.internal")
    _, server = shake_hands(
        authority.server_context(asks_for_certificate=True),
        client_context((authority.path,), pair.cert, pair.key),
    )
    assert ("DNS", "meshd.internal") in server.getpeercert()["subjectAltName"]
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        shake_hands(authority.server_context(asks_for_certificate=True), client_context((authority.path,)))


def test_unusable_files_are_named_with_their_flag(authority: Authority, tmp_path: Path) -> None:
    pair, other = authority.issue(), authority.issue()
    junk = tmp_path / "junk.pem"
    junk.write_text("not a certificate")
    assert message("/nowhere/c", pair.key) == (
        "--tls-cert-path: /nowhere/c: cannot be read: No such file or directory"
    )
    assert message(pair.cert, str(tmp_path)).endswith("cannot be read: Is a directory")
    assert message(str(junk), pair.key) == f"--tls-cert-path: {junk}: holds no certificate in PEM form"
    assert message(pair.cert, str(junk)).startswith(f"--tls-key-path: {junk}: holds no usable private key")
    assert message(pair.cert, other.key) == (
        f"--tls-key-path: {other.key}: is not the key of the certificate in {pair.cert}"
    )
    with pytest.raises(StartupError, match=r"--ca-cert-paths: .*junk\.pem: holds no certificate"):
        client_context((authority.path, str(junk)))
    with pytest.raises(StartupError, match="--client-key-path: /nowhere/k: cannot be read"):
        client_context((), pair.cert, "/nowhere/k")


def test_an_encrypted_key_is_refused_without_asking_anybody(authority: Authority, tmp_path: Path) -> None:
    pair, encrypted = authority.issue(), tmp_path / "encrypted.key"
    key = serialization.load_pem_private_key(Path(pair.key).read_bytes(), None)
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    assert "the key is encrypted" in message(pair.cert, str(encrypted))


def test_a_reload_takes_new_files_for_new_connections(authority: Authority, tmp_path: Path) -> None:
    used = _copy(authority.issue("old.internal"), tmp_path)
    tls = TlsContext(lambda: server_context(used.cert, used.key))
    old = tls.get()
    assert tls.get() is old
    _copy(authority.issue("new.internal"), tmp_path)
    assert tls.reload()
    shake_hands(tls.get(), authority.client_context(), "new.internal")
    shake_hands(old, authority.client_context(), "old.internal")


def test_a_reload_of_bad_files_keeps_the_old_ones(authority: Authority, tmp_path: Path) -> None:
    used = _copy(authority.issue("old.internal"), tmp_path)
    tls = TlsContext(lambda: server_context(used.cert, used.key))
    tls.get()
    Path(used.key).write_bytes(Path(authority.issue().key).read_bytes())
    with pytest.raises(StartupError, match="is not the key"):
        tls.reload()
    shake_hands(tls.get(), authority.client_context(), "old.internal")


def test_a_context_that_nobody_has_used_is_not_made_by_a_reload() -> None:
    made: list[int] = []
    tls = TlsContext(lambda: made.append(1) or ssl.create_default_context())  # type: ignore[func-returns-value]
    assert not tls.reload()
    assert not made


def _copy(pair: Pair, directory: Path) -> Pair:
    copy = Pair(str(directory / "cert.pem"), str(directory / "key.pem"))
    Path(copy.cert).write_bytes(Path(pair.cert).read_bytes())
    Path(copy.key).write_bytes(Path(pair.key).read_bytes())
    return copy
