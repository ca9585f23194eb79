"""What is measured fits together: labels, targets, programs, and what --quick takes of it."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from stillframe.bench.catalogue import benchmarks, chosen
from stillframe.bench.connectors import GROUPS
from stillframe.bench.engines import Engines
from stillframe.bench.peers import PROGRAMS
from stillframe.bench.trials import PEERS, Benchmark
from stillframe.cli.bench import asked_for
from stillframe.cli.main import main
from stillframe.errors import BuildError

ALL = benchmarks()


def arguments(
    *names: str,
    quick: bool = False,
    peers: str = ",".join(PEERS),
    seconds: float | None = None,
) -> Any:
    return argparse.Namespace(names=list(names), quick=quick, peers=peers, seconds=seconds)


def labels(found: list[Benchmark]) -> dict[str, list[str]]:
    return {each.name: [trial.label for trial in each.trials] for each in found}


def test_every_benchmark_that_was_promised_is_there():
    assert list(ALL) == [
        "views", "users", "views-rocksdb", "users-rocksdb", "views-parquet", "rows", "rows-by-key",
        "latency", "slow-channel", "checkpoint-cost", "state-size", "recovery", "growth",
        "observing", "looking", "kafka-counts", "kafka-values", "kafka-sink", "kafka-latency",
        "postgres-sink", "mysql-sink", "s3-sink", "s3-link",
        "language-json", "language-words", "language-decimals", "language-distinct",
        "language-evaluator",
    ]  # fmt: skip


@pytest.mark.parametrize("benchmark", ALL.values(), ids=ALL)
def test_labels_are_different_and_targets_name_them(benchmark):
    known = [trial.label for trial in benchmark.trials]

    assert len(set(known)) == len(known)
    for target in benchmark.targets:
        assert {target.of, *target.against} <= set(known)
        assert (target.at_least is None) != (target.at_most is None)


def test_every_target_of_the_table_is_judged_somewhere():
    bounds = [(name, target.bound) for name, each in ALL.items() for target in each.targets]

    assert bounds == [
        ("views", "≥ 5 ×"), ("views", "≥ 4 ×"),
        ("users", "≥ 5 ×"),
        ("views-rocksdb", "≥ 3 ×"), ("views-rocksdb", "≥ 4 ×"),
        ("users-rocksdb", "≥ 3 ×"),
        ("rows", "≥ 20 ×"), ("rows-by-key", "≥ 10 ×"), ("rows-by-key", "≥ 2 ×"),
        ("latency", "≤ 20 ms"), ("latency", "≤ 2 ×"), ("latency", "≤ 0.1 ×"),
        ("checkpoint-cost", "≥ 0.95 ×"), ("checkpoint-cost", "≥ 0.95 ×"),
        ("recovery", "≤ 5 s"), ("observing", "≥ 0.99 ×"),
        ("looking", "≤ 1.1 ×"), ("looking", "≤ 1.1 ×"),
        ("kafka-counts", "≥ 3 ×"), ("kafka-counts", "≥ 1 ×"), ("kafka-values", "≥ 0.8 ×"),
        ("kafka-sink", "≥ 0.6 ×"), ("kafka-latency", "≤ 300 ms"),
        ("postgres-sink", "≥ 0.85 ×"), ("postgres-sink", "≥ 5 ×"),
        ("mysql-sink", "≥ 0.85 ×"), ("mysql-sink", "≥ 5 ×"),
        ("s3-sink", "≥ 0.8 ×"), ("s3-link", "≥ 0.8 ×"),
        ("language-json", "≥ 3 ×"), ("language-words", "≥ 3 ×"), ("language-decimals", "≥ 3 ×"),
        ("language-distinct", "≥ 1 ×"), ("language-evaluator", "≥ 0.5 ×"),
    ]  # fmt: skip


def test_the_help_names_every_benchmark_and_every_group(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])

    told = "".join(capsys.readouterr().out.split())  # names are broken at their hyphens
    assert [name for name in (*ALL, *GROUPS) if name not in told] == []


@pytest.mark.parametrize("benchmark", ALL.values(), ids=ALL)
def test_every_trial_has_a_program(benchmark, tmp_path):
    engines = Engines(tmp_path)
    for trial in benchmark.trials:
        if trial.engine == "flink":
            assert (PROGRAMS / "flink" / "Bench.java").is_file()
        else:
            program = engines.command(trial, trial.params)[1]
            assert (PROGRAMS / program).is_file(), f"{trial.label} has no program {program}"


def test_quick_is_a_part_of_the_whole_and_shorter():
    found = chosen(ALL, [], PEERS, quick=True)

    assert labels(found) == {
        "views": ["Stillframe", "Flink DataStream", "Flink SQL mini-batch", "Bytewax"],
        "users": ["Stillframe", "Flink DataStream", "Bytewax"],
        "rows": ["Stillframe", "PyFlink process mode", "PyFlink thread mode"],
        "rows-by-key": ["Stillframe", "Spark transformWithStateInPandas", "Bytewax"],
        "latency": [
            "Stillframe, no checkpoints, 10,000/s",
            "Stillframe, aligned, 10,000/s",
            "Flink, buffer timeout 100 ms, aligned, 10,000/s",
            "Flink, buffer timeout 1 ms, aligned, 10,000/s",
            "Spark micro-batch, 10,000/s",
        ],
        "kafka-counts": ["Stillframe", "Spark Structured Streaming", "Flink KafkaSource"],
        "kafka-values": ["Stillframe", "Consumer.consume alone"],
        "kafka-sink": ["Stillframe", "Producer alone, in transactions"],
        "kafka-latency": ["Stillframe, 10,000/s, a checkpoint every 200 ms"],
        "postgres-sink": ["Stillframe", "COPY by hand", "Spark's JDBC writer"],
        "mysql-sink": ["Stillframe", "LOAD DATA by hand", "Spark's JDBC writer"],
        "s3-sink": ["Stillframe", "obstore alone, the same bytes", "pyarrow and obstore by hand"],
        "language-json": ["Stillframe", "Spark Structured Streaming"],
        "language-words": ["Stillframe", "Spark Structured Streaming"],
        "language-decimals": ["Stillframe", "Spark Structured Streaming"],
        "language-distinct": ["Stillframe", "Spark Structured Streaming"],
        "language-evaluator": ["Stillframe", "Spark Structured Streaming"],
    }
    assert {trial.params["backend"] for trial in found[0].trials} == {"heap"}
    for quick in found:
        whole = {trial.label: trial.params for trial in ALL[quick.name].trials}
        for trial in quick.trials:
            assert trial.params["seconds"] < whole[trial.label]["seconds"]
            assert trial.params["warmup_records"] <= whole[trial.label]["warmup_records"]
            if trial.params["input_records"] is not None:
                assert trial.params["input_records"] < whole[trial.label]["input_records"]


def test_peers_and_benchmarks_can_be_chosen():
    only_flink = asked_for(arguments("views", "users-rocksdb", peers="flink"))

    assert labels(only_flink) == {
        "views": ["Stillframe", "Flink DataStream", "Flink SQL", "Flink SQL mini-batch"],
        "users-rocksdb": ["Stillframe", "Flink DataStream"],
    }
    assert labels(asked_for(arguments("rows", peers="none"))) == {"rows": ["Stillframe"]}
    assert len(asked_for(arguments())) == len(ALL)


def test_one_name_asks_for_all_that_is_measured_with_kafka_or_of_sinks():
    names = ["kafka-counts", "kafka-values", "kafka-sink", "kafka-latency"]

    assert [each.name for each in asked_for(arguments("kafka"))] == names
    assert [each.name for each in asked_for(arguments("views", "kafka"))] == ["views", *names]
    sinks = ["postgres-sink", "mysql-sink", "s3-sink", "s3-link"]
    assert [each.name for each in asked_for(arguments("sinks"))] == sinks


def test_each_trial_is_measured_for_as_long_as_was_asked_for():
    found = asked_for(arguments("views", seconds=3))

    assert {trial.params["seconds"] for trial in found[0].trials} == {3}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (arguments("view"), "there is no benchmark 'view', did you mean 'views'?"),
        (arguments("pulsar"), "there is no benchmark 'pulsar'; there are: "),
        (arguments(peers="flnk"), "there is no peer 'flnk', did you mean 'flink'?"),
        (arguments("recovery", quick=True), "recovery has nothing in --quick"),
    ],
)
def test_what_nobody_knows_is_refused_with_the_nearest(given, sentence):
    with pytest.raises(BuildError) as raised:
        asked_for(given)

    assert sentence in str(raised.value)
