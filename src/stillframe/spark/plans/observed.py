"""`observe`: what Spark computes of the rows that pass a place of the plan, for each epoch.

The rows are staged as for `foreachBatch`, with those of their columns that the metrics read. When
the checkpoint is complete, Spark itself computes the metrics: whatever it aggregates is there.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from py4j.java_gateway import JavaObject
from pyspark.sql import DataFrame, SparkSession

from stillframe.connectors.staged import StagedSink
from stillframe.graph.logical import Write
from stillframe.graph.plan import Plan
from stillframe.spark.frames.epochs import FrameOfEpoch
from stillframe.spark.steps import analyzed, as_scala, id_of, sequence

_EPOCHS_KEPT_MAX = 100
"""As many as there is progress of."""


class Observing:
    """The function of the epochs of one `observe`, a node of Spark's plan."""

    def __init__(self, spark: SparkSession, plan: JavaObject) -> None:
        self._spark = spark
        self._plan = plan
        self.name = str(plan.name())
        self._told: OrderedDict[int, dict[str, Any]] = OrderedDict()

    def columns(self) -> list[str]:
        """What has to be staged; a column at least, so that rows can be counted."""
        found = {
            id_of(column)
            for metric in sequence(self._plan.metrics())
            for column in sequence(metric.references().toSeq())
        }
        names = [str(each.name()) for each in self._passing() if id_of(each) in found]
        return names or [str(self._passing()[0].name())]

    def __call__(self, rows: DataFrame, epoch: int) -> None:
        jvm: Any = self._spark._jvm
        sql = jvm.org.apache.spark.sql
        known = {str(each.name()): each for each in self._passing()}
        named = [
            sql.catalyst.expressions.Alias(
                column,
                column.name(),
                known[str(column.name())].exprId(),
                as_scala(jvm, []),
                jvm.scala.Option.empty(),
                as_scala(jvm, []),
            )
            for column in sequence(analyzed(rows).output())
        ]
        leaf = sql.catalyst.plans.logical.Project(as_scala(jvm, named), analyzed(rows))
        plan = self._plan.withNewChildren(as_scala(jvm, [leaf]))
        execution = sql.classic.Dataset.ofRows(self._spark._jsparkSession, plan).queryExecution()
        execution.toRdd().count()
        self._told[epoch] = json.loads(execution.observedMetrics().apply(self.name).json())
        while len(self._told) > _EPOCHS_KEPT_MAX:
            self._told.popitem(last=False)

    def of(self, epoch: int) -> dict[str, Any] | None:
        """The metrics of this epoch; None: they are not known yet, or not any more."""
        return self._told.get(epoch)

    def _passing(self) -> list[JavaObject]:
        return sequence(self._plan.child().output())


def observed_in(plan: Plan) -> list[Observing]:
    """Every `observe` of a job, as its driver has it."""
    sinks = [each.operator.sink for _, each in plan.operators() if isinstance(each.operator, Write)]
    handlers = [each.handler for each in sinks if isinstance(each, StagedSink)]
    functions = [each.function for each in handlers if isinstance(each, FrameOfEpoch)]
    return [each for each in functions if isinstance(each, Observing)]
