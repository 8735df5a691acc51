"""A server's data-parallel ranks as upstreams."""

from __future__ import annotations

from meshd.controller.ranks import ranks_of
from meshd.routing.registry import Upstream


def test_each_rank_is_an_upstream_of_its_own_with_the_facts_of_its_server() -> None:
    server = Upstream(7, "server", "http://a:1", api_key="secret")
    ranks = ranks_of(server, (7, 9, 4))
    assert [(each.number, each.dp_rank, each.dp_size) for each in ranks] == [(7, 0, 3), (9, 1, 3), (4, 2, 3)]
    assert {(each.base_url, each.api_key, each.origin_id) for each in ranks} == {
        ("http://a:1", "secret", "server")
    }
    assert len({each.id for each in ranks} | {"server"}) == 4
    assert len({each.url for each in ranks}) == 3
