from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from meshd.api.endpoints import ENDPOINTS
from meshd.routing.upstream import Upstream, is_available


def test_parts_and_name_are_derived_from_the_base_url() -> None:
    rank = Upstream(number=1, id="a", base_url="https://[::1]/base/v", dp_rank=3)
    assert (rank.url, rank.host, rank.port) == ("https://[::1]/base/v@3", "::1", 443)
    assert (rank.is_tls, rank.base_path) == (True, "/base/v")
    plain = Upstream(number=1, id="a", base_url="http://h")
    assert (plain.url, plain.port, plain.is_tls, plain.base_path) == ("http://h", 80, False, "")


def test_url_of_another_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="base_url"):
        Upstream(number=1, id="a", base_url="ftp://h:1")


@pytest.mark.parametrize(
    ("label", "able"),
    [
        (None, True),
        ("/v1/messages, /generate", True),
        ("/v1/messages", False),
        ("", False),
        ("/generate/", False),
    ],
)
def test_apis_label_lists_exactly_what_is_served(label: str | None, able: bool) -> None:
    labels = {} if label is None else {"mesh.apis": label}
    assert Upstream(number=0, id="a", base_url="http://h", labels=labels).is_able("/generate") is able


def test_row_survives_json_and_derived_facts_follow_a_replaced_field() -> None:
    upstream = Upstream(
        number=4,
        id="a",
        base_url="http://h:1",
        dp_rank=0,
        models=("m1", "m2"),
        labels={"mesh.apis": "/generate"},
        api_key="k",
        cost=0.5,
        is_healthy=True,
        state="draining",
    )
    assert Upstream.from_row(orjson.loads(orjson.dumps(upstream.to_row()))) == upstream
    assert replace(upstream, labels={}).capabilities is None
    assert replace(upstream, dp_rank=None).url == "http://h:1"


def test_repr_never_shows_the_key() -> None:
    assert "sk-secret" not in repr(Upstream(number=0, id="a", base_url="http://h", api_key="sk-secret"))


def test_only_a_healthy_active_upstream_is_available() -> None:
    upstream = Upstream(number=0, id="a", base_url="http://h", is_healthy=True, state="active")
    assert is_available(upstream)
    assert not is_available(replace(upstream, is_healthy=False))
    assert not is_available(replace(upstream, state="starting"))
    assert not is_available(replace(upstream, state="draining"))


def test_rank_goes_into_the_bodies_that_the_server_is_known_to_read_it_from() -> None:
    def ranked(labels: dict[str, str], dp_rank: int | None = 5) -> set[str]:
        upstream = Upstream(number=0, id="a", base_url="http://h", dp_rank=dp_rank, labels=labels)
        return {e.name for e in ENDPOINTS if upstream.rank_for(e) == 5}

    always = {"chat", "completions", "generate"}
    assert ranked({}) == always
    assert ranked({"mesh.apis": "/v1/chat/completions"}) == always
    assert ranked({"mesh.apis": "/v1/messages,/v1/embeddings"}) == always | {
        "messages",
        "count_tokens",
        "embeddings",
    }
    assert ranked({"mesh.apis": "/v1/responses"}) == always | {"responses"}
    assert ranked({"mesh.apis": "/v1/responses"}, dp_rank=None) == set()
