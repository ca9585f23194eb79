"""What slots may take is added up and compared with what executors have for them."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark import SparkConf

from stillframe.api.aggregates import AggregateCall
from stillframe.config import JobConfig
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.graph.expressions import Named, SparkProjection, SparkResult
from stillframe.graph.logical import Aggregate, Node, Project, Read, Write
from stillframe.graph.plan import Plan, build_plan
from stillframe.spark.deployment.memory import memory_of_slot, too_little_overhead

MIB = 1 << 20


def plan_of(*, evaluates: bool) -> Plan:
    """Clicks counted by app, in four slots; the app by Spark's evaluator or as it is."""
    source = ClickSource(records=10, partitions=4)
    node = Node(Read(source), source.schema, ())
    if evaluates:
        projection = SparkProjection((), False, "", "", (), (), ())
        app = Named("app_id", SparkResult(projection, 0, pa.string(), "soundex(app_id)"))
        node = Node(Project((app,)), pa.schema([("app_id", pa.string())]), (node,))
    call = AggregateCall("count", None, "count(1)", pa.int64())
    schema = pa.schema([("app_id", pa.string()), ("count(1)", pa.int64())])
    counted = Node(Aggregate(("app_id",), (call,), None), schema, (node,))
    return build_plan("clicks", [Node(Write(DiscardSink()), schema, (counted,))], 4)


def config(**more: str) -> JobConfig:
    return JobConfig(checkpoint_location="/nowhere", **more)  # type: ignore[arg-type]


def test_a_slot_takes_what_its_channels_its_database_and_its_evaluator_may_take() -> None:
    plain = memory_of_slot(plan_of(evaluates=False), config())
    assert plain == {"Python": 150 * MIB, "network": 4 * 4 * MIB}
    on_disk = memory_of_slot(plan_of(evaluates=False), config(state_backend="rocksdb"))
    assert on_disk == {**plain, "rocksdbMemory": 256 * MIB}
    evaluated = memory_of_slot(plan_of(evaluates=True), config())
    assert evaluated == {**plain, "evaluatorMemory": 612 * MIB}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spark.master": "local[4]"}, None),
        ({"spark.master": "spark://host:7077"}, None),
        ({"spark.master": "yarn", "spark.executor.memory": "20g"}, None),
        ({"spark.master": "yarn", "spark.executor.memoryOverhead": "778m"}, None),
        ({"spark.master": "yarn", "spark.executor.pyspark.memory": "394m"}, None),
        (
            {"spark.master": "yarn"},
            "the 1 slot of job 'clicks' in one executor may take 778 MiB without state on the heap"
            " (Python 150, network 16, evaluatorMemory 612 each), and spark.executor.memoryOverhead"
            " leaves 384 MiB for them: set it to 778m or more",
        ),
        ({"spark.master": "yarn", "spark.executor.cores": "8"}, "the 4 slots of job 'clicks'"),
        ({"spark.master": "k8s://host", "spark.executor.memoryOverhead": "777"}, "777 MiB"),
    ],
)
def test_executors_with_too_little_beside_sparks_own_memory_are_told(
    settings: dict[str, str], words: str | None
) -> None:
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    told = too_little_overhead(conf, plan_of(evaluates=True), config())
    assert told is None if words is None else words in (told or "")
