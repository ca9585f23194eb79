"""Programs are run in rounds, in turns, and whatever they do becomes a result."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from stillframe.bench.engines import Engines
from stillframe.bench.peers import Environment
from stillframe.bench.results import Results, Run, results_from
from stillframe.bench.rounds import in_turn
from stillframe.bench.trials import RATE, Benchmark, Engine, Target, Trial
from stillframe.cli.bench import measure
from stillframe.cli.lines import Lines
from stillframe.errors import BuildError

PROGRAM = """\
import json, signal, sys

params = json.loads(sys.argv[1])
print("some noise")
match params["variant"]:
    case "fine":
        speed = params["warmup_records"]
        print("RESULT " + json.dumps({"records_per_second": speed, "given": params}))
    case "crashes":
        sys.exit("Traceback (most recent call last):\\n  …\\nValueError: no such thing")
    case "garbage":
        print("RESULT {not json")
    case "silent":
        pass
    case "a list":
        print("RESULT [1, 2]")
    case "hangs":
        signal.pause()
    case "cannot":
        print("one more warning\\nthere is no RocksDB here", file=sys.stderr)
        sys.exit(3)
"""
"""Stands for a program of an engine, and does what its variant says."""


def trial(label: str, variant: str = "fine", speed: int = 1, **more: Any) -> Trial:
    given: dict[str, Any] = {"seconds_max": 120.0, "engine": "stillframe", **more}
    params = {"workload": "strings", "variant": variant, "source": "generator"}
    return Trial(label, params={**params, "warmup_records": speed}, **given)


def benchmark(*trials: Trial, **more: Any) -> Benchmark:
    return Benchmark("views", "Page views", RATE, trials, **more)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A directory with the program above in place of those of the engines."""
    directory = tmp_path / "programs"
    directory.mkdir()
    for engine in ("stillframe", "bytewax"):
        (directory / f"{engine}_throughput.py").write_text(PROGRAM)
    return directory


def measured(
    programs: Path,
    wanted: Benchmark,
    rounds: int = 1,
    environments: dict[Engine, Environment] | None = None,
    *,
    goes_on: bool = False,
) -> tuple[Results, str]:
    """The results, and what was said."""
    home = programs.parent
    engines = Engines(home / "home", made_of=environments or {}, programs=programs)
    said = io.StringIO()
    lines = Lines(as_json=False, out=said)
    results = measure([wanted], rounds, home / "results", engines, lines, goes_on=goes_on)
    return results, said.getvalue()


def only(results: Results) -> Run:
    (run,) = results.runs
    return run


def test_a_result_is_kept_with_all_that_belongs_to_it(programs):
    results, said = measured(programs, benchmark(trial("Stillframe", speed=12_300_000)))

    run = only(results)
    assert (run.status, run.reason, run.figure(RATE)) == ("measured", "", 12_300_000.0)
    assert (run.benchmark, run.label, run.engine, run.round) == (
        "views", "Stillframe", "stillframe", 1,
    )  # fmt: skip
    assert run.wall_seconds > 0
    assert run.load_before >= 0
    assert "12.3 M records/s" in said


def test_a_program_gets_an_empty_directory_that_is_removed_afterwards(programs):
    results, _ = measured(programs, benchmark(trial("Stillframe")))

    given = only(results).result["given"]
    assert not Path(given["directory"]).exists()
    assert {name: given[name] for name in ("workload", "variant", "warmup_records")} == {
        "workload": "strings", "variant": "fine", "warmup_records": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ("crashes", "exit code 1: ValueError: no such thing"),
        ("garbage", "its result is not JSON: 'RESULT {not json'"),
        ("silent", "it printed no line that begins with RESULT"),
        ("a list", "its result is not an object: 'RESULT [1, 2]'"),
    ],
)
def test_a_program_without_a_result_has_failed_and_says_why(programs, variant, reason):
    results, said = measured(programs, benchmark(trial("Stillframe", variant), trial("Other")))

    failed, other = results.runs
    assert (failed.status, failed.reason, failed.figure(RATE)) == ("failed", reason, None)
    assert other.status == "measured"
    assert f"failed: {reason}" in said


def test_a_program_that_hangs_is_ended_at_its_limit_and_the_others_go_on(programs):
    hangs = trial("Stillframe", "hangs", seconds_max=1.0)

    results, _ = measured(programs, benchmark(hangs, trial("Other")))

    assert [(run.status, run.reason) for run in results.runs] == [
        ("failed", "it was ended after 1 s"),
        ("measured", ""),
    ]


def test_a_combination_that_cannot_be_is_left_out_from_then_on(programs):
    cannot = trial("Stillframe", "cannot")

    results, said = measured(programs, benchmark(cannot, trial("Other")), rounds=2)

    assert [(run.label, run.round, run.status) for run in results.runs] == [
        ("Stillframe", 1, "left out"),
        ("Other", 1, "measured"),
        ("Other", 2, "measured"),
    ]
    assert results.runs[0].reason == "there is no RocksDB here"
    assert "left out: there is no RocksDB here" in said


def test_rounds_take_turns_and_each_begins_with_another_engine(programs):
    results, _ = measured(programs, benchmark(*map(trial, "abc")), rounds=3)

    assert [(run.round, run.label) for run in results.runs] == [
        (1, "a"), (1, "b"), (1, "c"),
        (2, "b"), (2, "c"), (2, "a"),
        (3, "c"), (3, "a"), (3, "b"),
    ]  # fmt: skip


