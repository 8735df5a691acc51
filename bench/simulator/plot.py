"""The plot of a simulation: for each trace and router, the time to the first token and the cache hits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench import BenchError
from bench.simulator.run import Outcome


def plot(outcomes: Sequence[Outcome], path: Path) -> Path:
    """Write an SVG (or whatever the suffix says) and return its path."""
    try:
        import matplotlib
    except ImportError as error:
        raise BenchError("--plot needs matplotlib: pip install 'meshd[bench]'") from error
    matplotlib.use("agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: a third of the size
    from matplotlib import pyplot

    traces = list(dict.fromkeys(outcome.trace for outcome in outcomes))
    routers = list(dict.fromkeys(outcome.router for outcome in outcomes))
    places = {router: len(routers) - number for number, router in enumerate(routers)}
    size = (3.2 * len(traces) + 1.2, 0.3 * len(routers) + 1.2)
    figure, axes = pyplot.subplots(1, len(traces), figsize=size, squeeze=False, sharey=True)
    for axis, trace in zip(axes[0], traces, strict=True):
        for outcome in (each for each in outcomes if each.trace == trace):
            place = places[outcome.router]
            axis.plot(
                (outcome.ttft_mean_s, outcome.ttft_p99_s), (place, place), "-", color="0.75", linewidth=1.5
            )
            axis.plot(outcome.ttft_mean_s, place, "o", color="tab:blue", label="mean")
            axis.plot(outcome.ttft_p99_s, place, "|", color="tab:red", markersize=9, label="p99")
            axis.annotate(
                f"{outcome.hit_rate:.0%}",
                (1, place),
                xycoords=("axes fraction", "data"),
                xytext=(3, -3),
                textcoords="offset points",
                fontsize=7,
            )
        axis.set_title(f"{trace}; right: cache hits", fontsize=9)
        axis.set_xlabel("time to the first token, s")
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.set_yticks(list(places.values()), list(places))
        axis.grid(alpha=0.3, axis="x")
    handles = axes[0][0].get_lines()[1:3]
    axes[0][0].legend(handles, ("mean", "p99"), fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path
