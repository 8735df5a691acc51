"""The plots of the report, as SVG and PNG: heat maps of throughput ratios, and latency against throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from bench import BenchError
from bench.cell import Cell
from bench.front_ends import FRONT_ENDS
from bench.rounds import DIRECT
from bench.workload import shown_size

KINDS: Final = ("proxy", "tokenize", "whole")
OURS: Final = ("meshd", "meshd-compiled")
Ratios = dict[tuple[int, int], float]
RATIO_TICKS: Final = (0.25, 0.5, 1.0, 2.0, 4.0)
FRONTIER: Final = "Pareto frontier"
SUFFIXES: Final = ("svg", "png")


def rate_ratios(cells: Sequence[Cell], ours: str, rival: str) -> Ratios:
    """(body bytes, clients) → our rate ÷ the rival's, where both had a valid round."""
    rates: dict[str, dict[tuple[int, int], float]] = {ours: {}, rival: {}}
    for cell in cells:
        if cell.row.front_end in rates and cell.row.rounds > cell.row.invalid and cell.row.per_s > 0:
            work = cell.point.workload
            rates[cell.row.front_end][work.body_bytes, work.clients] = cell.row.per_s
    return {key: rates[ours][key] / rate for key, rate in rates[rival].items() if key in rates[ours]}


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those (rate, latency) pairs that no other beats in both, by rate."""
    return [
        one
        for one in sorted(points)
        if not any(other != one and other[0] >= one[0] and other[1] <= one[1] for other in points)
    ]


def heat_maps(cells: Sequence[Cell], directory: Path) -> list[Path]:
    """One figure a kind: how many times the rate of each rival, by size and clients."""
    found = []
    for kind in KINDS:
        mine = [cell for cell in cells if cell.point.kind == kind]
        ratios = {
            (ours, rival): values
            for ours in OURS
            for rival in _rivals(mine)
            if (values := rate_ratios(mine, ours, rival))
        }
        if ratios:
            found += _heat_map(kind, ratios, directory)
    return found


def pareto(cells: Sequence[Cell], directory: Path) -> list[Path]:
    """One figure a kind, one panel a size: p99 against rate, a line a front end with its clients along it."""
    found = []
    for kind in KINDS:
        mine = [cell for cell in cells if cell.point.kind == kind and cell.row.rounds > cell.row.invalid]
        if any(cell.row.front_end != DIRECT for cell in mine):
            found += _pareto(kind, mine, directory)
    return found


def _heat_map(kind: str, ratios: Mapping[tuple[str, str], Ratios], directory: Path) -> list[Path]:
    """A row of panels for each of ours, a column for each rival."""
    pyplot, colours = _pyplot()
    keys = {key for values in ratios.values() for key in values}
    sizes, clients = sorted({size for size, _ in keys}), sorted({count for _, count in keys})
    rows, columns = (list(dict.fromkeys(pair[at] for pair in ratios)) for at in (0, 1))
    figure, axes = pyplot.subplots(
        len(rows),
        len(columns),
        figsize=(2.2 + 2.6 * len(columns), 0.8 + 2.6 * len(rows)),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for (ours, rival), values in ratios.items():
        axis = axes[rows.index(ours)][columns.index(rival)]
        grid = [[values.get((size, count), float("nan")) for count in clients] for size in sizes]
        image = axis.imshow(grid, cmap="RdYlGn", norm=colours.LogNorm(0.25, 4.0), aspect="auto")
        for (row, size), (column, count) in product(enumerate(sizes), enumerate(clients)):
            text = f"{values[size, count]:.2g}" if (size, count) in values else "n/m"
            colour = _text_colour(values.get((size, count)))
            axis.text(column, row, text, ha="center", va="center", fontsize=8, color=colour)
        axis.set_title(f"{ours} ÷ {rival}", fontsize=9)
        axis.set_xticks(range(len(clients)), [str(count) for count in clients])
        axis.set_yticks(range(len(sizes)), [shown_size(size) for size in sizes])
    figure.supxlabel("clients (n/m: not measured, or no valid round)", fontsize=9)
    bar = figure.colorbar(
        image, ax=axes.ravel().tolist(), extend="both", label="times the rate (green: meshd is faster)"
    )
    bar.ax.set_yticks(list(RATIO_TICKS), [f"{tick:g}" for tick in RATIO_TICKS])
    bar.ax.minorticks_off()
    return _save(pyplot, figure, directory, f"heatmap-{kind}")


def _text_colour(ratio: float | None) -> str:
    """What can be read on the cell's own colour."""
    if ratio is None:
        return "gray"
    return "white" if ratio < 0.4 or ratio > 3.0 else "black"


