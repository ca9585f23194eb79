"""What the runs amount to: medians, spreads, ratios, and whether the targets are met; as tables.

The figure of a trial is the median over its rounds, its spread the least and the greatest. A ratio
is that of the medians; its spread is that of the ratios within each round, in which the two ran one
after the other. Of several peers the best counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from stillframe.bench.results import Results, Run
from stillframe.bench.trials import (
    CHECKPOINT,
    LOWER_IS_BETTER,
    P99,
    RATE,
    RECOVERY,
    UNITS,
    Benchmark,
    Target,
)


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and what it is the median of."""

    median: float
    least: float
    greatest: float
    rounds: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target, and what came of it."""

    target: Target
    value: Spread | None
    """None: it cannot be told, because a trial that it needs has no result."""
    against: str = ""
    """The label of the best of the peers."""

    @property
    def is_met(self) -> bool | None:
        if self.value is None:
            return None
        if self.target.at_least is not None:
            return self.value.median >= self.target.at_least
        assert self.target.at_most is not None
        return self.value.median <= self.target.at_most

    @property
    def told(self) -> str:
        """`met`, or by how much it is missed."""
        if self.value is None or self.is_met is None:
            return "not measured"
        if self.is_met:
            return "met"
        if self.target.at_least is not None:
            return f"missed: {self.value.median / self.target.at_least:.0%} of it"
        assert self.target.at_most is not None
        return f"missed: {self.value.median / self.target.at_most:.3g} times that"


def spread_of(runs: Iterable[Run], metric: str) -> Spread | None:
    """Of the runs that have this figure; None if none has."""
    figures = [figure for run in runs if (figure := run.figure(metric)) is not None]
    return _spread(figures) if figures else None


def _spread(figures: Sequence[float]) -> Spread:
    return Spread(median(figures), min(figures), max(figures), len(figures))


def verdict(target: Target, benchmark: str, results: Results) -> Verdict:
    own = results.of(benchmark, target.of)
    value = spread_of(own, target.metric)
    if value is None or not target.against:
        return Verdict(target, value)
    best = _best(target, benchmark, results)
    if best is None:
        return Verdict(target, None)
    theirs = results.of(benchmark, best)
    base = spread_of(theirs, target.metric)
    if base is None or base.median == 0:
        return Verdict(target, None)
    ratios = _ratios(own, theirs, target.metric) or [value.median / base.median]
    ratio = Spread(value.median / base.median, min(ratios), max(ratios), len(ratios))
    return Verdict(target, ratio, best)


def _best(target: Target, benchmark: str, results: Results) -> str | None:
    """The label of the fastest of those it is compared with."""
    found = [
        (spread.median, label)
        for label in target.against
        if (spread := spread_of(results.of(benchmark, label), target.metric)) is not None
    ]
    if not found:
        return None
    return min(found)[1] if target.metric in LOWER_IS_BETTER else max(found)[1]


def _ratios(own: Iterable[Run], theirs: Iterable[Run], metric: str) -> list[float]:
    """Within each round that both have a figure of."""
    by_round = {run.round: run.figure(metric) for run in theirs}
    found = []
    for run in own:
        figure, base = run.figure(metric), by_round.get(run.round)
        if figure is not None and base:
            found.append(figure / base)
    return found


# --- As text -----------------------------------------------------------------------------------


def told(metric: str, value: float) -> str:
    """A figure as people say it: `17.2 M`, `310 k`, `4.2`."""
    if metric != RATE:
        return f"{value:.3g}" if value < 100 else f"{value:,.0f}"
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def told_run(run: Run, metric: str) -> str:
    """One line about one run."""
    head = f"{run.benchmark:16} round {run.round}  {run.label:38}"
    figure = run.figure(metric)
    if run.status != "measured" or figure is None:
        return f"{head} {run.status}: {run.reason or 'no figure in its result'}"
    more = f"{told(metric, figure):>9} {UNITS[metric]}{_besides(run, metric)}"
    return f"{head} {more}  ({run.wall_seconds:.0f} s in all)"


def _besides(run: Run, metric: str) -> str:
    shown = {
        P99: (("latency_ms.p50", "p50"), ("latency_ms.p999", "p99.9")),
        RATE: ((CHECKPOINT, "checkpoint ms"),),
        CHECKPOINT: (("checkpoints.max_ms", "max"),),
        RECOVERY: (),
    }[metric]
    parts = [
        f"{name} {told(path, figure)}"
        for path, name in shown
        if (figure := run.figure(path)) is not None
    ]
    return f", {', '.join(parts)}" if parts else ""


def markdown(results: Results, benchmarks: Sequence[Benchmark], plots: Sequence[str] = ()) -> str:
    """The whole report."""
    lines = ["# Benchmarks", "", *_surroundings(results), ""]
    lines += ["## Targets", "", *target_table(results, benchmarks), ""]
    for benchmark in benchmarks:
        lines += [f"## {benchmark.name}: {benchmark.title}", "", *_table(results, benchmark), ""]
        lines += [
            line
            for plot in plots
            if plot == f"{benchmark.name}.png"
            for line in (f"![{benchmark.title}]({plot})", "")
        ]
        lines += _without_result(results, benchmark)
    return "\n".join(lines).rstrip() + "\n"


def _surroundings(results: Results) -> list[str]:
    machine = results.machine
    versions = ", ".join(f"{name} {number}" for name, number in results.versions.items())
    commands = ", ".join(f"`{command}`" for command in results.commands)
    lines = [
        f"{commands}, {results.date}: {machine.cores} cores ({machine.processor}),"
        f" {machine.memory_bytes / 1e9:.0f} GB of memory, {machine.kernel}, Python"
        f" {machine.python}. {versions}.",
    ]
    lines += [f"\n{peer} is left out: {why}" for peer, why in results.left_out.items()]
    if warning := noise(results):
        lines += ["", f"**{warning}**"]
    return lines


def noise(results: Results) -> str:
    """A warning, where something else ran on the machine."""
    bound = results.machine.noisy_load
    noisy = [run for run in results.runs if run.load_before > bound]
    if not noisy:
        return ""
    worst = max(run.load_before for run in noisy)
    return (
        f"Before {len(noisy)} of {len(results.runs)} runs something else kept more than {bound:g}"
        f" cores busy (up to {worst:.1f}): the figures are noisy."
    )


def target_table(results: Results, benchmarks: Sequence[Benchmark]) -> list[str]:
    rows = [
        (benchmark.name, verdict(target, benchmark.name, results))
        for benchmark in benchmarks
        for target in benchmark.targets
    ]
    if not rows:
        return ["None of these benchmarks has one."]
    head = ["| workload | what | measured | spread | target | |", "|---|---|---|---|---|---|"]
    return head + [_target_row(name, found) for name, found in rows]


def _target_row(name: str, found: Verdict) -> str:
    unit = " ×" if found.target.against else f" {UNITS[found.target.metric].split()[0]}"
    value = spread = "–"
    if found.value is not None:
        value = f"**{found.value.median:.3g}{unit}**"
        spread = f"{found.value.least:.3g}–{found.value.greatest:.3g}"
    what = found.target.text
    if len(found.target.against) > 1 and found.against:
        what += f" ({found.against})"
    return f"| {name} | {what} | {value} | {spread} | {found.target.bound} | {found.told} |"


def _table(results: Results, benchmark: Benchmark) -> list[str]:
    metric = benchmark.metric
    columns = _columns(benchmark)
    head = ["engine", UNITS[metric], "spread", "ours to it", *(name for name, _ in columns)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for trial in benchmark.trials:
        runs = results.of(benchmark.name, trial.label)
        value = spread_of(runs, metric)
        if value is None:
            continue
        cells = [
            trial.label,
            told(metric, value.median),
            f"{told(metric, value.least)} – {told(metric, value.greatest)} ({value.rounds})",
            _to_ours(results, benchmark, value.median),
        ]
        cells += [_cell(runs, path) for _, path in columns]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(runs: Sequence[Run], metric: str) -> str:
    value = spread_of(runs, metric)
    return "–" if value is None else told(metric, value.median)


def _to_ours(results: Results, benchmark: Benchmark, theirs: float) -> str:
    """The ratio of our figure, where there is only one, to this one."""
    labels = [trial.label for trial in benchmark.trials if trial.engine == "stillframe"]
    if len(labels) != 1 or theirs == 0:
        return ""
    ours = spread_of(results.of(benchmark.name, labels[0]), benchmark.metric)
    return f"{ours.median / theirs:.3g} ×" if ours is not None else ""


def _columns(benchmark: Benchmark) -> list[tuple[str, str]]:
    """Besides the figure that is compared."""
    start = ("start-up, s", "startup_s")
    if benchmark.metric == P99:
        return [("p50", "latency_ms.p50"), ("p99.9", "latency_ms.p999"), ("max", "latency_ms.max")]
    if benchmark.metric == CHECKPOINT:
        names = ("sync", "async", "alignment")
        parts = [(f"{name}, ms", f"parts_ms.{name}") for name in names]
        return [("max, ms", "checkpoints.max_ms"), *parts, ("bytes", "checkpoints.bytes_p50")]
    if benchmark.metric == RECOVERY:
        return [("state, bytes", "state_bytes")]
    return [("checkpoint p50, ms", CHECKPOINT), ("p99, ms", "checkpoints.p99_ms"), start]


def _without_result(results: Results, benchmark: Benchmark) -> list[str]:
    said: dict[str, None] = {}
    for run in results.of(benchmark.name):
        if run.status != "measured":
            said[f"- {run.label}, round {run.round}: {run.status}: {run.reason}"] = None
    return [*said, ""] if said else []
