"""Completed epochs on the driver: for `foreachBatch`, and what `memory` and `console` show."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from stillframe.errors import DataError, StillframeError
from stillframe.ids import Epoch, Mark
from stillframe.runtime.row_functions import name_of
from stillframe.spark.deployment.checks import refuse_without_spark
from stillframe.spark.types import empty_frame, from_arrow_schema, to_arrow_schema
from stillframe.storage.places import is_on_disk, place_of
from stillframe.user_code import fail

Finish = Callable[[DataFrame], DataFrame]
"""What is done to a whole result before it is shown, such as sorting it."""


def as_it_is(frame: DataFrame) -> DataFrame:
    return frame


@dataclass(frozen=True, slots=True)
class FrameOfEpoch:
    """Calls the user's function with each epoch as a DataFrame over its staged files.

    Not with one that has no rows: an epoch ends with every checkpoint, and where nothing has come
    Spark runs no batch either.
    """

    spark: SparkSession
    schema: StructType
    function: Callable[..., None]
    finish: Finish = as_it_is
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    """How the place of the files is reached."""
    takes_empty: bool = False
    """Whether the function is called without rows too."""

    def __call__(self, epoch: Epoch, mark: Mark, files: list[str]) -> None:
        if not files and not self.takes_empty:
            return
        try:
            also = {"mark": mark} if self._takes_mark() else {}
            self.function(self.finish(self._frame(files)), epoch, **also)
        except StillframeError:
            raise
        except (Exception, SystemExit) as error:
            refuse_without_spark(self.spark)  # then it is not the function that is wrong
            code = f"function {name_of(self.function)} given to foreachBatch"
            fail(code, error, f"epoch {epoch}, which is kept and handed to it again")

    def _takes_mark(self) -> bool:
        try:
            return "mark" in inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # a callable that does not tell
            return False

    def _frame(self, files: list[str]) -> DataFrame:
        if not files:
            return empty_frame(self.spark, self.schema)
        if is_on_disk(files[0]):
            return self.spark.read.schema(self.schema).parquet(
                *(f"file://{file}" for file in files)
            )
        return frame_of_files(self.spark, self.schema, files, self.settings)


def frame_of_files(
    spark: SparkSession, schema: StructType, files: Sequence[str], settings: Mapping[str, str]
) -> DataFrame:
    """A DataFrame over Parquet files of a place that Spark itself may not reach: its tasks read
    them, a file each."""
    rows = partial(_rows_of_files, to_arrow_schema(schema), dict(settings))
    names = spark.createDataFrame([(file,) for file in files], "file string")
    return names.repartition(len(files)).mapInArrow(rows, schema)


def _rows_of_files(
    schema: pa.Schema, settings: Mapping[str, str], names: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Called on executors."""
    for batch in names:
        for file in batch.column(0).to_pylist():
            with place_of(file, settings).open(file) as raw, pq.ParquetFile(raw) as opened:
                for rows in opened.iter_batches(_BATCH_ROWS):
                    yield rows.cast(schema)


_BATCH_ROWS = 10_000


def _table(file: str, schema: pa.Schema, settings: Mapping[str, str]) -> pa.Table:
    with place_of(file, settings).open(file) as raw:
        return pq.read_table(pa.PythonFile(raw, mode="r"), schema=schema)


class MemoryTable:
    """Keeps the rows of all epochs on the driver, as a temporary view named after the query.

    Those of the last one, if every epoch brings the whole table.
    """

    def __init__(
        self,
        spark: SparkSession,
        name: str,
        schema: pa.Schema,
        rows_max: int,
        *,
        is_whole: bool = False,
        finish: Finish = as_it_is,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._spark = spark
        self._settings = settings or {}
        self._finish = finish
        self._name = name
        self._schema = schema
        self._rows_max = rows_max
        self._is_whole = is_whole
        self._table = schema.empty_table()
        self._last: Epoch | None = None
        # Now, so that a name that Spark refuses is refused at once.
        finish(empty_frame(spark, schema)).createOrReplaceTempView(name)

    def __call__(self, epoch: Epoch, mark: Mark, files: list[str]) -> None:
        if self._last is not None and epoch <= self._last:
            return  # a commit that is repeated
        tables = [_table(file, self._schema, self._settings) for file in files]
        before = self._schema.empty_table() if self._is_whole else self._table
        after = pa.concat_tables([before, *tables])
        if after.num_rows > self._rows_max:
            raise DataError(
                f"the memory table {self._name} would have {after.num_rows} rows, more than its"
                f" maxRows of {self._rows_max}: raise the option or write to files instead"
            )
        if after.num_rows != self._table.num_rows or self._is_whole:
            self._show(after)
        self._table = after
        self._last = epoch

    def _show(self, table: pa.Table) -> None:
        frame = self._spark.createDataFrame(table, from_arrow_schema(self._schema))
        self._finish(frame).createOrReplaceTempView(self._name)


@dataclass(frozen=True, slots=True)
class Console:
    """Prints the first rows of each epoch that has some, as Spark's console sink does.

    Where every epoch brings the whole result, only if it has changed: Spark makes no batch without
    new rows, while epochs come with every checkpoint.
    """

    spark: SparkSession
    schema: pa.Schema
    rows_max: int
    truncates: bool
    is_whole: bool = False
    finish: Finish = as_it_is
    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    _shown: list[pa.Table] = field(default_factory=list, init=False)

    def __call__(self, epoch: Epoch, mark: Mark, files: list[str]) -> None:
        if self.finish is as_it_is:
            head = self._head(files)
        else:
            head = pa.concat_tables(
                [
                    self.schema.empty_table(),
                    *(_table(file, self.schema, self.settings) for file in files),
                ]
            )
        if head.num_rows == 0 or (self.is_whole and self._shown == [head]):
            return
        self._shown[:] = [head]
        line = "-" * 43
        print(f"{line}\nBatch: {epoch}\n{line}")
        frame = self.spark.createDataFrame(head, from_arrow_schema(self.schema))
        self.finish(frame).show(self.rows_max, self.truncates)

    def _head(self, files: list[str]) -> pa.Table:
        """One row more than is shown, so that it is said that there are more."""
        head = self.schema.empty_table()
        for file in files:
            if head.num_rows <= self.rows_max:
                with (
                    place_of(file, self.settings).open(file) as raw,
                    pq.ParquetFile(raw) as opened,
                ):
                    batch = next(opened.iter_batches(self.rows_max + 1), None)
                if batch is not None:
                    rows = pa.Table.from_batches([batch]).cast(self.schema)
                    head = pa.concat_tables([head, rows]).slice(0, self.rows_max + 1)
        return head