def _pareto(kind: str, cells: Sequence[Cell], directory: Path) -> list[Path]:
    """A panel a size. A number at a point is that of its clients; colours are the same in all figures."""
    pyplot, _ = _pyplot()
    from matplotlib import ticker

    sizes = sorted({cell.point.workload.body_bytes for cell in cells})
    columns = min(3, len(sizes))
    rows = -(-len(sizes) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(4.6 * columns, 3.6 * rows + 0.5), squeeze=False, layout="constrained"
    )
    lines: dict[str, Any] = {}
    for axis, size in zip(axes.flat, sizes, strict=False):
        here = [cell for cell in cells if cell.point.workload.body_bytes == size]
        lines.update(_pareto_panel(axis, here))
        axis.set(title=shown_size(size), xlabel="requests/s", ylabel="p99, ms", xscale="log", yscale="log")
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
            one.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,g}"))
            one.set_minor_formatter(ticker.NullFormatter())
        axis.margins(0.12)
        axis.grid(alpha=0.3)
    for axis in list(axes.flat)[len(sizes) :]:
        axis.set_visible(False)
    order = [name for name in (*FRONT_ENDS, FRONTIER) if name in lines]
    figure.legend(
        [lines[name] for name in order],
        order,
        loc="outside lower center",
        ncols=min(5, len(order)),
        fontsize=8,
    )
    return _save(pyplot, figure, directory, f"pareto-{kind}")


def _pareto_panel(axis: Any, cells: Sequence[Cell]) -> dict[str, Any]:
    """Draw one panel; the line of each front end, and of the frontier, by name."""
    lines: dict[str, Any] = {}
    reached = []
    for number, name in enumerate(FRONT_ENDS):
        mine = sorted(
            (cell for cell in cells if cell.row.front_end == name),
            key=lambda cell: cell.point.workload.clients,
        )
        points = [(cell.row.per_s, cell.row.p99_us / 1000) for cell in mine]
        reached += points
        if points:
            rates, delays = zip(*points, strict=True)
            (lines[name],) = axis.plot(rates, delays, marker="o", markersize=4, color=f"C{number}")
        for cell, point in zip(mine, points, strict=True):
            text = str(cell.point.workload.clients)
            axis.annotate(text, point, xytext=(3, 3), textcoords="offset points", fontsize=6, color="dimgray")
    best = frontier(reached)
    if best:
        (lines[FRONTIER],) = axis.plot(*zip(*best, strict=True), "--", color="black", linewidth=0.8)
    return lines


def _rivals(cells: Sequence[Cell]) -> list[str]:
    return [
        name for name in dict.fromkeys(cell.row.front_end for cell in cells) if name not in (*OURS, DIRECT)
    ]


def _save(pyplot: Any, figure: Any, directory: Path, name: str) -> list[Path]:
    paths = [directory / f"{name}.{suffix}" for suffix in SUFFIXES]
    for path in paths:
        # a fixed date, so that the same figures give the same file
        figure.savefig(
            path, dpi=110, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None
        )
    pyplot.close(figure)
    return paths


def _pyplot() -> tuple[Any, Any]:
    try:
        import matplotlib
    except ImportError as error:
        raise BenchError("plots need matplotlib: pip install 'meshd[bench]'") from error
    matplotlib.use("agg")
    from matplotlib import colors, pyplot

    return pyplot, colors
