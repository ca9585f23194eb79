"""What is measured: every benchmark, the programs that run in it, and what they have to reach.

Theory of operation
-------------------
A benchmark is a list of trials, each one program of one engine with its parameters, and a list of
targets, each a figure of one of our trials, alone or as a ratio to that of a peer in the same run.
All of them are written down here and nowhere else; `programs/` has the code of each engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Engine = Literal["stillframe", "flink", "pyflink", "spark", "bytewax"]
Workload = Literal["strings", "integers", "rows", "latency", "state", "recovery", "growth"]
Plot = Literal["bars", "percentiles", "lines"]
_More = dict[str, Any]

PEERS: tuple[Engine, ...] = ("flink", "pyflink", "spark", "bytewax")

RATE = "records_per_second"
P99 = "latency_ms.p99"
CHECKPOINT = "checkpoints.p50_ms"
RECOVERY = "recovery_s"
LOWER_IS_BETTER = frozenset({P99, CHECKPOINT, RECOVERY})
UNITS = {RATE: "records/s", P99: "ms (p99)", CHECKPOINT: "ms (median)", RECOVERY: "s"}

_SECONDS, _SECONDS_QUICK = 20, 6
_WARM_UP_SHARE_QUICK = 0.4
_PARQUET_RECORDS = 32_000_000
_MB = 1_000_000

# How a program is given its work: everything it may ask for, with what it gets if nobody says.
_PARAMS: dict[str, Any] = {
    "variant": "",
    "source": "generator",
    "input": None,
    "input_records": None,
    "backend": "heap",
    "parallelism": 2,
    "checkpoint_interval_ms": 1000,
    "mode": "aligned",
    "incremental": True,
    "seconds": _SECONDS,
    "warmup_records": 0,
    "keys": 1000,
    "rate": None,
    "buffer_timeout_ms": None,
    "slow_channel": False,
    "state_bytes": None,
    "channels": None,
}
# Some five seconds of each: enough for a JVM to have compiled what matters, and to tell the speed.
_WARM_UP: dict[tuple[str, str], int] = {
    ("stillframe", "strings"): 60_000_000,
    ("stillframe", "integers"): 40_000_000,
    ("stillframe", "growth"): 40_000_000,
    ("stillframe", "rows"): 2_000_000,
    ("flink", "strings"): 10_000_000,
    ("flink", "integers"): 6_000_000,
    ("flink", "growth"): 10_000_000,
    ("spark", "strings"): 10_000_000,
    ("spark", "integers"): 10_000_000,
    ("spark", "rows"): 100_000,
    ("pyflink", "rows"): 50_000,
    ("bytewax", "strings"): 1_000_000,
    ("bytewax", "integers"): 300_000,
    ("bytewax", "rows"): 500_000,
}
_ROCKSDB_SHARE = {"stillframe": 0.5, "flink": 0.15, "spark": 1.0}
"""How many of those records on RocksDB, which is slower."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One program with its parameters."""

    label: str
    """Which no other trial of the benchmark has."""
    engine: Engine
    params: Mapping[str, Any]
    seconds_max: float
    """The program is ended after so long."""
    is_quick: bool = False
    line: str = ""
    """Of the line it is a point of, where the benchmark is drawn as lines."""
    x: float = 0.0

    @property
    def workload(self) -> Workload:
        workload: Workload = self.params["workload"]
        return workload


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a figure of one trial, or on its ratio to the best of others."""

    text: str
    metric: str
    of: str
    """The label of the trial."""
    against: tuple[str, ...] = ()
    at_least: float | None = None
    at_most: float | None = None

    @property
    def bound(self) -> str:
        unit = " ×" if self.against else f" {UNITS[self.metric].split()[0]}"
        if self.at_least is not None:
            return f"≥ {self.at_least:g}{unit}"
        return f"≤ {self.at_most:g}{unit}"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Trials that are compared with each other."""

    name: str
    title: str
    metric: str
    trials: tuple[Trial, ...]
    targets: tuple[Target, ...] = ()
    plot: Plot = "bars"
    x_label: str = ""


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
    """Those named (all if none is), with the trials of these peers and our own.

    With `quick`, only the trials that are meant for it, and less of each. Each is measured for so
    many `seconds`, if they are given.
    """
    engines = {"stillframe", *peers}
    wanted = set(names) or set(everything)
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
    return replace(trial, params={**trial.params, **shorter})


# --- The benchmarks ---------------------------------------------------------------------------


def _views() -> Benchmark:
    return Benchmark(
        "views",
        "Page views: 1,000 string keys, heap",
        RATE,
        (
            _trial("Stillframe", "stillframe", "strings", is_quick=True),
            _trial("Flink DataStream", "flink", "strings", "datastream", is_quick=True),
            _trial("Flink SQL", "flink", "strings", "sql"),
            _trial("Flink SQL mini-batch", "flink", "strings", "sql-minibatch", is_quick=True),
            _trial("Bytewax", "bytewax", "strings", is_quick=True),
        ),
        (
            _faster("Flink's Java DataStream", 5, "Flink DataStream"),
            _faster("Flink SQL with mini-batch", 4, "Flink SQL mini-batch"),
        ),
    )


def _users() -> Benchmark:
    keys: _More = {"keys": 1_000_000}
    return Benchmark(
        "users",
        "1,000,000 int64 keys, heap",
        RATE,
        (
            _trial("Stillframe", "stillframe", "integers", is_quick=True, **keys),
            _trial("Flink DataStream", "flink", "integers", "datastream", is_quick=True, **keys),
            _trial("Flink SQL", "flink", "integers", "sql", **keys),
            _trial("Flink SQL mini-batch", "flink", "integers", "sql-minibatch", **keys),
            _trial("Bytewax", "bytewax", "integers", is_quick=True, **keys),
        ),
        (_faster("Flink's Java DataStream", 5, "Flink DataStream"),),
    )


