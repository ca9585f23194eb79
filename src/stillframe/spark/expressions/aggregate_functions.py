"""What an aggregate function of Spark's is among ours: which one, what it reads and is given.

A new one is a line of `_FUNCTIONS`, beside its class in `state/accumulators.py`. What is not there
is left to Spark's own code, in an evaluator beside the slot.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError
from pyarrow import types
from pyspark import SparkContext
from pyspark.sql import SparkSession

from stillframe.api.aggregates import WRAPS, AggregateFunction
from stillframe.errors import BuildError
from stillframe.spark.expressions.nodes import (
    constant_of,
    literal_of,
    mode_of,
    refused_mode,
    type_of,
)
from stillframe.spark.expressions.spark_aggregates import aggregate_by_spark
from stillframe.spark.steps import children, class_name, sequence

_OF_PYTHON = ("PythonUDAF", "PythonUDF")
"""Which no JVM computes."""
_NO_MATTER_HOW_OFTEN = ("min", "max", "bit_and", "bit_or", "collect_set", "approx_count_distinct")
"""For which DISTINCT changes nothing."""
_WITHOUT_DISTINCT = ("first", "last", "min_by", "max_by", "mode")
_DOUBLE_DIGITS = 15
"""A decimal with more is not the same after it has been a double."""
_FIRST_TABLE_BITS = 4
_TABLES = 15


@dataclass(frozen=True)
class FunctionRead:
    """An aggregate function, understood."""

    function: AggregateFunction
    arguments: list[JavaObject]
    """What it reads: columns, or expressions of such."""
    parameters: tuple[Any, ...]
    is_distinct: bool

    @property
    def reads_what_counts(self) -> bool:
        """Whether it has a filter and counts nulls."""
        return self.function in ("first", "last") and bool(self.parameters[1])


def read_function(spark: SparkSession, node: JavaObject) -> FunctionRead:
    """What an `AggregateExpression` computes: as we do it, else as Spark does."""
    function = _meant(node.aggregateFunction())
    try:
        return _native(node, function)
    except BuildError:
        if class_name(function) in _OF_PYTHON:
            raise
    return read_for_spark(spark, node)


def read_for_spark(spark: SparkSession, node: JavaObject) -> FunctionRead:
    """The same, computed by Spark's own code whether or not we have a form for it."""
    arguments, by_spark = aggregate_by_spark(spark, node, _meant(node.aggregateFunction()))
    return FunctionRead("by_spark", arguments, (by_spark,), bool(node.isDistinct()))


def _meant(function: JavaObject) -> JavaObject:
    """What it is a name for, if it is one."""
    while True:
        try:
            function = function.replacement()
        except Py4JError:
            return function


def _native(node: JavaObject, function: JavaObject) -> FunctionRead:
    """Raises if we have no form for it."""
    found = _FUNCTIONS.get(class_name(function))
    if found is None:
        raise refused_aggregate(node, "is not among those a stream keeps")
    kind, given = found
    arguments, parameters = given(node, function)
    if kind in ("sum", "avg"):
        mode, type_ = mode_of(function), type_of(function)
        if mode == "LEGACY" and types.is_integer(type_):
            parameters = (WRAPS,)
        elif mode != "ANSI" and not types.is_floating(type_):
            raise refused_mode(node, mode)
    is_distinct = bool(node.isDistinct()) and kind not in _NO_MATTER_HOW_OFTEN
    if is_distinct and kind in _WITHOUT_DISTINCT:
        raise refused_aggregate(node, "has DISTINCT, which a stream does not keep for it")
    if is_distinct and kind == "count":
        parameters = (len(arguments) > 1,)
    return FunctionRead(kind, arguments, parameters, is_distinct)


def refused_aggregate(node: JavaObject, why: str) -> BuildError:
    """The error for an aggregate that a stream cannot have."""
    return BuildError(
        f"the aggregate {node.sql()} {why}: use another one of those in docs/expressions.md,"
        " or compute it from the result"
    )


_Given = tuple[list[JavaObject], tuple[Any, ...]]
"""What is read, and the parameters."""


def _all_read(node: JavaObject, function: JavaObject) -> _Given:
    return children(function), ()


def _first_or_last(node: JavaObject, function: JavaObject) -> _Given:
    ignores_nulls = bool(function.ignoreNulls())
    # A filter makes null of what does not count, so what counts has to be told beside the value.
    return [function.child()], (ignores_nulls, node.filter().isDefined() and not ignores_nulls)


def _collected(node: JavaObject, function: JavaObject) -> _Given:
    try:
        ignores_nulls = bool(function.ignoreNulls())
    except Py4JError:  # in older versions there is no choice
        ignores_nulls = True
    if not ignores_nulls:
        raise refused_aggregate(node, "keeps nulls, which a stream's lists do not")
    return [function.child()], ()


def _joined(node: JavaObject, function: JavaObject) -> _Given:
    child, orders = function.child(), sequence(function.orderExpressions())
    order = None
    if orders:
        if len(orders) > 1 or not orders[0].child().semanticEquals(child):
            raise refused_aggregate(node, "is ordered by something else than what it joins")
        order = "asc" if class_name(orders[0].direction()).startswith("Ascending") else "desc"
    between = _constant(node, function.delimiter())
    if between is None:
        between = b"" if types.is_binary(type_of(child)) else ""
    return [child], (between, order)