def test_there_may_be_more_rounds_than_trials_and_no_trial_at_all():
    one = trial("a")

    assert in_turn([one], 5) == [one]
    assert in_turn([], 1) == []


@pytest.mark.slow
def test_a_peer_that_cannot_be_installed_is_named_and_left_out(programs, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    nowhere: dict[Engine, Environment] = {
        "bytewax": Environment("bytewax", ("a-peer-that-does-not-exist==1.0",))
    }
    wanted = benchmark(trial("Stillframe"), trial("Bytewax", engine="bytewax"))

    results, said = measured(programs, wanted, environments=nowhere)

    assert [run.label for run in results.runs] == ["Stillframe"]
    assert "No matching distribution found" in results.left_out["bytewax"]
    assert "bytewax is left out: bytewax cannot be installed" in said
    report = (programs.parent / "results" / "results.md").read_text()
    assert "bytewax is left out: bytewax cannot be installed" in report


def test_flink_is_left_out_where_there_is_no_java_compiler(programs):
    engines = Engines(
        programs.parent, environ={"PATH": str(programs), "JAVA_HOME": ""}, programs=programs
    )
    said = io.StringIO()
    wanted = benchmark(trial("Flink", engine="flink"))

    results = measure(
        [wanted], 1, programs.parent / "results", engines, Lines(as_json=False, out=said)
    )

    assert "there is no Java compiler" in results.left_out["flink"]
    assert results.runs == []
    assert "flink is left out" in said.getvalue()


def test_everything_is_written_down_and_can_be_read_again(programs):
    target = Target("vs the other", RATE, "Stillframe", ("Other",), at_least=5)
    trials = trial("Stillframe", speed=6_000_000), trial("Other", speed=2_000_000)

    results, said = measured(programs, benchmark(*trials, targets=(target,)), rounds=2)

    directory = programs.parent / "results"
    assert results_from(json.loads((directory / "results.json").read_text())) == results
    report = (directory / "results.md").read_text()
    assert "| views | vs the other | **3 ×** | 3–3 | ≥ 5 × | missed: 60% of it |" in report
    assert "**3 ×**" in said
    assert "![Page views](views.png)" in report
    assert (directory / "views.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((directory / "logs").iterdir())) == 8


def began(results: Results) -> dict[tuple[str, int], str]:
    """When each trial was run, by round, and for how long."""
    return {(run.label, run.round): f"{run.began} {run.wall_seconds}" for run in results.runs}


def test_a_command_that_goes_on_measures_what_is_not_there_yet(programs):
    first, _ = measured(programs, benchmark(trial("Stillframe"), trial("Other", "crashes")))

    both = benchmark(trial("Stillframe"), trial("Other"), trial("Bytewax", speed=7))
    results, said = measured(programs, both, rounds=2, goes_on=True)

    assert began(results)["Stillframe", 1] == began(first)["Stillframe", 1]
    assert len(results.runs) == 6
    assert {run.status for run in results.runs} == {"measured"}  # that which failed was run again
    assert "round 1  Stillframe" not in said
    assert len(results.commands) == 2
    report = (programs.parent / "results" / "results.md").read_text()
    assert "| Stillframe | 1 | 1 – 1 (2) |" in report
    assert "| Bytewax | 7 | 7 – 7 (2) |" in report


def test_a_trial_with_other_parameters_is_measured_again_and_counts_instead(programs):
    measured(programs, benchmark(trial("Stillframe", speed=1)))

    results, _ = measured(programs, benchmark(trial("Stillframe", speed=5)), goes_on=True)

    assert only(results).figure(RATE) == 5.0


def test_without_being_told_to_go_on_a_command_begins_anew(programs):
    measured(programs, benchmark(trial("Stillframe")))

    results, _ = measured(programs, benchmark(trial("Other")))

    assert only(results).label == "Other"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda document: document["machine"].update(cores=1000), "the machine of the results"),
        (lambda document: document["versions"].update(Flink="0.1"), "the versions of the results"),
        (lambda document: document.pop("runs"), "does not hold results that this version"),
    ],
)
def test_results_of_another_machine_or_version_are_not_gone_on_with(programs, spoil, why):
    measured(programs, benchmark(trial("Stillframe")))
    path = programs.parent / "results" / "results.json"
    document = json.loads(path.read_text())
    spoil(document)
    path.write_text(json.dumps(document))

    with pytest.raises(BuildError, match=f"{why}.*give another --output"):
        measured(programs, benchmark(trial("Stillframe")), goes_on=True)

    assert json.loads(path.read_text()) == document


def test_settings_of_the_shell_do_not_reach_the_programs(tmp_path):
    environ = {"PATH": "/usr/bin", "HOME": "/home/me", "PYTHONPATH": "/mine", "SPARK_HOME": "/own"}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "javac").touch(0o755)
    engines = Engines(tmp_path, environ={**environ, "JAVA_HOME": str(tmp_path)})

    for_spark, for_us = engines.environ("spark"), engines.environ("stillframe")

    assert for_spark["JAVA_HOME"] == for_us["JAVA_HOME"] == str(tmp_path)
    assert {"PYTHONPATH", "SPARK_HOME"}.isdisjoint(for_spark)
    assert (Path(for_us["PYTHONPATH"]) / "stillframe").is_dir()
