"""Trials of benchmarks with few records, run from the command to the report."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stillframe.bench.catalogue import benchmarks
from stillframe.bench.engines import Engines
from stillframe.bench.results import Run
from stillframe.bench.trials import Benchmark
from stillframe.cli.bench import measure
from stillframe.cli.lines import Lines

RECORDS = 30_000


def tiny(name: str, engine: str) -> Benchmark:
    """The first trial of this engine alone."""
    benchmark = benchmarks()[name]
    trial = next(each for each in benchmark.trials if each.engine == engine)
    small = replace(trial, params={**trial.params, "input_records": RECORDS}, seconds_max=250.0)
    return replace(benchmark, trials=(small,))


def run_once(wanted: Sequence[Benchmark], output: Path, rounds: int = 1) -> list[Run]:
    quietly = Lines(as_json=False, out=io.StringIO())
    return measure(list(wanted), rounds, output, Engines(output / "home"), quietly).runs


def check_every_record(runs: Sequence[Run], number: int) -> None:
    for run in runs:
        assert run.status == "measured", (run.benchmark, run.reason)
        assert run.result["records"] == RECORDS
        assert run.result["records_per_second"] > 0
    assert len(runs) == number
