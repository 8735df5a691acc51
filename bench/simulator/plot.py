"""The plot of a simulation: for each trace, cache hits against the time to the first token."""

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
    from matplotlib import pyplot

    traces = list(dict.fromkeys(outcome.trace for outcome in outcomes))
    figure, axes = pyplot.subplots(1, len(traces), figsize=(5.2 * len(traces), 4.6), squeeze=False)
    for axis, trace in zip(axes[0], traces, strict=True):
        for outcome in (each for each in outcomes if each.trace == trace):
            (point,) = axis.plot(outcome.hit_rate * 100, outcome.ttft_p99_s * 1000, "o", label=outcome.router)
            axis.annotate(
                outcome.router,
                (outcome.hit_rate * 100, outcome.ttft_p99_s * 1000),
                fontsize=7,
                color=point.get_color(),
                xytext=(4, 3),
                textcoords="offset points",
            )
        axis.set_title(trace)
        axis.set_xlabel("prompt tokens found in a cache, %")
        axis.set_ylabel("time to first token, p99, ms")
        axis.set_yscale("log")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return path
