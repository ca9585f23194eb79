"""Medians, spreads, ratios and verdicts are what they say, in the table and in the pictures."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stillframe.bench.plots import NoMatplotlib, draw
from stillframe.bench.report import Spread, markdown, noise, spread_of, told, told_run, verdict
from stillframe.bench.results import Machine, Results, Run, busy_cores, this_machine
from stillframe.bench.trials import (
    CHECKPOINT,
    P99,
    RATE,
    RECOVERY,
    Benchmark,
    Target,
    Trial,
)

MACHINE = Machine(2, 8_000_000_000, "a processor", "Linux 6.1", "3.11.7")


def run(label: str, round_number: int = 1, **result: Any) -> Run:
    """One that was measured."""
    return Run(
        benchmark="views",
        label=label,
        engine="stillframe" if label.startswith("Stillframe") else "flink",
        round=round_number,
        params={},
        began="2026-01-01T00:00:00+00:00",
        load_before=0.1,
        load_average=1.9,
        wall_seconds=9.0,
        status="measured",
        result=result,
    )


def rates(label: str, *figures: float) -> list[Run]:
    return [run(label, n, records_per_second=figure) for n, figure in enumerate(figures, 1)]


def p99s(label: str, *figures: float) -> list[Run]:
    return [run(label, n, latency_ms={"p99": figure}) for n, figure in enumerate(figures, 1)]


def results(*runs: Run) -> Results:
    return Results(["stillframe bench"], "2026-01-01", {"Stillframe": "0.1.0"}, MACHINE, list(runs))


def benchmark(*labels: str, **more: Any) -> Benchmark:
    trials = tuple(
        Trial(label, "stillframe" if label.startswith("Stillframe") else "flink", {}, 1.0)
        for label in labels
    )
    return Benchmark("views", "Page views", **{"metric": RATE, "trials": trials, **more})


FASTER = Target("vs Flink", RATE, "Stillframe", ("Flink",), at_least=5)


def test_a_figure_is_the_median_of_its_rounds_with_the_least_and_the_greatest():
    runs = rates("Stillframe", 9.0, 4.0, 5.0)

    assert spread_of(runs, RATE) == Spread(5.0, 4.0, 9.0, 3)


def test_runs_without_the_figure_do_not_count():
    failed = replace(run("Stillframe"), status="failed", reason="no")
    other = [run("Stillframe", records_per_second="fast"), run("Stillframe", latency_ms=None)]

    assert spread_of([failed, *rates("Stillframe", 3.0), *other], RATE) == Spread(3.0, 3.0, 3.0, 1)
    assert spread_of([failed], RATE) is None
    assert spread_of(other, P99) is None
    assert run("Stillframe", records_per_second=True).figure(RATE) is None


def test_a_ratio_is_that_of_the_medians_and_its_spread_that_within_the_rounds():
    # The machine was half as fast in the second round, which the ratio of that round does not see.
    found = results(*rates("Stillframe", 60.0, 30.0, 55.0), *rates("Flink", 10.0, 5.0, 11.0))

    ratio = verdict(FASTER, "views", found)

    assert ratio.value == Spread(5.5, 5.0, 6.0, 3)
    assert (ratio.is_met, ratio.told, ratio.against) == (True, "met", "Flink")


def test_a_missed_target_says_by_how_much():
    slower = verdict(FASTER, "views", results(*rates("Stillframe", 32.0), *rates("Flink", 10.0)))
    late = Target("p99", P99, "Stillframe", at_most=20)

    missed = verdict(late, "views", results(*p99s("Stillframe", 30.0)))

    assert (slower.is_met, slower.told) == (False, "missed: 64% of it")
    assert (missed.is_met, missed.told) == (False, "missed: 1.5 times that")


def test_a_bound_itself_is_enough():
    at_most = Target("p99", P99, "Stillframe", ("Flink",), at_most=2)

    assert verdict(
        FASTER, "views", results(*rates("Stillframe", 50.0), *rates("Flink", 10.0))
    ).is_met
    assert verdict(at_most, "views", results(*p99s("Stillframe", 8.0), *p99s("Flink", 4.0))).is_met


def test_of_several_peers_the_best_counts():
    both = ("Slow", "Fast")
    faster = Target("vs the better", RATE, "Stillframe", both, at_least=2)
    sooner = Target("vs the better", P99, "Stillframe", both, at_most=2)
    of_rates = results(*rates("Stillframe", 8.0), *rates("Slow", 1.0), *rates("Fast", 4.0))
    of_latencies = results(*p99s("Stillframe", 8.0), *p99s("Slow", 9.0), *p99s("Fast", 4.0))

    assert verdict(faster, "views", of_rates).against == "Fast"
    assert verdict(sooner, "views", of_latencies).against == "Fast"


@pytest.mark.parametrize(
    "runs",
    [
        rates("Stillframe", 50.0),
        rates("Flink", 10.0),
        [*rates("Stillframe", 50.0), *rates("Flink", 0.0)],
        [],
    ],
)
def test_what_was_not_measured_is_neither_met_nor_missed(runs):
    unknown = verdict(FASTER, "views", results(*runs))

    assert (unknown.value, unknown.is_met, unknown.told) == (None, None, "not measured")


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        (RATE, 17_234_567.0, "17.2 M"),
        (RATE, 310_000.0, "310 k"),
        (RATE, 950.0, "950"),
        (P99, 4.237, "4.24"),
        (P99, 1234.5, "1,234"),
        (RECOVERY, 0.5, "0.5"),
    ],
)
def test_figures_are_told_as_people_say_them(metric, value, text):
    assert told(metric, value) == text


def test_a_run_is_one_line_with_what_matters():
    fast = run("Stillframe", records_per_second=2e6, checkpoints={"p50_ms": 12.0})
    late = run("Stillframe", latency_ms={"p50": 1.0, "p99": 4.0, "p999": 9.0})

    assert "2 M records/s, checkpoint ms 12  (9 s in all)" in told_run(fast, RATE)
    assert "4 ms (p99), p50 1, p99.9 9" in told_run(late, P99)
    assert "measured: no figure in its result" in told_run(late, RATE)


def test_the_report_has_the_machine_the_targets_every_engine_and_what_went_wrong():
    failed = replace(run("Flink", 2), status="failed", reason="exit code 1: no memory")
    found = results(*rates("Stillframe", 60.0, 50.0), *rates("Flink", 10.0), failed)
    found.left_out["spark"] = "no network"

    text = markdown(found, [benchmark("Stillframe", "Flink", targets=(FASTER,))], ["views.png"])

    assert "2 cores (a processor), 8 GB of memory, Linux 6.1, Python 3.11.7" in text
    assert "spark is left out: no network" in text
    assert "| views | vs Flink | **5.5 ×** | 6–6 | ≥ 5 × | met |" in text
    assert "| Stillframe | 55 | 50 – 60 (2) | 1 × | – | – | – |" in text
    assert "| Flink | 10 | 10 – 10 (1) | 5.5 × |" in text
    assert "- Flink, round 2: failed: exit code 1: no memory" in text
    assert "![Page views](views.png)" in text


def test_a_machine_that_was_busy_before_a_run_is_told_of():
    idle, busy = run("Stillframe"), replace(run("Flink"), load_before=1.5)

    assert noise(results(idle)) == ""
    assert noise(results(idle, replace(busy, load_before=1.0))) == ""
    assert noise(results(idle, busy)).startswith(
        "Before 1 of 2 runs something else kept more than 1 cores busy (up to 1.5)"
    )
    assert "the figures are noisy" in markdown(results(busy), [benchmark("Flink")])


# --- Pictures ------------------------------------------------------------------------------------


def lines_of_state() -> Benchmark:
    trials = [
        Trial(f"{name}, {size}", "stillframe", {}, 1.0, line=name, x=size)
        for name in ("Stillframe", "Flink")
        for size in (1e6, 1e9)
    ]
    more = {"metric": CHECKPOINT, "trials": tuple(trials), "plot": "lines", "x_label": "bytes"}
    return Benchmark("views", "Checkpoints", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wanted", "runs"),
    [
        (benchmark("Stillframe", "Flink"), [*rates("Stillframe", 6e6, 5e6), *rates("Flink", 1e6)]),
        (
            benchmark("Stillframe", "Flink", metric=P99, plot="percentiles"),
            [
                run("Stillframe", latency_ms={"p50": 1.0, "p99": 4.0, "p999": 9.0}),
                *p99s("Flink", 99.0),
            ],
        ),
        (
            lines_of_state(),
            [run(f"Stillframe, {size}", checkpoints={"p50_ms": 9.0}) for size in (1e6, 1e9)],
        ),
    ],
    ids=["bars", "percentiles", "lines"],
)
def test_a_benchmark_with_results_is_drawn(wanted, runs, tmp_path):
    assert draw(results(*runs), [wanted], tmp_path) == ["views.png"]
    assert (tmp_path / "views.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_drawn_of_nothing(tmp_path):
    wanted = [benchmark("Stillframe"), benchmark("Stillframe", metric=P99, plot="percentiles")]

    assert draw(results(), [*wanted, lines_of_state()], tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_a_sentence_says_how_to_get_it(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(NoMatplotlib, match=r"pip install 'stillframe\[bench\]'"):
        draw(results(*rates("Stillframe", 1.0)), [benchmark("Stillframe")], tmp_path)


# --- The machine ---------------------------------------------------------------------------------


def test_the_machine_is_described_and_its_busy_cores_are_counted():
    machine = this_machine()

    assert machine.cores >= 1
    assert machine.memory_bytes > 1e8
    assert 0 <= busy_cores(0.05) < 1000
