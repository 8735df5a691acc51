"""The routing simulator: it tells good routing from bad, and the same seed plays the same game."""

from __future__ import annotations

import json
from random import Random

import pytest

from bench.routing_sim import main, markdown
from bench.simulator.routers import CONTENDERS, Contender
from bench.simulator.run import Outcome, simulate
from bench.simulator.servers import Server, ServerModel
from bench.simulator.traces import BLOCK_TOKENS, TRACES, Prompt


def _contender(name: str) -> Contender:
    return next(each for each in CONTENDERS if each.name == name)


def _play(name: str, trace: str = "chats", seconds: float = 40.0, seed: int = 1) -> Outcome:
    sessions = TRACES[trace](Random(seed), 3.0, seconds)
    return simulate(trace, sessions, _contender(name), servers=4, processes=3, model=ServerModel(), seed=seed)


def test_prompts_that_open_alike_share_their_opening_blocks() -> None:
    one = Prompt().grown("system", 320).grown("a", 64)
    other = Prompt().grown("system", 320).grown("b", 64)
    assert one.blocks[:10] == other.blocks[:10]
    assert not set(one.blocks[10:]) & set(other.blocks[10:])


def test_routing_keys_are_fine_at_first_and_coarse_later() -> None:
    assert len(Prompt().grown("x", 64 * BLOCK_TOKENS).routing_keys()) == 8 * 64
    assert len(Prompt().grown("x", 80 * BLOCK_TOKENS).routing_keys()) == 8 * 66
    assert len(Prompt().grown("x", 81 * BLOCK_TOKENS).routing_keys()) == 8 * 67


def test_a_server_computes_what_its_cache_lacks_and_forgets_what_it_cannot_keep() -> None:
    server = Server(ServerModel(cache_tokens=10 * BLOCK_TOKENS, prefill_tokens_per_s=1000, prefill_fixed_s=0))
    prompt = Prompt().grown("x", 10 * BLOCK_TOKENS)
    assert server.accept(prompt, 0.0) == pytest.approx(0.32)
    assert server.accept(prompt, 1.0) == pytest.approx(1.032)  # the last block is computed always
    server.accept(Prompt().grown("y", 10 * BLOCK_TOKENS), 2.0)
    assert server.accept(prompt, 3.0) == pytest.approx(3.32)


def test_a_queue_makes_the_next_request_wait() -> None:
    server = Server(ServerModel(prefill_tokens_per_s=1000, prefill_fixed_s=0))
    server.accept(Prompt().grown("x", 1024), 0.0)
    assert server.accept(Prompt().grown("y", 1024), 0.5) == pytest.approx(2.048)


@pytest.mark.parametrize("trace", list(TRACES))
def test_cache_aware_finds_more_in_caches_than_chance(trace: str) -> None:
    assert _play("cache_aware", trace).hit_rate >= _play("random", trace).hit_rate


def test_conversations_stay_with_their_server_whatever_process_they_meet() -> None:
    assert _play("cache_aware").affinity >= 0.99
    assert _play("tree per process").affinity < 0.9


def test_one_seed_plays_one_game() -> None:
    assert _play("cache_aware") == _play("cache_aware")


def test_every_contender_plays_every_turn() -> None:
    played = {_play(each.name, seconds=10.0).requests for each in CONTENDERS}
    assert len(played) == 1


def test_the_table_has_the_quickest_first() -> None:
    outcomes = [_play(name, seconds=20.0) for name in ("random", "cache_aware")]
    lines = markdown(outcomes, "chats").splitlines()
    assert lines[4].startswith("| cache_aware |")


def test_the_command_writes_raw_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traces", "chats", "--routers", "random", "--seconds", "5", "--servers", "2"]) == 0
    path = capsys.readouterr().out.split("raw figures: ")[1].split()[0]
    with open(path) as file:
        assert json.load(file)["outcomes"][0]["router"] == "random"