def _approximate_count(node: JavaObject, function: JavaObject) -> _Given:
    bits = math.ceil(2.0 * math.log(1.106 / float(function.relativeSD())) / math.log(2.0))
    return [function.child()], (bits, *_tables(bits))


def _tables(bits: int) -> tuple[float, tuple[float, ...], tuple[float, ...]]:
    """What Spark knows its estimates to be off by, for so many bits: it is in Spark's own code."""
    table = bits - _FIRST_TABLE_BITS
    if not 0 <= table < _TABLES:
        return 0.0, (), ()
    jvm: Any = SparkContext._active_spark_context._jvm  # type: ignore[union-attr]
    name = "HyperLogLogPlusPlusHelper$"
    helper = getattr(getattr(jvm.org.apache.spark.sql.catalyst.util, name), "MODULE$")

    def numbers(array: JavaObject) -> tuple[float, ...]:
        return tuple(map(float, json.loads(jvm.java.util.Arrays.toString(array))))

    estimates, biases = helper.RAW_ESTIMATE_DATA()[table], helper.BIAS_DATA()[table]
    return numbers(helper.THRESHOLDS())[table], numbers(estimates), numbers(biases)


def _shares(node: JavaObject, percentages: JavaObject) -> tuple[tuple[float, ...], bool]:
    """Which percentiles, and whether they become an array."""
    if not types.is_list(type_of(percentages)):
        return (float(_constant(node, percentages)),), False
    array = percentages.eval(None)
    return tuple(float(array.getDouble(at)) for at in range(array.numElements())), True


def _percentile(node: JavaObject, function: JavaObject) -> _Given:
    frequency = function.frequencyExpression()
    if _constant(node, frequency) != 1:
        raise refused_aggregate(node, "counts each record more than once")
    shares, is_list = _shares(node, function.percentageExpression())
    return [function.child()], (shares, is_list, bool(function.reverse()))


def _percentile_disc(node: JavaObject, function: JavaObject) -> _Given:
    try:
        is_legacy = bool(function.legacyCalculation())
    except Py4JError:
        is_legacy = False
    if is_legacy:
        raise refused_aggregate(node, "is computed in Spark's legacy way")
    return _percentile(node, function)


def _percentile_approx(node: JavaObject, function: JavaObject) -> _Given:
    type_ = type_of(function.child())
    if types.is_decimal(type_) and type_.precision > _DOUBLE_DIGITS:
        raise refused_aggregate(node, f"makes doubles of {type_}, which loses digits")
    shares, is_list = _shares(node, function.percentageExpression())
    accuracy = _constant(node, function.accuracyExpression())
    return [function.child()], (shares, is_list, int(accuracy))


def _mode(node: JavaObject, function: JavaObject) -> _Given:
    is_reversed = function.reverseOpt()
    is_highest = not is_reversed.isEmpty() and not bool(is_reversed.get())
    return [function.child()], (is_highest,)


def _constant(node: JavaObject, part: JavaObject) -> Any:
    value = constant_of(part)
    if value is None:
        raise refused_aggregate(
            node, f"is given {part.sql()}, which is not the same for all records"
        )
    if value[0] is None:
        return None
    if types.is_binary(type_of(part)):
        return bytes(value[0])
    return literal_of(part, value[0]).value.as_py()


_FUNCTIONS: dict[str, tuple[AggregateFunction, Callable[[JavaObject, JavaObject], _Given]]] = {
    "Count": ("count", _all_read),
    "Sum": ("sum", _all_read),
    "Min": ("min", _all_read),
    "Max": ("max", _all_read),
    "Average": ("avg", _all_read),
    "VariancePop": ("var_pop", _all_read),
    "VarianceSamp": ("var_samp", _all_read),
    "StddevPop": ("stddev_pop", _all_read),
    "StddevSamp": ("stddev_samp", _all_read),
    "RegrReplacement": ("squares", _all_read),
    "Skewness": ("skewness", _all_read),
    "Kurtosis": ("kurtosis", _all_read),
    "CovPopulation": ("covar_pop", _all_read),
    "CovSample": ("covar_samp", _all_read),
    "Corr": ("corr", _all_read),
    "RegrR2": ("regr_r2", _all_read),
    "RegrSXY": ("regr_sxy", _all_read),
    "RegrSlope": ("regr_slope", _all_read),
    "RegrIntercept": ("regr_intercept", _all_read),
    "BitAndAgg": ("bit_and", _all_read),
    "BitOrAgg": ("bit_or", _all_read),
    "BitXorAgg": ("bit_xor", _all_read),
    "First": ("first", _first_or_last),
    "Last": ("last", _first_or_last),
    "MinBy": ("min_by", _all_read),
    "MaxBy": ("max_by", _all_read),
    "CollectList": ("collect_list", _collected),
    "CollectSet": ("collect_set", _collected),
    "ListAgg": ("listagg", _joined),
    "HyperLogLogPlusPlus": ("approx_count_distinct", _approximate_count),
    "Percentile": ("percentile", _percentile),
    "PercentileDisc": ("percentile_disc", _percentile_disc),
    "ApproximatePercentile": ("percentile_approx", _percentile_approx),
    "Mode": ("mode", _mode),
}


def pair_type(arguments: list[pa.DataType]) -> pa.DataType:
    """Of what is read where an aggregate reads several columns."""
    return pa.struct([pa.field(f"_{place}", type_) for place, type_ in enumerate(arguments, 1)])
