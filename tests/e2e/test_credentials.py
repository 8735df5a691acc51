"""Whose key goes where: an upstream with a key gets that one alone, one without gets the client's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.node import Backend, Node, running, wait_until

UPSTREAM_KEY = "up-key-0001"
CLIENT = {"authorization": "Bearer client-secret", "x-api-key": "client-secret-2"}
BODIES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/generate": {"text": "a"},
    "/v1/embeddings": {"input": "a"},
}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Backend, Backend]]:
    """One upstream of model `locked` that has a key, one of model `open` that has none."""
    locked, free = Backend("--model", "locked", "--api-key", UPSTREAM_KEY), Backend("--model", "open")
    file = tmp_path_factory.mktemp("keyed") / "meshd.toml"
    file.write_text(
        f'[[workers]]\nurl = "{locked.url}"\napi_key = "{UPSTREAM_KEY}"\n\n[[workers]]\nurl = "{free.url}"\n'
    )
    try:
        with running("--io-processes", "1", "--prepare-workers", "1", "--config", str(file)) as node:
            wait_until(lambda: node.request("GET", "/v1/models")[2].count(b'"id"') == 2, "two models")
            yield node, locked, free
    finally:
        locked.stop()
        free.stop()


def credentials(backend: Backend) -> list[tuple[str, str]]:
    """The credential fields of the last request that the upstream got."""
    fields = backend.requests()[-1]["headers"]
    return [(name.lower(), value) for name, value in fields if name.lower() in CLIENT]


@pytest.mark.parametrize("path", BODIES)
def test_upstream_with_a_key_gets_that_key_and_nothing_of_the_client(keyed, path):
    node, locked, _ = keyed
    status, _, body = node.request("POST", path, {"model": "locked", **BODIES[path]}, CLIENT)
    assert status == 200, body
    sent = credentials(locked)
    expected = [("authorization", f"Bearer {UPSTREAM_KEY}")]
    if path.startswith("/v1/messages"):
        expected.append(("x-api-key", UPSTREAM_KEY))
    assert sent == expected


@pytest.mark.parametrize("path", BODIES)
def test_upstream_without_a_key_gets_the_clients_credentials_unchanged(keyed, path):
    node, _, free = keyed
    status, _, body = node.request("POST", path, {"model": "open", **BODIES[path]}, CLIENT)
    assert status == 200, body
    assert dict(credentials(free)) == CLIENT


def test_resource_operation_carries_each_origins_own_credentials(keyed):
    node, locked, free = keyed
    node.request("GET", "/v1/responses/resp_nothing", headers=CLIENT)
    assert dict(credentials(locked)) == {"authorization": f"Bearer {UPSTREAM_KEY}"}
    assert dict(credentials(free)) == CLIENT


def test_no_answer_and_no_log_line_shows_a_key(keyed):
    node, _, _ = keyed
    answers = [node.request("GET", path)[2] for path in ("/workers", "/v1/models", "/readiness")]
    everything = b"".join(answers) + "\n".join(node.raw_lines).encode()
    assert UPSTREAM_KEY.encode() not in everything
    assert b"client-secret" not in everything
