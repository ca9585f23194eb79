"""What a benchmark is made of: trials, each one program of one engine, and targets for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Engine = Literal["stillframe", "flink", "pyflink", "spark", "bytewax", "client"]
"""`client` is a bare client of the system that a connector speaks to."""
Workload = Literal[
    "strings",
    "integers",
    "rows",
    "latency",
    "state",
    "recovery",
    "growth",
    "kafka_counts",
    "kafka_values",
    "kafka_sink",
    "kafka_latency",
    "postgres_sink",
    "mysql_sink",
    "s3_sink",
    "json_counts",
    "words",
    "decimals",
    "distinct",
    "evaluated",
]
Plot = Literal["bars", "percentiles", "lines"]
More = dict[str, Any]

PEERS: tuple[Engine, ...] = ("flink", "pyflink", "spark", "bytewax", "client")

RATE = "records_per_second"
P99 = "latency_ms.p99"
CHECKPOINT = "checkpoints.p50_ms"
RECOVERY = "recovery_s"
LOWER_IS_BETTER = frozenset({P99, CHECKPOINT, RECOVERY})
UNITS = {RATE: "records/s", P99: "ms (p99)", CHECKPOINT: "ms (median)", RECOVERY: "s"}

_SECONDS = 20

# How a program is given its work: everything it may ask for, with what it gets if nobody says.
_PARAMS: dict[str, Any] = {
    "variant": "",
    "source": "generator",
    "input": None,
    "input_records": None,
    "warmup_input": None,
    "brokers": None,
    "server": None,
    "link_bytes_per_second": None,
    "output": None,
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
    "metrics_interval": None,
    "pages": 0,
    "lookups": False,
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


def trial_of(
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


def faster(peer: str, times: float, *against: str) -> Target:
    return Target(f"vs {peer}", RATE, "Stillframe", against, at_least=times)
