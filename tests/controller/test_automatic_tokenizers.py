"""Labels of upstreams bring tokenizers."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshd.config import Settings
from meshd.controller.automatic_tokenizers import KEPT_S, AutomaticTokenizers
from meshd.controller.tokenizers import TokenizerKeeper, Wanted
from meshd.log import Log
from meshd.prepare.tokenizer_board import TokenizerBoard
from meshd.routing.upstream import Upstream


def upstream(number: int, model: str, state: str = "active", **labels: str) -> Upstream:
    return Upstream(
        number,
        str(number),
        f"http://h{number}:1",
        models=(model,),
        labels=labels,
        state=state,  # type: ignore[arg-type]
    )


@dataclass
class Node:
    paths: set[str] = field(default_factory=lambda: {"/t", "/m", "/n"})
    now_s: float = 0.0
    looked_at: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        log = Log("test", "error", stream_fd=-1)
        self.keeper = TokenizerKeeper(TokenizerBoard(TokenizerBoard.create(2)), lambda: None, log)
        self.keeper.start(Settings())
        self.automatic = AutomaticTokenizers(self.keeper, log, lambda: self.now_s, self.exists)

    def exists(self, path: str) -> bool:
        self.looked_at.append(path)
        return path in self.paths

    def follow(self, *upstreams: Upstream) -> dict[str, str]:
        self.automatic.follow(upstreams)
        return {entry.name: entry.asked_for for entry in self.keeper.entries}


def test_each_model_gets_the_tokenizer_path_else_the_model_path_of_its_first_upstream() -> None:
    both = upstream(0, "m1", tokenizer_path="/t", model_path="/m")
    assert Node().follow(
        both, upstream(1, "m2", model_path="/m"), upstream(2, "m1", tokenizer_path="/n")
    ) == {
        "m1": "/t",
        "m2": "/m",
    }


def test_the_first_upstream_decides_even_without_a_path() -> None:
    assert Node().follow(upstream(0, "m1"), upstream(1, "m1", tokenizer_path="/t")) == {}


def test_upstreams_that_have_not_told_their_model_bring_nothing() -> None:
    pending = upstream(0, "m1", "starting", tokenizer_path="/t")
    assert Node().follow(pending, upstream(1, "unknown", tokenizer_path="/t")) == {}


def test_a_path_that_is_not_here_is_passed_over_and_looked_at_once_for_each_change_of_the_set() -> None:
    node = Node()
    elsewhere = upstream(0, "m1", tokenizer_path="/far")
    for _ in range(5):
        assert node.follow(elsewhere) == {}
    assert node.looked_at == ["/far"]


def test_a_label_that_changed_replaces_its_entry_and_leaves_one_that_somebody_registered() -> None:
    node = Node()
    node.follow(upstream(0, "m1", tokenizer_path="/t"))
    node.keeper.add(Wanted("m2", "/own"))
    changed = upstream(0, "m1", tokenizer_path="/n"), upstream(1, "m2", tokenizer_path="/t")
    assert node.follow(*changed) == {"m1": "/n", "m2": "/own"}
    assert node.follow(upstream(0, "m1", tokenizer_path="/far")) == {"m1": "/n", "m2": "/own"}


def test_an_automatic_entry_that_somebody_deleted_does_not_come_back_by_itself() -> None:
    node = Node()
    node.follow(upstream(0, "m1", tokenizer_path="/t"))
    node.keeper.remove(node.keeper.entries[0])
    assert node.follow(upstream(0, "m1", tokenizer_path="/t"), upstream(1, "m1")) == {}
    assert node.follow(upstream(0, "m1", tokenizer_path="/n")) == {"m1": "/n"}


def test_an_entry_outlives_its_last_upstream_by_some_minutes() -> None:
    node = Node()
    node.follow(upstream(0, "m1", tokenizer_path="/t"))
    assert node.follow() == {"m1": "/t"}
    node.now_s += KEPT_S - 1
    assert node.follow(upstream(1, "m1", tokenizer_path="/t")) == {"m1": "/t"}
    node.now_s += 2
    assert node.follow(upstream(1, "m1", tokenizer_path="/t")) == {"m1": "/t"}
    assert node.follow() == {"m1": "/t"}
    node.now_s += KEPT_S
    assert node.follow() == {}
    assert node.follow(upstream(1, "m1", tokenizer_path="/t")) == {"m1": "/t"}
