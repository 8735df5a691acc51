from __future__ import annotations

from random import Random

from meshd.config.settings import Settings
from meshd.routing.policies.table import policy_table


def test_every_policy_answers_to_its_own_name_with_a_fresh_object() -> None:
    table = policy_table(Random(1), first_turn=0, prefix_hash_load_factor=1.25)
    for name, make in table.items():
        assert make().name == name
        assert make() is not make()


def test_every_policy_of_the_settings_exists() -> None:
    table = policy_table(Random(1), first_turn=0, prefix_hash_load_factor=1.25)
    assert set(table) == set(Settings.__dataclass_fields__["policy"].metadata["choices"])
