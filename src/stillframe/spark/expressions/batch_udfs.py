"""Python UDFs of whole columns: pandas' and Arrow's, plain and over iterators.

Theory of operation: what Spark's own Python worker does for such a function, done in the slot: the
arguments become what the function takes, and what it returns becomes a column of the declared type,
both by PySpark's own conversions. One that takes an iterator is called for each batch of the stream
with an iterator over that batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import pyarrow as pa
import pyspark
from py4j.java_gateway import JavaObject
from pyspark.sql import SparkSession
from pyspark.sql.types import DataType, StructField, StructType
from pyspark.util import PythonEvalType

from stillframe.spark.expressions.nodes import refused, spark_type_of
from stillframe.spark.steps import children
from stillframe.spark.types import to_arrow_type

_PANDAS = (PythonEvalType.SQL_SCALAR_PANDAS_UDF, PythonEvalType.SQL_SCALAR_PANDAS_ITER_UDF)
_ARROW = tuple(
    getattr(PythonEvalType, name, None)  # PySpark 4.1 brought them
    for name in ("SQL_SCALAR_ARROW_UDF", "SQL_SCALAR_ARROW_ITER_UDF")
)
_SETTINGS = {
    "safecheck": ("spark.sql.execution.pandas.convertToArrowArraySafely", "false"),
    "assign_cols_by_name": (
        "spark.sql.legacy.execution.pandas.groupedMap.assignColumnsByName",
        "true",
    ),
    "int_to_decimal_coercion_enabled": (
        "spark.sql.execution.pythonUDF.pandas.intToDecimalCoercionEnabled",
        "false",
    ),
}
"""How values that pandas holds become columns, by the names of PySpark's arguments."""
_ZONE = "spark.sql.session.timeZone"


@dataclass(frozen=True, slots=True)
class BatchUdf:
    """A user's function of columns as one of Arrow arrays; called in the slots."""

    function: Callable[..., Any]
    of_pandas: bool
    takes_iterator: bool
    given: StructType
    made: DataType
    zone: str
    settings: tuple[tuple[str, bool], ...]

    def __call__(self, columns: Sequence[pa.Array], rows: int) -> pa.Array:
        arguments = self._as_pandas(columns, rows) if self.of_pandas else list(columns)
        if self.takes_iterator:
            given = arguments[0] if len(arguments) == 1 else tuple(arguments)
            results = list(self.function(iter([given])))
        else:
            results = [self.function(*arguments)]
        parts = [part for result in results for part in self._columns(result)]
        found = sum(map(len, parts))
        if found != rows:
            raise ValueError(f"it returned {found} values for {rows} rows")
        return pa.concat_arrays(parts)

    def _as_pandas(self, columns: Sequence[pa.Array], rows: int) -> list[Any]:
        from pyspark.sql.conversion import ArrowBatchTransformer

        batch = pa.RecordBatch.from_arrays(list(columns), names=self.given.names)
        made: list[Any] = ArrowBatchTransformer.to_pandas(
            batch, timezone=self.zone, schema=self.given, df_for_struct=True
        )
        return made[: len(columns)]

    def _columns(self, result: Any) -> Iterator[pa.Array]:
        type_ = to_arrow_type(self.made)
        if not hasattr(result, "__len__"):
            raise TypeError(f"it returned a {type(result).__name__}, which is no column")
        if not self.of_pandas:
            chunks = result.chunks if isinstance(result, pa.ChunkedArray) else [result]
            yield from (chunk.cast(type_) for chunk in chunks)
            return
        from pyspark.sql.conversion import PandasToArrowConversion

        batch = PandasToArrowConversion.convert(
            [result],
            StructType([StructField("made", self.made)]),
            timezone=self.zone,
            arrow_cast=True,
            **dict(self.settings),
        )
        yield batch.column(0).cast(type_)


def _refuse_without_conversions(node: JavaObject) -> None:
    try:
        from pyspark.sql.conversion import (  # noqa: F401 - PySpark 4.2 brought them
            ArrowBatchTransformer,
            PandasToArrowConversion,
        )
    except ImportError:
        why = (
            f"is a pandas function, which Stillframe {version('stillframe')} calls with PySpark"
            f" 4.2 and newer, and this is PySpark {pyspark.__version__}"
        )
        what_to_do = "use udf, or arrow_udf of PySpark 4.1, or compute it in mapInPandas"
        raise refused(node, why, what_to_do) from None


def batch_udf_of(node: JavaObject, function: Callable[..., Any]) -> BatchUdf:
    """What the user wrote, of a UDF that is no function of rows."""
    kind = node.evalType()
    if kind not in (*_PANDAS, *_ARROW):
        raise refused(node, "is a Python function of groups of rows, which a stream does not call")
    if kind in _PANDAS:
        _refuse_without_conversions(node)
    fields = [
        StructField(f"_{place}", spark_type_of(child)) for place, child in enumerate(children(node))
    ]
    conf = SparkSession.active().conf
    settings = ((name, conf.get(*each) == "true") for name, each in _SETTINGS.items())
    return BatchUdf(
        function,
        kind in _PANDAS,
        kind in (_PANDAS[1], _ARROW[1]),
        StructType(fields),
        spark_type_of(node),
        str(conf.get(_ZONE)),
        tuple(settings),
    )
