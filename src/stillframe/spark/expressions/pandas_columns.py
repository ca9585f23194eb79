"""Columns as what a pandas function takes, and what it returns as columns: by PySpark's own rules.

Theory of operation: the rules are those of Spark's Python worker, and so they are called, not
written again. Up to PySpark 4.1 they are methods of the worker's serializer; since 4.2 they are
functions of `pyspark.sql.conversion`. Both are called in the slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession, conversion
from pyspark.sql.types import DataType, StructField, StructType

from stillframe.config import parse_flag
from stillframe.zones import common_name, type_in_zone

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
class PandasColumns:
    """Of one function: what it is given, what it makes, and the session's settings for both."""

    given: StructType
    made: DataType
    zone: str
    settings: tuple[tuple[str, bool], ...]

    def as_pandas(self, columns: Sequence[pa.Array]) -> list[Any]:
        """Each as a Series; a column of structs as a DataFrame."""
        if not _has_functions():
            serializer = self._serializer()
            return [_each_by(serializer, place, column) for place, column in enumerate(columns)]
        # Which takes the zone of a column, as Spark sends it, and not the one it is told.
        zoned = in_zone(columns, self.zone)
        batch = pa.RecordBatch.from_arrays(zoned, names=self.given.names)
        made: list[Any] = conversion.ArrowBatchTransformer.to_pandas(
            batch, timezone=self.zone, schema=self.given, df_for_struct=True
        )
        return made[: len(columns)]

    def as_column(self, result: Any) -> pa.Array:
        """What the function made of these."""
        if not _has_functions():
            from pyspark.sql.pandas.types import to_arrow_type

            made = self._serializer()._create_batch([(result, to_arrow_type(self.made))])
            return made.column(0)
        return conversion.PandasToArrowConversion.convert(
            [result],
            StructType([StructField("made", self.made)]),
            timezone=self.zone,
            arrow_cast=True,
            **dict(self.settings),
        ).column(0)

    def _serializer(self) -> Any:
        from pyspark.sql.pandas.serializers import (  # type: ignore[attr-defined]
            ArrowStreamPandasUDFSerializer,
        )

        settings = dict(self.settings)
        coerced = "int_to_decimal_coercion_enabled"
        is_later = coerced in ArrowStreamPandasUDFSerializer.__init__.__code__.co_varnames
        if not is_later:  # PySpark 4.0, whose worker casts nothing either
            del settings[coerced]
        return ArrowStreamPandasUDFSerializer(
            self.zone, df_for_struct=True, arrow_cast=is_later, **settings
        )


def pandas_columns(given: StructType, made: DataType) -> PandasColumns:
    """As the active session has them."""
    conf = SparkSession.active().conf
    settings = (
        (name, parse_flag(each[0], str(conf.get(*each)))) for name, each in _SETTINGS.items()
    )
    return PandasColumns(given, made, zone_of_session(), tuple(settings))


def zone_of_session() -> str:
    return common_name(str(SparkSession.active().conf.get(_ZONE)))


def in_zone(columns: Sequence[pa.Array], zone: str) -> list[pa.Array]:
    """The same instants with this zone, as Spark sends them to its Python workers."""
    return [column.cast(type_in_zone(column.type, zone)) for column in columns]


def _has_functions() -> bool:
    return hasattr(conversion, "ArrowBatchTransformer")


def _each_by(serializer: Any, place: int, column: pa.Array) -> Any:
    takes_place = "idx" in serializer.arrow_to_pandas.__code__.co_varnames  # PySpark 4.1
    return serializer.arrow_to_pandas(column, *((place,) if takes_place else ()))
