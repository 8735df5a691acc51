from __future__ import annotations

from random import Random

import pytest

from meshd.config.settings import Settings
from meshd.memory import Segment
from meshd.routing import prefix_index, sessions
from meshd.routing.policies.table import PolicyParts, PolicyTable, policy_table
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
    assert set(table) == set(Settings.__dataclass_fields__[setting].metadata["choices"])
