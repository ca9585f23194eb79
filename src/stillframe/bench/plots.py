"""The results as pictures, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stillframe.bench.report import Spread, spread_of
from stillframe.bench.results import Results
from stillframe.bench.trials import UNITS, Benchmark

HOW_TO_GET_THEM = "no plots: matplotlib is not installed (pip install 'stillframe[bench]')"

_OURS, _THEIRS = "#1f6f8b", "#b0b7bd"
_PERCENTILES = (("p50", "#cfe3ea"), ("p99", "#1f6f8b"), ("p999", "#0b2f3c"))
_INCHES_WIDE = 9.0
_DOTS_PER_INCH = 120


class NoMatplotlib(Exception):
    """There will be no pictures."""


def draw(results: Results, benchmarks: Sequence[Benchmark], directory: Path) -> list[str]:
    """A PNG for each benchmark that has results, by its name; the names of the files."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib(HOW_TO_GET_THEM) from error
    made = []
    for benchmark in benchmarks:
        figure = Figure(dpi=_DOTS_PER_INCH, layout="constrained")
        axes = figure.subplots()
        drawn = {"bars": _bars, "percentiles": _percentiles, "lines": _lines}[benchmark.plot]
        rows = drawn(axes, results, benchmark)
        if not rows:
            continue
        figure.set_size_inches(_INCHES_WIDE, 4.5 if benchmark.plot == "lines" else 1.6 + 0.4 * rows)
        # Of the whole figure: beside long labels there is no room for it over the axes.
        figure.suptitle(benchmark.title, x=0.01, horizontalalignment="left")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(directory / f"{benchmark.name}.png")
        made.append(f"{benchmark.name}.png")
    return made


def _bars(axes: Any, results: Results, benchmark: Benchmark) -> int:
    """A bar for each engine, with the least and the greatest round."""
    found = _spreads(results, benchmark, benchmark.metric)
    labels = [label for label, _, _ in found]
    medians = [spread.median for _, _, spread in found]
    below = [spread.median - spread.least for _, _, spread in found]
    above = [spread.greatest - spread.median for _, _, spread in found]
    colors = [_OURS if engine == "stillframe" else _THEIRS for _, engine, _ in found]
    axes.barh(labels, medians, xerr=[below, above], color=colors, ecolor="#444444", capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel(UNITS[benchmark.metric])
    return len(found)


def _percentiles(axes: Any, results: Results, benchmark: Benchmark) -> int:
    """A dot for each percentile of each engine, on a scale of powers of ten."""
    labels = [label for label, _, _ in _spreads(results, benchmark, benchmark.metric)]
    for name, color in _PERCENTILES:
        by_label = {
            label: spread.median
            for label, _, spread in _spreads(results, benchmark, f"latency_ms.{name}")
        }
        points = [(by_label[label], label) for label in labels if label in by_label]
        shown = name.replace("p999", "p99.9")
        axes.scatter([x for x, _ in points], [y for _, y in points], c=color, label=shown, zorder=3)
    if labels:
        axes.set_xscale("log")
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
        axes.set_xlabel("ms")
        axes.legend()
    return len(labels)


def _lines(axes: Any, results: Results, benchmark: Benchmark) -> int:
    """A line through the trials that belong to one, with the least and the greatest round."""
    lines: dict[str, list[tuple[float, Spread]]] = {}
    for trial in benchmark.trials:
        spread = spread_of(results.of(benchmark.name, trial.label), benchmark.metric)
        if spread is not None:
            lines.setdefault(trial.line, []).append((trial.x, spread))
    for name, points in lines.items():
        points.sort(key=lambda point: point[0])
        xs = [x for x, _ in points]
        ys = [spread.median for _, spread in points]
        below = [spread.median - spread.least for _, spread in points]
        above = [spread.greatest - spread.median for _, spread in points]
        style = "-" if name.startswith("Stillframe") else "--"
        axes.errorbar(xs, ys, yerr=[below, above], label=name, marker="o", ls=style, capsize=3)
    if lines:
        axes.set_xscale("log")
        axes.set_xlabel(benchmark.x_label)
        axes.set_ylabel(UNITS[benchmark.metric])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    return len(lines)


def _spreads(results: Results, benchmark: Benchmark, metric: str) -> list[tuple[str, str, Spread]]:
    """Label, engine and figure of each trial that has one."""
    return [
        (trial.label, trial.engine, spread)
        for trial in benchmark.trials
        if (spread := spread_of(results.of(benchmark.name, trial.label), metric)) is not None
    ]
