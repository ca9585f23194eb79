"""What is measured: every benchmark, the programs that run in it, and what they have to reach.

Theory of operation
-------------------
A benchmark is a list of trials, each one program of one engine with its parameters, and a list of
targets, each a figure of one of our trials, alone or as a ratio to that of a peer in the same run.
All of them are written down here, those of other systems in `connectors.py`, and nowhere else;
`programs/` has the code of each engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from stillframe.bench import connectors, language
from stillframe.bench.connectors import GROUPS
from stillframe.bench.trials import (
    CHECKPOINT,
    P99,
    RATE,
    RECOVERY,
    Benchmark,
    Engine,
    More,
    Target,
    Trial,
    Workload,
    faster,
    trial_of,
)

_SECONDS_QUICK = 6
_WARM_UP_SHARE_QUICK = 0.4
_INPUT_PARTS_QUICK = 3
_PARQUET_RECORDS = 32_000_000
_MB = 1_000_000


def benchmarks() -> dict[str, Benchmark]:
    """All of them, by name, in the order they are run in."""
    made = (
        _views(),
        _users(),
        _views_on_rocksdb(),
        _users_on_rocksdb(),
        _views_from_parquet(),
        _rows(),
        _rows_by_key(),
        _latency(),
        _slow_channel(),
        _checkpoint_cost(),
        _state_size(),
        _recovery(),
        _growth(),
        _observing(),
        _looking(),
        *connectors.benchmarks(),
        *language.benchmarks(),
    )
    return {benchmark.name: benchmark for benchmark in made}


def chosen(
    everything: Mapping[str, Benchmark],
    names: Iterable[str],
    peers: Iterable[str],
    *,
    quick: bool,
    seconds: float | None = None,
) -> list[Benchmark]:
    """Those named, alone or as a group (all if none is), with the trials of these peers and ours.

    With `quick`, only the trials that are meant for it, and less of each. Each is measured for so
    many `seconds`, if they are given.
    """
    engines = {"stillframe", *peers}
    wanted = {each for name in names for each in GROUPS.get(name, (name,))} or set(everything)
    found = []
    for name, benchmark in everything.items():
        trials = [trial for trial in benchmark.trials if trial.engine in engines]
        if quick:
            trials = [_shortened(trial) for trial in trials if trial.is_quick]
        if seconds is not None:
            trials = [replace(each, params={**each.params, "seconds": seconds}) for each in trials]
        if name in wanted and trials:
            found.append(replace(benchmark, trials=tuple(trials)))
    return found


def _shortened(trial: Trial) -> Trial:
    shorter = {
        "seconds": _SECONDS_QUICK,
        "warmup_records": int(trial.params["warmup_records"] * _WARM_UP_SHARE_QUICK),
    }
    if trial.params["input_records"]:
        shorter["input_records"] = trial.params["input_records"] // _INPUT_PARTS_QUICK
    return replace(trial, params={**trial.params, **shorter})


# --- The benchmarks ---------------------------------------------------------------------------


def _views() -> Benchmark:
    return Benchmark(
        "views",
        "Page views: 1,000 string keys, heap",
        RATE,
        (
            trial_of("Stillframe", "stillframe", "strings", is_quick=True),
            trial_of("Flink DataStream", "flink", "strings", "datastream", is_quick=True),
            trial_of("Flink SQL", "flink", "strings", "sql"),
            trial_of("Flink SQL mini-batch", "flink", "strings", "sql-minibatch", is_quick=True),
            trial_of("Bytewax", "bytewax", "strings", is_quick=True),
        ),
        (
            faster("Flink's Java DataStream", 5, "Flink DataStream"),
            faster("Flink SQL with mini-batch", 4, "Flink SQL mini-batch"),
        ),
    )


def _users() -> Benchmark:
    keys: More = {"keys": 1_000_000}
    return Benchmark(
        "users",
        "1,000,000 int64 keys, heap",
        RATE,
        (
            trial_of("Stillframe", "stillframe", "integers", is_quick=True, **keys),
            trial_of("Flink DataStream", "flink", "integers", "datastream", is_quick=True, **keys),
            trial_of("Flink SQL", "flink", "integers", "sql", **keys),
            trial_of("Flink SQL mini-batch", "flink", "integers", "sql-minibatch", **keys),
            trial_of("Bytewax", "bytewax", "integers", is_quick=True, **keys),
        ),
        (faster("Flink's Java DataStream", 5, "Flink DataStream"),),
    )


def _views_on_rocksdb() -> Benchmark:
    on: More = {"backend": "rocksdb"}
    return Benchmark(
        "views-rocksdb",
        "Page views: 1,000 string keys, RocksDB",
        RATE,
        (
            trial_of("Stillframe", "stillframe", "strings", **on),
            trial_of("Flink DataStream", "flink", "strings", "datastream", **on),
            trial_of("Spark SQL", "spark", "strings", "sql", **on),
        ),
        (
            faster("Flink's RocksDB", 3, "Flink DataStream"),
            faster("Spark Structured Streaming SQL with RocksDB state", 4, "Spark SQL"),
        ),
    )


def _users_on_rocksdb() -> Benchmark:
    on: More = {"backend": "rocksdb", "keys": 1_000_000}
    return Benchmark(
        "users-rocksdb",
        "1,000,000 int64 keys, RocksDB",
        RATE,
        (
            trial_of("Stillframe", "stillframe", "integers", **on),
            trial_of("Flink DataStream", "flink", "integers", "datastream", **on),
            trial_of("Spark SQL", "spark", "integers", "sql", **on),
        ),
        (faster("Flink's RocksDB", 3, "Flink DataStream"),),
    )


def _views_from_parquet() -> Benchmark:
    of: More = {"source": "parquet", "input_records": _PARQUET_RECORDS}
    return Benchmark(
        "views-parquet",
        f"Page views from Parquet: {_PARQUET_RECORDS:,} rows, 1,000 string keys",
        RATE,
        (
            trial_of("Stillframe", "stillframe", "strings", **of),
            trial_of("Flink DataStream", "flink", "strings", "datastream", **of),
            trial_of("Flink SQL mini-batch", "flink", "strings", "sql-minibatch", **of),
            trial_of("Spark SQL", "spark", "strings", "sql", backend="rocksdb", **of),
        ),
    )


_PYFLINK = ("PyFlink process mode", "PyFlink thread mode")


def _rows() -> Benchmark:
    return Benchmark(
        "rows",
        "A user's Python function for each row: map, then value state read and written by row",
        RATE,
        (
            trial_of("Stillframe", "stillframe", "rows", "each-row", is_quick=True),
            trial_of(_PYFLINK[0], "pyflink", "rows", "process", is_quick=True),
            trial_of(_PYFLINK[1], "pyflink", "rows", "thread", is_quick=True),
        ),
        (faster("PyFlink, the better of its modes", 20, *_PYFLINK),),
    )


def _rows_by_key() -> Benchmark:
    on_disk: More = {"backend": "rocksdb"}
    pandas = "Spark transformWithStateInPandas"
    return Benchmark(
        "rows-by-key",
        "The same with value state read and written once for the rows of a key in one call",
        RATE,
        (
            trial_of("Stillframe", "stillframe", "rows", "each-call", is_quick=True),
            trial_of(pandas, "spark", "rows", "pandas", is_quick=True, **on_disk),
            trial_of("Spark transformWithState", "spark", "rows", "rows", **on_disk),
            trial_of("Bytewax", "bytewax", "rows", is_quick=True),
        ),
        (faster(pandas, 10, pandas), faster("Bytewax in two processes", 2, "Bytewax")),
    )


_MODES: dict[str, More] = {
    "no checkpoints": {"checkpoint_interval_ms": None},
    "aligned": {},
    "unaligned": {"mode": "unaligned"},
    "stop-the-world": {"mode": "stop-the-world"},
}
_QUICK_MODES = ("no checkpoints", "aligned")


def _latency() -> Benchmark:
    trials = [trial for rate in (10_000, 100_000) for trial in _latency_trials(rate)]
    return Benchmark(
        "latency",
        "Latency from the moment a record is due to its count, end to end",
        P99,
        tuple(trials),
        (
            Target(
                "p99 at 10,000 records/s with checkpoints",
                P99,
                _at("Stillframe", "aligned", 10_000),
                at_most=20,
            ),
            Target(
                "p99 at 10,000 records/s with checkpoints, to that without",
                P99,
                _at("Stillframe", "aligned", 10_000),
                (_at("Stillframe", "no checkpoints", 10_000),),
                at_most=2,
            ),
            Target(
                "p99 at 10,000 records/s, to that of Spark's micro-batches",
                P99,
                _at("Stillframe", "aligned", 10_000),
                (_at("Spark micro-batch", "", 10_000),),
                at_most=0.1,
            ),
        ),
        "percentiles",
    )


def _latency_trials(rate: int) -> list[Trial]:
    slow = rate == 10_000
    trials = [
        _latency_trial(
            "Stillframe", mode, rate, "stillframe", slow and mode in _QUICK_MODES, **more
        )
        for mode, more in _MODES.items()
    ]
    for timeout_ms in (100, 1):
        label = f"Flink, buffer timeout {timeout_ms} ms"
        for mode in ("no checkpoints", "aligned", "unaligned"):
            more: More = {**_MODES[mode], "variant": "datastream", "buffer_timeout_ms": timeout_ms}
            quick = slow and mode == "aligned"
            trials.append(_latency_trial(label, mode, rate, "flink", quick, **more))
    for label, variant in (("Spark micro-batch", "sql"), ("Spark real-time", "realtime")):
        more = {"variant": variant, "backend": "rocksdb"}
        quick = slow and variant == "sql"
        trials.append(_latency_trial(label, "", rate, "spark", quick, **more))
    return trials


def _latency_trial(
    label: str, mode: str, rate: int, engine: Engine, is_quick: bool, /, **more: Any
) -> Trial:
    return trial_of(_at(label, mode, rate), engine, "latency", is_quick=is_quick, rate=rate, **more)


def _at(label: str, mode: str, rate: int) -> str:
    return ", ".join(filter(None, (label, mode, f"{rate:,}/s")))


def _slow_channel() -> Benchmark:
    slow: More = {"rate": 10_000, "slow_channel": True}
    trials = [
        trial_of(f"Stillframe, {mode}", "stillframe", "latency", **slow, **more)
        for mode, more in _MODES.items()
    ]
    trials += [
        trial_of(
            f"Flink, {mode}", "flink", "latency", "datastream", buffer_timeout_ms=1, **slow, **more
        )
        for mode, more in _MODES.items()
        if mode != "stop-the-world"
    ]
    return Benchmark(
        "slow-channel",
        "Latency at 10,000 records/s with one slow channel",
        P99,
        tuple(trials),
        plot="percentiles",
    )


def _checkpoint_cost() -> Benchmark:
    trials: list[Trial] = []
    targets: list[Target] = []
    for name, workload, keys in (("views", "strings", 1000), ("users", "integers", 1_000_000)):
        for label, engine, variant in (
            ("Stillframe", "stillframe", ""),
            ("Flink DataStream", "flink", "datastream"),
        ):
            for when, interval_ms in (("each second", 1000), ("never", None)):
                trial = trial_of(
                    f"{label}, {name}, {when}",
                    engine,
                    workload,
                    variant,
                    keys=keys,
                    checkpoint_interval_ms=interval_ms,
                )
                trials.append(trial)
        targets.append(
            Target(
                f"{name}: speed with a checkpoint each second, to that without",
                RATE,
                f"Stillframe, {name}, each second",
                (f"Stillframe, {name}, never",),
                at_least=0.95,
            )
        )
    return Benchmark(
        "checkpoint-cost",
        "What a checkpoint each second costs",
        RATE,
        tuple(trials),
        tuple(targets),
    )


def _observing() -> Benchmark:
    measured, unmeasured = "Stillframe, figures each second", "Stillframe, no figures"
    return Benchmark(
        "observing",
        "What it costs to measure tasks and slots",
        RATE,
        (
            trial_of(measured, "stillframe", "strings", metrics_interval="1 second"),
            trial_of(unmeasured, "stillframe", "strings", metrics_interval="off"),
        ),
        (
            Target(
                "speed with figures each second, to that without",
                RATE,
                measured,
                (unmeasured,),
                at_least=0.99,
            ),
        ),
    )


def _looking() -> Benchmark:
    """A slot that waits for the processor is late, so p99 says what looking costs."""
    label, mode = "Stillframe, nobody looks", "aligned"
    eyes: dict[str, More] = {
        label: {},
        "Stillframe, five pages are open": {"pages": 5},
        "Stillframe, keys are looked up": {"lookups": True},
    }
    rate = 10_000
    return Benchmark(
        "looking",
        "Latency while people look at the job",
        P99,
        tuple(
            trial_of(each, "stillframe", "latency", rate=rate, **_MODES[mode], **more)
            for each, more in eyes.items()
        ),
        tuple(
            Target(
                f"p99 while {each.partition(', ')[2]}, to that alone",
                P99,
                each,
                (label,),
                at_most=1.1,
            )
            for each in eyes
            if each != label
        ),
        "percentiles",
    )


_STATE_BYTES = (1 * _MB, 10 * _MB, 100 * _MB, 1000 * _MB, 2000 * _MB)
_STATE_KINDS: tuple[tuple[str, More], ...] = (
    ("heap, full", {"incremental": False}),
    ("RocksDB, full", {"backend": "rocksdb", "incremental": False}),
    ("RocksDB, incremental", {"backend": "rocksdb"}),
)


def _state_size() -> Benchmark:
    trials = [
        _sized(name, engine, "state", kind, size, variant, **more)
        for size in _STATE_BYTES
        for name, engine, variant in _STATEFUL
        for kind, more in _STATE_KINDS
    ]
    return Benchmark(
        "state-size",
        "How long a checkpoint takes, by the size of the state",
        CHECKPOINT,
        tuple(trials),
        plot="lines",
        x_label="state, bytes",
    )


def _recovery() -> Benchmark:
    trials = [
        _sized("Stillframe", "stillframe", "recovery", kind, size, "", **more)
        for size in _STATE_BYTES[:-1]
        for kind, more in (("heap", {}), ("RocksDB", {"backend": "rocksdb"}))
    ]
    target = Target(
        "from kill to the first correct output, 100 MB of state, local Spark",
        RECOVERY,
        "Stillframe, heap, 100 MB",
        at_most=5,
    )
    return Benchmark(
        "recovery",
        "From SIGKILL to the first correct output, by the size of the state",
        RECOVERY,
        tuple(trials),
        (target,),
        "lines",
        "state, bytes",
    )


_STATEFUL: tuple[tuple[str, Engine, str], ...] = (
    ("Stillframe", "stillframe", ""),
    ("Flink DataStream", "flink", "datastream"),
)


def _sized(
    name: str, engine: Engine, workload: Workload, kind: str, size: int, variant: str, **more: Any
) -> Trial:
    label = f"{name}, {kind}, {size // _MB:,} MB"
    made = trial_of(label, engine, workload, variant, state_bytes=size, **more)
    # Filling two gigabytes takes its time, and so does a checkpoint of them.
    seconds_max = made.seconds_max + 300 * (1 + size / 1e9)
    return replace(made, line=f"{name}, {kind}", x=float(size), seconds_max=seconds_max)


def _growth() -> Benchmark:
    trials = []
    for parallelism in (1, 2, 4):
        for name, engine, variant in _STATEFUL:
            trials.append(_grown(name, engine, variant, parallelism, parallelism))
    trials += [_grown("Stillframe", "stillframe", "", 2, n) for n in (4, 8, 16, 32, 64)]
    return Benchmark(
        "growth",
        "Page views by parallelism and by channels into each task",
        RATE,
        tuple(trials),
        plot="lines",
        x_label="channels into each task",
    )


def _grown(name: str, engine: Engine, variant: str, parallelism: int, channels: int) -> Trial:
    by_channels = channels != parallelism
    label = f"{name}, parallelism {parallelism}"
    label += f", {channels} channels" if by_channels else ""
    more: More = {"parallelism": parallelism, "channels": channels}
    made = trial_of(label, engine, "growth", variant, **more)
    line = f"{name}, parallelism 2" if by_channels else f"{name}, parallelism 1, 2, 4"
    return replace(made, line=line, x=float(channels))
