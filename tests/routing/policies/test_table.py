from __future__ import annotations

from random import Random

import pytest

from meshd.config.settings import Settings
from meshd.memory import Segment
from meshd.routing import prefix_index, sessions
from meshd.routing.policies.table import NAMES, PolicyParts, PolicyTable, labelled_policy, policy_table
from meshd.routing.prefix_index import MIN_BYTES, PrefixIndex
from meshd.routing.sessions import SessionTable


@pytest.fixture
def table() -> PolicyTable:
    index = Segment.create(prefix_index.SEGMENT_KIND, prefix_index.segment_bytes(MIN_BYTES, 1))
    table = Segment.create(sessions.SEGMENT_KIND, sessions.segment_bytes())
    return policy_table(
        PolicyParts(
            Random(1), 0, PrefixIndex(index, 0, 1, MIN_BYTES), SessionTable(table), 1.25, 0.3, 64, 1.5
        )
    )


def test_every_policy_answers_to_its_own_name_with_a_fresh_object(table: PolicyTable) -> None:
    for name, make in table.items():
        assert make().name == name
        assert make() is not make()


@pytest.mark.parametrize("setting", ["policy", "prefill_policy", "decode_policy"])
def test_every_policy_of_the_settings_exists(table: PolicyTable, setting: str) -> None:
    assert set(table) == NAMES == set(Settings.__dataclass_fields__[setting].metadata["choices"])


def test_a_label_names_a_policy_by_each_of_its_names_or_what_is_none() -> None:
    asked = [{}, {"policy": ""}, {"policy": " random "}, {"policy": "consistent_hashing"}, {"policy": "best"}]
    assert [labelled_policy(labels) for labels in asked] == ["", "", "random", "consistent_hash", "best"]


@pytest.mark.parametrize(
    "alias", [alias for alias, _ in Settings.__dataclass_fields__["policy"].metadata["choice_aliases"]]
)
def test_every_alias_of_the_settings_is_one_of_labels_too(alias: str) -> None:
    assert labelled_policy({"policy": alias}) in NAMES
