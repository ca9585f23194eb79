"""Python UDFs of whole columns: pandas' and Arrow's, plain and over iterators.

Theory of operation: what Spark's own Python worker does for such a function, done in the slot: the
arguments become what the function takes, and what it returns becomes a column of the declared type,
both by PySpark's own conversions. One that takes an iterator is called for each batch of the stream
with an iterator over that batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from py4j.java_gateway import JavaObject
from pyspark.sql.types import StructField, StructType
from pyspark.util import PythonEvalType

from stillframe.spark.expressions.nodes import refused, spark_type_of
from stillframe.spark.expressions.pandas_columns import (
    PandasColumns,
    in_zone,
    pandas_columns,
    zone_of_session,
)
from stillframe.spark.steps import children
from stillframe.spark.types import to_arrow_type
from stillframe.user_code import lazily

_PANDAS = (PythonEvalType.SQL_SCALAR_PANDAS_UDF, PythonEvalType.SQL_SCALAR_PANDAS_ITER_UDF)
_ARROW = tuple(
    getattr(PythonEvalType, name, None)  # PySpark 4.1 brought them
    for name in ("SQL_SCALAR_ARROW_UDF", "SQL_SCALAR_ARROW_ITER_UDF")
)


@dataclass(frozen=True, slots=True)
class BatchUdf:
    """A user's function of columns as one of Arrow arrays; called in the slots."""

    function: Callable[..., Any]
    made: pa.DataType
    pandas: PandasColumns | None
    """None: the function takes Arrow arrays."""
    takes_iterator: bool
    zone: str
    """The session's, which all instants are given in."""

    def __call__(self, columns: Sequence[pa.Array], rows: int) -> pa.Array:
        arguments = self._arguments(columns)
        if self.takes_iterator:
            given = arguments[0] if len(arguments) == 1 else tuple(arguments)
            results = list(lazily(self.function(iter([given]))))
        else:
            results = [self.function(*arguments)]
        parts = [part for result in results for part in self._columns(result)]
        found = sum(map(len, parts))
        if found != rows:
            raise ValueError(f"it returned {found} values for {rows} rows")
        return pa.concat_arrays(parts)

    def _arguments(self, columns: Sequence[pa.Array]) -> list[Any]:
        if self.pandas is None:
            return in_zone(columns, self.zone)
        return self.pandas.as_pandas(columns)

    def _columns(self, result: Any) -> Iterator[pa.Array]:
        if not hasattr(result, "__len__"):
            raise TypeError(f"it returned a {type(result).__name__}, which is no column")
        if self.pandas is None:
            chunks = result.chunks if isinstance(result, pa.ChunkedArray) else [result]
            yield from (chunk.cast(self.made) for chunk in chunks)
        else:
            yield self.pandas.as_column(result).cast(self.made)


def batch_udf_of(node: JavaObject, function: Callable[..., Any]) -> BatchUdf:
    """What the user wrote, of a UDF that is no function of rows."""
    kind = node.evalType()
    if kind not in (*_PANDAS, *_ARROW):
        raise refused(node, "is a Python function of groups of rows, which a stream does not call")
    fields = [
        StructField(f"_{place}", spark_type_of(child)) for place, child in enumerate(children(node))
    ]
    made = spark_type_of(node)
    return BatchUdf(
        function,
        to_arrow_type(made),
        pandas_columns(StructType(fields), made) if kind in _PANDAS else None,
        kind in (_PANDAS[1], _ARROW[1]),
        zone_of_session(),
    )
