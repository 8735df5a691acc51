"""What a reader of figures must know of the machine, as a table; one form for every report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.rounds import CROWDED_ABOVE, DIRECT, Round
from bench.text_table import text_table


def environment(machine: Mapping[str, Any], rounds: str, tokenizer: str) -> list[str]:
    """Heading and table. ``machine``: of `bench.machine.describe`; what an older one lacks is left out.

    ``rounds``: how rounds were taken. ``tokenizer``: its digest.
    """
    rows = [
        ("measured on", machine.get("date")),
        ("CPU", f"{machine['cpu']}, {machine['cpus_online']} online{_virtual(machine)}"),
        ("memory", f"{machine['memory_gib']} GiB" if "memory_gib" in machine else None),
        ("front end on CPUs", numbers(machine["cpus_front_end"])),
        ("backends on CPUs", numbers(machine["cpus_backend"])),
        ("load generator on CPUs", numbers(machine["cpus_load"])),
        ("kernel", machine["kernel"]),
        ("Python", machine["python"]),
        ("meshd at commit", machine.get("revision") or "unknown"),
        ("load average at the start", ", ".join(f"{one:.2f}" for one in machine["load_average"])),
        ("rounds", rounds),
        ("tokenizer, SHA-256", tokenizer),
        ("packages", versions(machine["packages"])),
        ("programs", "; ".join(machine["programs"].values())),
        ("other routers", versions(machine.get("peers", {})) or "none installed"),
    ]
    return ["## Environment", text_table(["what", ""], [[name, value] for name, value in rows if value])]


def limits_of_machine(machine: Mapping[str, Any]) -> list[str]:
    """What the figures cannot say because of the machine and what is installed on it."""
    found = ["Everything runs on one machine over loopback: no network card, no loss."]
    if machine.get("is_virtual"):
        found.append(
            "It is a virtual machine: its neighbours move absolute values from minute to minute. Ratios of "
            "one run are steadier."
        )
    if set(machine["cpus_backend"]) & set(machine["cpus_load"]):
        found.append("Backend and load generator share their CPUs, so each takes time from the other.")
    if differing := machine.get("not_as_pinned"):
        found.append(f"The baseline was not run with the pinned versions: {versions(differing)}.")
    found += [
        f"{name} was built from older sources than the commit named." for name in machine.get("stale", ())
    ]
    return found


def crowding_of(rounds: Sequence[Round]) -> list[str]:
    """That others were busy on the front end's core, if they were."""
    every = [one.strangers for one in rounds if one.front_end != DIRECT]
    crowded = [share for share in every if share > CROWDED_ABOVE]
    if not crowded:
        return []
    return [
        f"In {len(crowded)} of {len(every)} rounds others took more than {CROWDED_ABOVE:.0%} of the front "
        "end's "
        f"core, up to {max(crowded):.0%}: figures of a busy machine, not for publishing."
    ]


def numbers(cpus: Sequence[int]) -> str:
    return ", ".join(map(str, cpus))


def versions(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _virtual(machine: Mapping[str, Any]) -> str:
    return ", virtual machine" if machine.get("is_virtual") else ""
