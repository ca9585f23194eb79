"""Runs benchmarks: every program once in each round, one after the other, in turns.

Theory of operation
-------------------
A machine is faster in some minutes than in others. So rounds are interleaved: the first round of
all engines, then the second, each beginning with another engine. After every run all results so far
are written, so that an interrupt costs one run. What the results have already is not run again.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from stillframe.bench.engines import Engines
from stillframe.bench.inputs import WRITERS, bring_into_memory, page_views
from stillframe.bench.kafka import Kafka
from stillframe.bench.peers import CannotInstall
from stillframe.bench.processes import Ended, run_program
from stillframe.bench.results import (
    NoResult,
    Results,
    Run,
    Status,
    busy_cores,
    last_words,
    load_average,
    parse_result,
)
from stillframe.bench.servers import CANNOT_START, Servers
from stillframe.bench.trials import Benchmark, Engine, Trial
from stillframe.testing.kafka_node import NoBroker

CANNOT_DO = 3
"""The exit code of a program that has no such combination."""
RESULTS = "results.json"


class Rounds:
    """One command's runs; `on_run` is told of each."""

    def __init__(
        self,
        results: Results,
        engines: Engines,
        output: Path,
        inputs: Path,
        on_run: Callable[[Run, Benchmark], None] = lambda run, benchmark: None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._results = results
        self._engines = engines
        self._output = output
        self._inputs = inputs
        self._on_run = on_run
        self._tell = tell
        self._kafka = Kafka(tell)
        self._servers = Servers(tell)
        self._impossible: set[tuple[str, str]] = set()
        """Trials that have said so themselves: benchmark and label."""

    def prepare(self, benchmarks: Sequence[Benchmark]) -> None:
        """Install what is missing; a peer that cannot be is named in the results and left out."""
        engines = {trial.engine: None for each in benchmarks for trial in each.trials}
        for engine in engines:
            try:
                self._engines.prepare(engine)
            except CannotInstall as error:
                self._results.left_out[engine] = str(error)
                self._tell(f"{engine} is left out: {error}")

    def run(self, benchmarks: Sequence[Benchmark], rounds: int) -> None:
        (self._output / "logs").mkdir(parents=True, exist_ok=True)
        try:
            self._run_all(benchmarks, rounds)
        finally:
            self._kafka.close()
            self._servers.close()

    def _run_all(self, benchmarks: Sequence[Benchmark], rounds: int) -> None:
        for benchmark in benchmarks:
            trials = [trial for trial in benchmark.trials if self._is_here(trial.engine)]
            for round_number in range(1, rounds + 1):
                for trial in in_turn(trials, round_number):
                    if self._is_left(benchmark, trial, round_number):
                        self._run_once(benchmark, trial, round_number)

    def _is_left(self, benchmark: Benchmark, trial: Trial, round_number: int) -> bool:
        if (benchmark.name, trial.label) in self._impossible:
            return False
        params = dict(trial.params)
        return not self._results.has(benchmark.name, trial.label, round_number, params)

    def _is_here(self, engine: Engine) -> bool:
        return engine not in self._results.left_out

    def _run_once(self, benchmark: Benchmark, trial: Trial, round_number: int) -> None:
        scratch = Path(tempfile.mkdtemp(prefix="stillframe-bench-"))
        try:
            run = self._measured(benchmark, trial, round_number, scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        if run.status == "left out":
            self._impossible.add((benchmark.name, trial.label))
        self._results.add(run)
        self._results.write(self._output / RESULTS)
        self._on_run(run, benchmark)

    def _measured(
        self, benchmark: Benchmark, trial: Trial, round_number: int, scratch: Path
    ) -> Run:
        try:
            params = self._given(trial, scratch)
        except (NoBroker, *CANNOT_START) as error:
            return _left_out(benchmark, trial, round_number, str(error))
        log = self._output / "logs" / file_name(benchmark.name, trial.label, round_number)
        output, errors = log.with_suffix(".out"), log.with_suffix(".err")
        began, average, load_before = now(), load_average(), busy_cores()
        ended = run_program(
            self._engines.command(trial, params),
            directory=scratch,
            output=output,
            errors=errors,
            seconds_max=trial.seconds_max,
            environ=self._engines.environ(trial.engine),
        )
        status, reason, result = _judged(ended, trial, output, errors)
        return Run(
            benchmark=benchmark.name,
            label=trial.label,
            engine=trial.engine,
            round=round_number,
            params=dict(trial.params),
            began=began,
            load_before=round(load_before, 2),
            load_average=average,
            wall_seconds=ended.seconds,
            status=status,
            reason=reason,
            result=result,
        )

    def _given(self, trial: Trial, scratch: Path) -> dict[str, Any]:
        """What its program is told; inputs are made here."""
        params: dict[str, Any] = {**trial.params, "directory": str(scratch)}
        if trial.params["source"] in ("parquet", "files"):
            write = WRITERS.get(trial.workload, page_views)
            files = write(self._inputs, trial.params["input_records"])
            bring_into_memory(files)
            params["input"] = str(files)
        if trial.workload.startswith("kafka"):
            params |= self._kafka.given(trial.params)
        elif trial.workload.endswith("_sink"):
            params |= self._servers.given(trial.params)
        return params


def _left_out(benchmark: Benchmark, trial: Trial, round_number: int, reason: str) -> Run:
    return Run(
        benchmark=benchmark.name,
        label=trial.label,
        engine=trial.engine,
        round=round_number,
        params=dict(trial.params),
        began=now(),
        load_before=0.0,
        load_average=load_average(),
        wall_seconds=0.0,
        status="left out",
        reason=reason,
    )


def in_turn(trials: Sequence[Trial], round_number: int) -> list[Trial]:
    """Each round begins one further on."""
    if not trials:
        return []
    first = (round_number - 1) % len(trials)
    return [*trials[first:], *trials[:first]]


def file_name(benchmark: str, label: str, round_number: int) -> str:
    plain = "".join(sign if sign.isalnum() else "-" for sign in label.lower())
    return f"{benchmark}-{plain}-{round_number}.log"


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _judged(
    ended: Ended, trial: Trial, output: Path, errors: Path
) -> tuple[Status, str, dict[str, Any]]:
    if ended.is_too_late:
        return "failed", f"it was ended after {trial.seconds_max:g} s", {}
    if ended.exit_code == CANNOT_DO:
        return "left out", last_words(errors), {}
    if ended.exit_code != 0:
        return "failed", f"exit code {ended.exit_code}: {last_words(errors)}", {}
    try:
        return "measured", "", parse_result(output)
    except NoResult as error:
        return "failed", str(error), {}
