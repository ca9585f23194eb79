"""`stillframe bench`: Stillframe beside its peers, in one run on one machine."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

from stillframe import __version__
from stillframe.bench.catalogue import benchmarks, chosen
from stillframe.bench.connectors import GROUPS
from stillframe.bench.engines import Engines
from stillframe.bench.peers import BYTEWAX_VERSION, FLINK_VERSION, bench_home
from stillframe.bench.plots import NoMatplotlib, draw
from stillframe.bench.report import Verdict, markdown, noise, target_table, told_run, verdict
from stillframe.bench.results import Results, Run, results_from, this_machine
from stillframe.bench.rounds import RESULTS, Rounds, now
from stillframe.bench.trials import PEERS, Benchmark
from stillframe.cli.lines import Lines
from stillframe.config import nearest_of
from stillframe.errors import BuildError

_ROUNDS = 3


def bench(arguments: argparse.Namespace) -> int:
    """0 if every program that was started had a result, 1 if not; targets do not matter here."""
    lines = Lines(as_json=arguments.json)
    wanted = asked_for(arguments)
    rounds = arguments.rounds or (1 if arguments.quick else _ROUNDS)
    engines = Engines(bench_home(), lambda text: lines.say("installing", text))
    with _terminated_as_interrupted():
        results = measure(
            wanted, rounds, Path(arguments.output), engines, lines, goes_on=arguments.goes_on
        )
    return 1 if any(run.status == "failed" for run in results.runs) else 0


def measure(
    wanted: list[Benchmark],
    rounds: int,
    output: Path,
    engines: Engines,
    lines: Lines,
    *,
    goes_on: bool = False,
) -> Results:
    """Run them all, telling each run as it ends, and write the report.

    With `goes_on`, what was measured into the same directory before is not measured again, and is
    in the report too.
    """
    results = Results([], now(), _versions(), this_machine())
    if goes_on and (output / RESULTS).exists():
        results = _found_there(output / RESULTS, results)
    results.commands.append(_command())
    output.mkdir(parents=True, exist_ok=True)
    work = Rounds(
        results,
        engines,
        output.resolve(),
        bench_home() / "inputs",
        lambda run, benchmark: _say_run(lines, run, benchmark),
        lambda text: lines.say("left_out", text),
    )
    try:
        work.prepare(wanted)
        work.run(wanted, rounds)
    except KeyboardInterrupt:
        if results.runs:
            _conclude(results, _shown(results, wanted, goes_on), output, lines)
        raise
    _conclude(results, _shown(results, wanted, goes_on), output, lines)
    return results


def _found_there(path: Path, now_and_here: Results) -> Results:
    """What is there, if it was measured with the same programs on a machine of the same kind."""
    try:
        found = results_from(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BuildError(
            f"{path} does not hold results that this version can go on with ({error!r}): give"
            " another --output"
        ) from error
    for what, before, current in (
        ("machine", found.machine, now_and_here.machine),
        ("versions", found.versions, now_and_here.versions),
    ):
        if before != current:
            raise BuildError(
                f"the {what} of the results in {path} was {before} and is {current} here, and"
                " figures of the two cannot be compared: give another --output"
            )
    found.left_out.clear()  # it is tried again
    return found


def _shown(results: Results, wanted: list[Benchmark], goes_on: bool) -> list[Benchmark]:
    """What the report is about: with results of before, all that they have."""
    if not goes_on:
        return wanted
    return [each for each in benchmarks().values() if results.of(each.name)]


def asked_for(arguments: argparse.Namespace) -> list[Benchmark]:
    """The benchmarks that a command line names; raises for names that nobody knows."""
    everything = benchmarks()
    _refuse_unknown(arguments.names, [*everything, *GROUPS], "benchmark")
    peers = [peer for peer in arguments.peers.split(",") if peer and peer != "none"]
    _refuse_unknown(peers, list(PEERS), "peer")
    found = chosen(
        everything, arguments.names, peers, quick=arguments.quick, seconds=arguments.seconds
    )
    if not found:
        raise BuildError(
            f"{', '.join(arguments.names)} has nothing in --quick: leave one of the two out"
        )
    return found


def _refuse_unknown(given: list[str], known: list[str], kind: str) -> None:
    for name in given:
        if name not in known:
            nearest = nearest_of(name, known)
            hint = "; there" if nearest is None else f", did you mean {nearest!r}? There"
            raise BuildError(f"there is no {kind} {name!r}{hint} are: {', '.join(known)}")


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends the running program first, as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = None
    with suppress(ValueError):  # not the main thread
        before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _say_run(lines: Lines, run: Run, benchmark: Benchmark) -> None:
    lines.say(
        "run",
        told_run(run, benchmark.metric),
        benchmark=run.benchmark,
        label=run.label,
        engine=run.engine,
        round=run.round,
        status=run.status,
        reason=run.reason,
        load_before=run.load_before,
        result=dict(run.result),
    )


def _conclude(results: Results, wanted: list[Benchmark], output: Path, lines: Lines) -> None:
    results.write(output / RESULTS)
    plots: list[str] = []
    try:
        plots = draw(results, wanted, output)
    except NoMatplotlib as error:
        lines.say("no_plots", str(error))
    (output / "results.md").write_text(markdown(results, wanted, plots))
    if warning := noise(results):
        lines.say("warning", warning)
    lines.for_people("\n" + "\n".join(target_table(results, wanted)))
    for benchmark in wanted if lines.as_json else ():
        for target in benchmark.targets:
            _say_verdict(lines, benchmark.name, verdict(target, benchmark.name, results))
    lines.say("written", f"\n{output / 'results.md'}, {RESULTS}, {len(plots)} plots and logs/")


def _say_verdict(lines: Lines, benchmark: str, found: Verdict) -> None:
    lines.say(
        "target",
        f"{benchmark}: {found.target.text}: {found.told}",
        benchmark=benchmark,
        bound=found.target.bound,
        value=None if found.value is None else found.value.median,
        is_met=found.is_met,
    )


def _command() -> str:
    return shlex.join(["stillframe", *sys.argv[1:]])


def _versions() -> dict[str, str]:
    found = {"Stillframe": __version__}
    names = {"PySpark": "pyspark", "PyArrow": "pyarrow", "NumPy": "numpy"}
    for name, package in names.items():
        with suppress(PackageNotFoundError):
            found[name] = version(package)
    return {**found, "Flink": FLINK_VERSION, "Bytewax": BYTEWAX_VERSION}