def _views_on_rocksdb() -> Benchmark:
    on: _More = {"backend": "rocksdb"}
    return Benchmark(
        "views-rocksdb",
        "Page views: 1,000 string keys, RocksDB",
        RATE,
        (
            _trial("Stillframe", "stillframe", "strings", **on),
            _trial("Flink DataStream", "flink", "strings", "datastream", **on),
            _trial("Spark SQL", "spark", "strings", "sql", **on),
        ),
        (
            _faster("Flink's RocksDB", 3, "Flink DataStream"),
            _faster("Spark Structured Streaming SQL with RocksDB state", 4, "Spark SQL"),
        ),
    )


def _users_on_rocksdb() -> Benchmark:
    on: _More = {"backend": "rocksdb", "keys": 1_000_000}
    return Benchmark(
        "users-rocksdb",
        "1,000,000 int64 keys, RocksDB",
        RATE,
        (
            _trial("Stillframe", "stillframe", "integers", **on),
            _trial("Flink DataStream", "flink", "integers", "datastream", **on),
            _trial("Spark SQL", "spark", "integers", "sql", **on),
        ),
        (_faster("Flink's RocksDB", 3, "Flink DataStream"),),
    )


def _views_from_parquet() -> Benchmark:
    of: _More = {"source": "parquet", "input_records": _PARQUET_RECORDS}
    return Benchmark(
        "views-parquet",
        f"Page views from Parquet: {_PARQUET_RECORDS:,} rows, 1,000 string keys",
        RATE,
        (
            _trial("Stillframe", "stillframe", "strings", **of),
            _trial("Flink DataStream", "flink", "strings", "datastream", **of),
            _trial("Flink SQL mini-batch", "flink", "strings", "sql-minibatch", **of),
            _trial("Spark SQL", "spark", "strings", "sql", backend="rocksdb", **of),
        ),
    )


_PYFLINK = ("PyFlink process mode", "PyFlink thread mode")


def _rows() -> Benchmark:
    return Benchmark(
        "rows",
        "A user's Python function for each row: map, then value state read and written by row",
        RATE,
        (
            _trial("Stillframe", "stillframe", "rows", "each-row", is_quick=True),
            _trial(_PYFLINK[0], "pyflink", "rows", "process", is_quick=True),
            _trial(_PYFLINK[1], "pyflink", "rows", "thread", is_quick=True),
        ),
        (_faster("PyFlink, the better of its modes", 20, *_PYFLINK),),
    )


def _rows_by_key() -> Benchmark:
    on_disk: _More = {"backend": "rocksdb"}
    pandas = "Spark transformWithStateInPandas"
    return Benchmark(
        "rows-by-key",
        "The same with value state read and written once for the rows of a key in one call",
        RATE,
        (
            _trial("Stillframe", "stillframe", "rows", "each-call", is_quick=True),
            _trial(pandas, "spark", "rows", "pandas", is_quick=True, **on_disk),
            _trial("Spark transformWithState", "spark", "rows", "rows", **on_disk),
            _trial("Bytewax", "bytewax", "rows", is_quick=True),
        ),
        (_faster(pandas, 10, pandas), _faster("Bytewax in two processes", 2, "Bytewax")),
    )


_MODES: dict[str, _More] = {
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
            more: _More = {**_MODES[mode], "variant": "datastream", "buffer_timeout_ms": timeout_ms}
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
    return _trial(_at(label, mode, rate), engine, "latency", is_quick=is_quick, rate=rate, **more)


def _at(label: str, mode: str, rate: int) -> str:
    return ", ".join(filter(None, (label, mode, f"{rate:,}/s")))


def _slow_channel() -> Benchmark:
    slow: _More = {"rate": 10_000, "slow_channel": True}
    trials = [
        _trial(f"Stillframe, {mode}", "stillframe", "latency", **slow, **more)
        for mode, more in _MODES.items()
    ]
    trials += [
        _trial(
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
                trial = _trial(
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


_STATE_BYTES = (1 * _MB, 10 * _MB, 100 * _MB, 1000 * _MB, 2000 * _MB)
_STATE_KINDS: tuple[tuple[str, _More], ...] = (
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
    made = _trial(label, engine, workload, variant, state_bytes=size, **more)
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
    more: _More = {"parallelism": parallelism, "channels": channels}
    made = _trial(label, engine, "growth", variant, **more)
    line = f"{name}, parallelism 2" if by_channels else f"{name}, parallelism 1, 2, 4"
    return replace(made, line=line, x=float(channels))


# --- Their parts ------------------------------------------------------------------------------


def _trial(
    label: str,
    engine: Any,
    workload: Any,
    variant: str = "",
    *,
    is_quick: bool = False,
    **more: Any,
) -> Trial:
    assert set(more) <= set(_PARAMS), f"{label} has parameters nobody knows: {sorted(more)}"
    params = {**_PARAMS, "workload": workload, "variant": variant, **more}
    warm_up = _WARM_UP.get((engine, workload), 0)
    if params["backend"] == "rocksdb":
        warm_up = int(warm_up * _ROCKSDB_SHARE[engine])
    params["warmup_records"] = warm_up
    return Trial(label, engine, params, 240.0 + 6 * params["seconds"], is_quick)


def _faster(peer: str, times: float, *against: str) -> Target:
    return Target(f"vs {peer}", RATE, "Stillframe", against, at_least=times)
