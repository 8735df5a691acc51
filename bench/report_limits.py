"""What the figures of a report cannot say, from the figures themselves."""

from __future__ import annotations

from collections.abc import Sequence

from bench.cell import Cell
from bench.environment import crowding_of, limits_of_machine
from bench.front_ends import FRONT_ENDS
from bench.report_summary import missing_of
from bench.rounds import DIRECT
from bench.state import Kept


def limits_of(kept: Kept, cells: Sequence[Cell]) -> list[str]:
    """Heading and list."""
    machine = kept.machine
    found = [
        "All requests are a closed loop: a client sends the next one when it has the answer. Latencies are "
        "those at that number of clients, not at a given rate.",
        *crowding_of([one.round for one in kept.entries if one.round]),
        *limits_of_machine(machine),
    ]
    if missing := missing_of(cells):
        found.append(missing)
    if not machine["apart"]["is_front_alone"] and any(cell.point.setup.is_apart for cell in cells):
        found.append(
            "In the setup with two cores the second one also carries backend and load generator: there were "
            "too few CPUs. Latencies there include waiting for that CPU; compare front ends, not values."
        )
    found += [*_of_front_ends(cells), *_of_bottlenecks(cells)]
    absent = {(one.front_end, one.why_absent.splitlines()[0]) for one in kept.entries if one.why_absent}
    found += [f"{name} could not be measured everywhere: {why}" for name, why in sorted(absent)]
    return ["## Limits", "\n".join(f"- {text}" for text in found)]


def _of_front_ends(cells: Sequence[Cell]) -> list[str]:
    names = {cell.row.front_end for cell in cells}
    found = []
    rewriting = [one.name for one in FRONT_ENDS.values() if one.rewrites_bodies and one.name in names]
    if rewriting:
        found.append(
            f"Bodies are written anew by {', '.join(rewriting)}, so the backend gets more bytes than were "
            "sent; "
            "that a body arrived whole is checked by a lower bound only."
        )
    tokenizing = [cell for cell in cells if cell.point.kind == "tokenize"]
    for name in sorted({cell.row.front_end for cell in tokenizing} - {DIRECT}):
        if not FRONT_ENDS[name].tokenizes:
            policy = FRONT_ENDS[name].policies["prefix_hash"]
            found.append(
                f"{name} does not tokenize as it was started here, without a tokenizer; it ran its policy "
                f"{policy} on the text."
            )
    floors = [one.name for one in FRONT_ENDS.values() if not one.policies and one.name in names]
    if floors:
        found.append(f"Bodies are not looked into by {', '.join(floors)}: floors, not rivals.")
    return found


def _of_bottlenecks(cells: Sequence[Cell]) -> list[str]:
    bound = [
        cell
        for cell in cells
        if cell.row.front_end != DIRECT
        and cell.row.bottleneck not in ("front end", "")
        and not cell.point.workload.streams
    ]
    if not bound:
        return []
    return [
        f"Cells in which the front end was not the bottleneck (◦ in the tables): {len(bound)}. Rates there "
        "are "
        "lower bounds of what it can do. CPU a request holds all the same."
    ]
