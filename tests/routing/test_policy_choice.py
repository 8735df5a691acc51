from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from meshd.api.endpoints import EndpointRegistry
from meshd.api.view import NEEDS_SESSION, NEEDS_TEXT, NEEDS_TOKENS
from meshd.memory import Segment
from meshd.routing import prefix_index, sessions
from meshd.routing.policies.table import PolicyParts, policy_table
from meshd.routing.policy_choice import PolicyChoice
from meshd.routing.prefix_index import MIN_BYTES, PrefixIndex
from meshd.routing.registry import Registry
from meshd.routing.sessions import SessionTable
from meshd.routing.upstream import Upstream

MakeUpstream = Callable[..., Upstream]
CHAT = EndpointRegistry().find("POST", "/v1/chat/completions").endpoint
COUNT_TOKENS = EndpointRegistry().find("POST", "/v1/messages/count_tokens").endpoint


@pytest.fixture
def choice() -> PolicyChoice:
    index = Segment.create(prefix_index.SEGMENT_KIND, prefix_index.segment_bytes(MIN_BYTES, 1))
    table = SessionTable(Segment.create(sessions.SEGMENT_KIND, sessions.segment_bytes()))
    parts = PolicyParts(Random(1), 0, PrefixIndex(index, 0, 1, MIN_BYTES), table, 1.25, 0.3, 64, 1.5)
    return PolicyChoice(policy_table(parts), "cache_aware")


def test_first_upstream_with_a_label_decides_for_its_model(
    choice: PolicyChoice, make_upstream: MakeUpstream
) -> None:
    known = (
        make_upstream(0),
        make_upstream(1, labels={"policy": "no_such_policy"}),
        make_upstream(2, labels={"policy": "least_load"}),
        make_upstream(3, labels={"policy": "random"}),
    )
    assert choice.policy(CHAT, "m1", known).name == "least_load"
    assert choice.policy(CHAT, "m1", known[:2]).name == "cache_aware"
    assert choice.policy(CHAT, "", known).name == "cache_aware"


def test_a_label_may_name_a_policy_by_its_other_name(
    choice: PolicyChoice, make_upstream: MakeUpstream
) -> None:
    known = (make_upstream(0, labels={"policy": " consistent_hashing "}),)
    assert choice.policy(CHAT, "m1", known).name == "consistent_hash"
    choice.renew(Registry(1, known))
    assert choice.needs == NEEDS_TEXT | NEEDS_SESSION


def test_needs_are_those_of_the_default_and_of_every_label(
    choice: PolicyChoice, make_upstream: MakeUpstream
) -> None:
    choice.renew(Registry(1, [make_upstream(0)]))
    assert choice.needs == NEEDS_TEXT
    choice.renew(Registry(2, [make_upstream(0, labels={"policy": "prefix_hash"}), make_upstream(1)]))
    assert choice.needs == NEEDS_TEXT | NEEDS_TOKENS


def test_each_model_has_an_object_of_its_own_and_keeps_it(
    choice: PolicyChoice, make_upstream: MakeUpstream
) -> None:
    known = (make_upstream(0),)
    first = choice.policy(CHAT, "m1", known)
    choice.renew(Registry(2, known))
    assert choice.policy(CHAT, "m1", known) is first
    assert choice.policy(CHAT, "m2", known) is not first
    assert choice.policy(COUNT_TOKENS, "m1", known).name == "least_load"
