from __future__ import annotations

import json
from dataclasses import replace

from meshd.config import SETTINGS, Kind, Settings, WorkerSpec
from meshd.config.values import from_file


def test_settings_survive_the_way_to_a_child_as_json() -> None:
    spec = WorkerSpec(url="http://a", api_key="k", labels={"mesh.apis": "/x"}, cost=2.0)
    settings = replace(
        Settings(), workers=(spec,), worker_urls=("http://b",), api_key="s", port=0, selector=(("a", "b"),)
    )
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    assert Settings.from_dict(settings.to_dict()) == settings


def test_secrets_are_not_shown_by_repr() -> None:
    settings = replace(Settings(), api_key="s3cret", workers=(WorkerSpec(url="http://a", api_key="s3cret"),))
    assert "s3cret" not in repr(settings)


def test_every_default_passes_its_own_check() -> None:
    for each in SETTINGS:
        default = list(each.default) if isinstance(each.default, tuple) else each.default
        default = dict(default) if each.kind is Kind.PAIRS else default
        assert from_file(each, default) == each.default, each.name


def test_names_and_aliases_are_unique() -> None:
    names = [each.name.replace("_", "-") for each in SETTINGS]
    names += [alias for each in SETTINGS for alias in each.aliases]
    assert len(names) == len(set(names))
