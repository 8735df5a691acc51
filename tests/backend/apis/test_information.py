from collections.abc import Callable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from meshd.backend.apis import information
from meshd.backend.reply import Reply

Plain = Callable[[Reply], Any]


def test_models_are_listed_in_order_with_their_root(plain: Plain) -> None:
    body = plain(information.models(("b", "a")))
    assert body["object"] == "list"
    assert [(m["id"], m["root"], m["object"]) for m in body["data"]] == [
        ("b", "b", "model"),
        ("a", "a", "model"),
    ]


def test_server_and_model_information_name_model_and_ranks(plain: Plain) -> None:
    info = plain(information.server_info(("m",), 4))
    assert (info["served_model_name"], info["model_path"], info["dp_size"]) == ("m", "m", 4)
    assert plain(information.model_info(("m",)))["model_path"] == "m"


def test_load_has_a_row_for_each_rank(plain: Plain) -> None:
    rows = plain(information.load(2, 3))
    assert [(row["dp_rank"], row["num_tokens"]) for row in rows] == [(0, 3), (1, 0)]


def test_metrics_parse() -> None:
    text = information.metrics(5, 2).body.decode()
    values = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
    assert values == {"meshd_backend:requests_total": 5, "meshd_backend:active_requests": 2}


def test_cache_flush_succeeds() -> None:
    assert information.flush_cache().status == 200
