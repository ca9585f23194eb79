"""What the slots of an executor may take beside Spark's own memory, added up before a job starts.

YARN and Kubernetes end an executor that takes more than `spark.executor.memory` and
`spark.executor.memoryOverhead` together. Slots are Python processes: all that they take, and the
JVM with Spark's evaluator, is overhead to Spark. What the state takes on the heap nobody knows
before; everything else has a bound.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark import SparkConf

from stillframe.config import JobConfig, parse_bytes
from stillframe.graph.logical import evaluated_by_spark
from stillframe.graph.plan import Plan
from stillframe.ids import SubtaskIndex
from stillframe.runtime.disk import has_database
from stillframe.spark.deployment.capacity import number_of

_MIB = 1 << 20
_PYTHON_BYTES = 150 * _MIB
"""A slot's process with its packages, before it has read a record."""
_BESIDE_THE_HEAP_BYTES = 100 * _MIB
"""What a JVM takes besides its heap."""

_OVERHEAD = "spark.executor.memoryOverhead"
_OVERHEAD_MIN_MIB = 384


def memory_of_slot(plan: Plan, config: JobConfig) -> dict[str, int]:
    """The most that the first slot, which has a subtask of every task, may take, by what it is for;
    in bytes, without the state on the heap."""
    operators = [planned.operator for _, planned in plan.operators()]
    channels = sum(len(edge.sources_of(SubtaskIndex(0))) for edge in plan.edges)
    parts = {"Python": _PYTHON_BYTES, "network": channels * config.channel_buffer_bytes}
    if config.state_backend == "rocksdb" and any(map(has_database, operators)):
        parts["rocksdbMemory"] = config.rocksdb_memory_bytes
    if any(map(evaluated_by_spark, operators)):
        parts["evaluatorMemory"] = config.evaluator_memory_bytes + _BESIDE_THE_HEAP_BYTES
    return parts


def too_little_overhead(conf: SparkConf, plan: Plan, config: JobConfig) -> str | None:
    """A sentence, if the executors have less memory for slots than slots may take."""
    has_bound = conf.get("spark.master", "").startswith(("yarn", "k8s://"))
    if not has_bound and conf.get(_OVERHEAD) is None:
        return None
    per_executor = (number_of(conf, "spark.executor.cores") or 1) // (
        number_of(conf, "spark.task.cpus") or 1
    )
    slots = min(max(1, per_executor), plan.slots)
    parts = memory_of_slot(plan, config)
    needed_mib = -(-slots * sum(parts.values()) // _MIB)
    overhead_mib = _overhead_mib(conf)
    if needed_mib <= overhead_mib:
        return None
    return (
        f"the {slots} slot{'' if slots == 1 else 's'} of job {plan.job!r} in one executor may take"
        f" {needed_mib:,} MiB without state on the heap ({_in_words(parts)} each), and"
        f" {_OVERHEAD} leaves {overhead_mib:,} MiB for them: set it to {needed_mib}m or more"
    )


def _in_words(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size // _MIB:,}" for name, size in parts.items())


def _overhead_mib(conf: SparkConf) -> int:
    """As Spark reckons it where it is not set; with what is given to Python besides."""
    memory_mib = _mib(conf, "spark.executor.memory") or 1024
    factor = float(conf.get("spark.executor.memoryOverheadFactor", "0.1"))
    overhead = _mib(conf, _OVERHEAD) or max(_OVERHEAD_MIN_MIB, int(memory_mib * factor))
    return overhead + (_mib(conf, "spark.executor.pyspark.memory") or 0)


def _mib(conf: SparkConf, name: str) -> int | None:
    value = conf.get(name)
    if value is None:
        return None
    return int(value) if value.isdigit() else parse_bytes(name, value) // _MIB
