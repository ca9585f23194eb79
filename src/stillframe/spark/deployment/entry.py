"""What Spark calls on an executor: one barrier task becomes one slot."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyspark
from pyspark import BarrierTaskContext, SparkFiles

from stillframe.errors import StartRefused
from stillframe.evaluator.process import SparkHere
from stillframe.graph.launch import SlotLaunch
from stillframe.ids import SlotIndex
from stillframe.runtime.slot import run_slot
from stillframe.spark.deployment.java import java_here

RESULT_SCHEMA = "slot int"
_RESULT = pa.schema([("slot", pa.int32())])


def spark_here() -> SparkHere:
    """The Java and the classes of the executor whose worker this is, and the session's jars."""
    homes = [os.environ.get("SPARK_HOME", ""), str(Path(pyspark.__file__).parent)]
    # Where YARN unpacks Spark for its containers.
    places = [*(Path(home) / "jars" for home in homes if home), Path("__spark_libs__")]
    jars = next((place for place in places if any(place.glob("spark-catalyst_*.jar"))), None)
    if jars is None:
        raise StartRefused(
            "an expression of the job needs Spark's evaluator, but Spark's jars are in none of"
            f" {', '.join(map(str, places))} on host {socket.gethostname()}: set SPARK_HOME there,"
            " for example with spark.executorEnv.SPARK_HOME"
        )
    brought = sorted(Path(SparkFiles.getRootDirectory()).glob("*.jar"))
    return SparkHere(str(java_here()), [str(jars / "*"), *map(str, brought)])


class SlotEntry:
    """The function given to `mapInArrow`: runs a slot to its end, then yields its number."""

    def __init__(self, launch: SlotLaunch, host: str | None, is_fed: bool) -> None:
        self._launch = launch
        self._host = host
        self._is_fed = is_fed

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = BarrierTaskContext.get()
        slot = SlotIndex(context.partitionId())
        host = self._host or context.getTaskInfos()[slot].address.rsplit(":", 1)[0]
        feed = batches if self._is_fed else None
        run_slot(self._launch, slot, host, os.getpid(), feed, spark_here)
        yield pa.record_batch([pa.array([slot], pa.int32())], schema=_RESULT)
