"""``takes_effect`` and ``readers`` against the sources that read each setting."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import meshd
from meshd.config import SETTINGS

ROOT = Path(meshd.__file__).parent
# The paths of these are one process's alone; the rest of prepare/ runs in leaders and prepare workers.
CLIENT_FILES = {"client.py", "dispatch.py", "lane.py", "job.py"}
# Read at start by the supervisor, and recomputed for the children when the configuration is read again.
COMPLETED = {"worker_urls", "max_payload_size", "tokenizer_path", "model_path"}
BY_NAME = {each.name: each for each in SETTINGS}


def settings_read_in(files: Iterator[Path] | list[Path]) -> set[str]:
    text = "\n".join(path.read_text() for path in files)
    return {name for name in re.findall(r"settings\.(\w+)", text) if name in BY_NAME}


def sources_of(reader: str) -> list[Path]:
    prepare = list((ROOT / "prepare").rglob("*.py"))
    match reader:
        case "io":
            packages = [path for name in ("io", "admission") for path in (ROOT / name).rglob("*.py")]
            client = [path for path in prepare if path.name in CLIENT_FILES]
            return [*packages, *client, ROOT / "director.py"]
        case "controller":
            return list((ROOT / "controller").rglob("*.py"))
        case _:
            return [path for path in prepare if path.name not in CLIENT_FILES]


def test_every_kind_of_process_that_reads_a_setting_is_replaced_when_it_changes():
    for reader in ("io", "controller", "leader"):
        found = settings_read_in(sources_of(reader))
        assert found, reader
        missing = {
            name
            for name in found
            if BY_NAME[name].takes_effect == "processes" and reader not in BY_NAME[name].readers
        }
        assert missing == set(), reader
        assert not {name for name in found if BY_NAME[name].takes_effect == "live"}, reader


def test_what_decides_about_listeners_memory_and_topology_takes_a_restart():
    node = [ROOT / "supervisor" / name for name in ("node.py", "segments.py", "listeners.py")]
    found = settings_read_in(node) - COMPLETED
    assert {"port", "body_memory_bytes", "io_processes"} <= found
    assert {name for name in found if BY_NAME[name].takes_effect != "restart"} == set()
