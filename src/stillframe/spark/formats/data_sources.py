"""Sources that are Python data sources of Spark's: `pyspark.sql.datasource.DataSource`, unchanged.

Theory of operation
-------------------
Such a source tells ranges: from the offset that was read to the newest one (`latestOffset`), each
in some partitions. One reader in one slot does all of it, in a thread of its own: asks for the next
range, reads its partitions one after the other, and goes on from its end. So a range is begun when
there is room for it, and none is planned ahead.

A range goes on as one batch, and the position moves over it as a whole, as in Spark, which writes
its end down and reads all of it again after a failure. Only of a large range parts go on before.
The position is then in the middle of it, and a restart reads the range again and leaves out what
was taken: so its partitions have to give the same rows in the same order.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import pyarrow as pa
from py4j.java_gateway import JavaObject
from pyspark import cloudpickle
from pyspark.errors import PySparkNotImplementedError
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    CaseInsensitiveDict,
    DataSource,
    DataSourceStreamReader,
    SimpleDataSourceStreamReader,
)
from pyspark.sql.types import StructType

from stillframe.api.sources import (
    BlockingReader,
    Discovered,
    ReadItem,
    Source,
    SourceContext,
    Split,
    SplitEnumerator,
)
from stillframe.errors import BuildError, UserCodeError
from stillframe.ids import CheckpointId
from stillframe.json_values import JsonObject
from stillframe.options import Options
from stillframe.secrets import is_secret_name
from stillframe.spark.types import from_arrow_schema, parse_schema, to_arrow_schema
from stillframe.user_code import lazily, shown

log = logging.getLogger("stillframe")

_SPLIT = "all"
_BATCH_ROWS_MAX = 4_096
_RANGE_ROWS_MAX = 65_536
"""What of one range is gathered before it goes on."""
_TURN_SECONDS = 0.5
"""How long rows are gathered before others, such as a completed checkpoint, have their turn."""
_PAUSE_SECONDS = 0.05
"""Until it is asked again, where there was nothing new."""
_ENUMERATED_SECONDS = 3600.0

Offset = Any
Rows = Callable[[], Iterable[Any]]
"""What a partition gives: tuples, or batches."""


@dataclass(frozen=True)
class PythonSourceFormat:
    """Makes sources of a class of the user's, as `readStream.format(...)` has named or given it."""

    option_names: ClassVar[None] = None
    secret_options: ClassVar[tuple[str, ...]] = ()

    spark: SparkSession
    kind: type[DataSource]

    def from_options(self, options: Options, schema: pa.Schema | None) -> Source:
        columns = None if schema is None else from_arrow_schema(schema)
        return PythonSource.of(self.spark, self.kind, options, columns)


def registered_data_source(spark: SparkSession, name: str) -> type[DataSource] | None:
    """The class that `spark.dataSource.register` was given under this name, if there is one."""
    manager: Any = spark._jsparkSession.sessionState().dataSourceManager()
    if not manager.dataSourceExists(name):
        return None
    return data_source_class(manager.lookupDataSource(name))


def data_source_class(registered: JavaObject) -> type[DataSource]:
    """Out of Spark's own record of it, in the JVM: the class itself, if it is of this process."""
    function = registered.dataSourceCls()
    found = cloudpickle.loads(bytes(function.command().unsafeArray()))
    if not (isinstance(found, type) and issubclass(found, DataSource)):
        raise BuildError(
            "a registered data source holds more data than Spark sends with a class: keep large"
            " values out of its module, or read them in the class when they are needed"
        )
    return found


def made_data_source(kind: type[DataSource], given: Mapping[str, str]) -> DataSource:
    """As Spark makes it of its options."""
    return kind(options=CaseInsensitiveDict(given))


@dataclass(frozen=True)
class PythonSource(Source):
    """One that a Python data source reads."""

    begins_now: ClassVar[bool] = True

    data_source: DataSource = field(compare=False, repr=False)
    name: str
    columns: StructType
    options: tuple[tuple[str, str], ...]
    """Those that are no secrets: they say which one it is."""
    digest: str = field(repr=False)
    """Of all of them: two sources that read the same are one."""

    @classmethod
    def of(
        cls,
        spark: SparkSession,
        kind: type[DataSource],
        options: Options,
        columns: StructType | None,
    ) -> PythonSource:
        all_of_them = revealed(options)
        data_source = made_data_source(kind, all_of_them)
        declared = columns or parse_schema(spark, data_source.schema())
        digest = hashlib.sha256(repr(sorted(all_of_them.items())).encode()).hexdigest()
        source = cls(data_source, kind.name(), declared, public_options(all_of_them), digest)
        source.ranges()  # refuses one that reads no streams, before anything starts
        return source

    @property
    def schema(self) -> pa.Schema:
        return to_arrow_schema(self.columns)

    @property
    def discovery_interval_seconds(self) -> float:
        return _ENUMERATED_SECONDS

    def ranges(self) -> _Ranges:
        """A reader of the data source's own."""
        source, schema = self.data_source, self.columns
        try:
            reader: Any = source.streamReader(schema)
        except PySparkNotImplementedError:
            try:
                reader = source.simpleStreamReader(schema)
            except PySparkNotImplementedError:
                raise BuildError(
                    f"the data source {source.name()} has no streamReader and no"
                    " simpleStreamReader: write one, or read it with spark.read and still.stream"
                ) from None
        if isinstance(reader, SimpleDataSourceStreamReader):
            return _SimpleRanges(reader)
        if isinstance(reader, DataSourceStreamReader):
            return _PlannedRanges(reader)
        raise BuildError(
            f"streamReader of the data source {source.name()} returned {shown(reader)}: return a"
            " DataSourceStreamReader"
        )

    def splits(self, parallelism: int) -> list[Split]:
        ranges = self.ranges()
        try:
            return [_At(ranges.initial(), is_initial=True).split]
        finally:
            ranges.stop()

    def open_enumerator(self, state: JsonObject | None) -> SplitEnumerator:
        return _NoMore()

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return _RangeReader(self)

    def describe(self) -> str:
        return described(self.name, self.options)


def revealed(options: Options) -> dict[str, str]:
    """As the user's own class expects them: a secret is a text there."""
    return {
        name: options.secret(name).reveal() if is_secret_name(name) else options[name]
        for name in options
    }


def public_options(given: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k.lower(), v) for k, v in given.items() if not is_secret_name(k)))


def described(name: str, options: tuple[tuple[str, str], ...]) -> str:
    """With its options: they tell two of one class apart."""
    return " ".join([f"data source {name}", *(f"{k}={v}" for k, v in options)])


class _NoMore(SplitEnumerator):
    """There is one split. The runtime tells sources with an enumerator when a job is to stop."""

    def discover(self) -> Discovered:
        return Discovered([], {})


# --- Offsets -----------------------------------------------------------------------------------


class _Ranges(ABC):
    """A reader of either kind, by its offsets. An offset is what JSON makes of the user's."""

    @abstractmethod
    def initial(self) -> Offset: ...

    @abstractmethod
    def next(self, start: Offset) -> Offset:
        """The end of the range that begins here; the same offset: there is nothing new."""

    @abstractmethod
    def parts(self, start: Offset, end: Offset) -> list[Rows]: ...

    @abstractmethod
    def stop_at_what_is_there(self) -> bool:
        """Whether `next` now comes to an end by itself; otherwise one range has to do."""

    @abstractmethod
    def commit(self, end: Offset) -> None: ...

    def stop(self) -> None:  # noqa: B027 - a simple one has nothing to stop
        pass


class _PlannedRanges(_Ranges):
    def __init__(self, reader: DataSourceStreamReader) -> None:
        self._reader: Any = reader
        self._has_limits = bool(inspect.signature(reader.latestOffset).parameters)
        self._reads_all = False

    def initial(self) -> Offset:
        return _plain(self._reader.initialOffset())

    def next(self, start: Offset) -> Offset:
        if not self._has_limits:
            return _plain(self._reader.latestOffset())
        return _plain(self._reader.latestOffset(start, self._limit()))

    def _limit(self) -> Any:
        from pyspark.sql.streaming.datasource import ReadAllAvailable  # not there before 4.2

        return ReadAllAvailable() if self._reads_all else self._reader.getDefaultReadLimit()

    def parts(self, start: Offset, end: Offset) -> list[Rows]:
        partitions = self._reader.partitions(start, end)
        return [functools.partial(self._reader.read, each) for each in partitions]

    def stop_at_what_is_there(self) -> bool:
        if hasattr(self._reader, "prepareForTriggerAvailableNow"):
            self._reader.prepareForTriggerAvailableNow()
            return True
        self._reads_all = True
        return False

    def commit(self, end: Offset) -> None:
        self._reader.commit(end)

    def stop(self) -> None:
        self._reader.stop()


class _SimpleRanges(_Ranges):
    """Reads to find out where the range ends, and keeps the rows until they are asked for."""

    def __init__(self, reader: SimpleDataSourceStreamReader) -> None:
        self._reader: Any = reader
        self._fetched: tuple[Offset, Offset, Iterable[Any]] | None = None

    def initial(self) -> Offset:
        return _plain(self._reader.initialOffset())

    def next(self, start: Offset) -> Offset:
        rows, after = self._reader.read(start)
        end = _plain(after)
        if end == start:
            self._refuse_rows(rows, start)
        else:
            self._fetched = (start, end, rows)
        return end

    def _refuse_rows(self, rows: Iterable[Any], offset: Offset) -> None:
        """Spark's own check: such rows would come again and again."""
        if next(iter(lazily(rows)), None) is None:
            return
        at = json.dumps(offset)
        raise UserCodeError(
            "[SIMPLE_STREAM_READER_OFFSET_DID_NOT_ADVANCE] SimpleDataSourceStreamReader.read()"
            f" returned a non-empty batch but the end offset: {at} did not advance past the start"
            f" offset: {at}. The end offset must represent the position after the last record"
            " returned."
        )

    def parts(self, start: Offset, end: Offset) -> list[Rows]:
        fetched, self._fetched = self._fetched, None
        if fetched is not None and fetched[:2] == (start, end):
            return [lambda: fetched[2]]
        return [functools.partial(self._reader.readBetweenOffsets, start, end)]

    def stop_at_what_is_there(self) -> bool:
        if hasattr(self._reader, "prepareForTriggerAvailableNow"):
            self._reader.prepareForTriggerAvailableNow()
            return True
        return False

    def commit(self, end: Offset) -> None:
        self._reader.commit(end)


def _plain(offset: Offset) -> Offset:
    """As it comes back from a checkpoint, and from Spark's own log."""
    return json.loads(json.dumps(offset))


# --- Reading -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _At:
    """How far it has been read: to an offset, or in the middle of the range behind it."""

    offset: Offset
    is_initial: bool = False
    end: Offset = None
    partition: int = 0
    rows: int = 0
    """Of that partition."""

    @classmethod
    def of(cls, position: JsonObject) -> _At:
        return cls(**cast("dict[str, Any]", position))

    @property
    def split(self) -> Split:
        position: dict[str, Any] = {"offset": self.offset}
        if self.is_initial:
            position["is_initial"] = True
        if self.end is not None:
            position |= {"end": self.end, "partition": self.partition, "rows": self.rows}
        return Split(_SPLIT, position)


class _RangeReader(BlockingReader):
    takes_splits = True

    def __init__(self, source: PythonSource) -> None:
        self._source = source
        self._given: Split | None = None
        self._stops_now = False
        self._ranges: _Ranges | None = None
        self._committed: Offset = None
        self._ending = threading.Event()

    # --- the loop thread

    def add_splits(self, splits: Sequence[Split]) -> None:
        (self._given,) = splits

    def no_more_splits(self, *, until_now: bool) -> None:
        self._stops_now = until_now

    def interrupt(self) -> None:
        self._ending.set()

    # --- the reader's thread

    def read(self) -> Iterator[ReadItem]:
        while self._given is None:
            if self._ending.wait(_PAUSE_SECONDS):
                return
            yield None
        at, ranges = _At.of(self._given.position), self._source.ranges()
        self._ranges = ranges
        if at.end is not None:
            yield from self._range(ranges, at)
            at = _At(at.end)
        stops = comes_to_an_end = False
        while not self._ending.is_set():
            if self._stops_now and not stops:
                stops, comes_to_an_end = True, ranges.stop_at_what_is_there()
            end = ranges.next(at.offset)
            if end != at.offset:
                yield from self._range(ranges, replace(at, end=end))
                at = _At(end)
                if stops and not comes_to_an_end:
                    return
            elif stops:
                return
            else:
                self._ending.wait(_PAUSE_SECONDS)
                yield None

    def _range(self, ranges: _Ranges, at: _At) -> Iterator[ReadItem]:
        """What is left of the range up to its end."""
        gathered: list[pa.RecordBatch] = []
        for number, rows in enumerate(ranges.parts(at.offset, at.end)):
            if number < at.partition:
                continue
            taken = at.rows if number == at.partition else 0
            read = 0
            for batch in self._batches(rows()):
                if self._ending.is_set():
                    return
                if batch is None:
                    yield None
                    continue
                read += batch.num_rows
                gathered.append(batch.slice(max(0, batch.num_rows - max(0, read - taken))))
                if sum(each.num_rows for each in gathered) >= _RANGE_ROWS_MAX:
                    inside = replace(at, partition=number, rows=read)
                    yield inside.split, pa.concat_batches(gathered)
                    gathered = []
        yield _At(at.end).split, pa.concat_batches(gathered) if gathered else None

    def _batches(self, rows: Iterable[Any]) -> Iterator[pa.RecordBatch | None]:
        """Of these rows; None now and then, where they take long."""
        if not isinstance(rows, Iterator):
            raise UserCodeError(
                f"read of the {self._source.describe()} returned {shown(rows)}: return an iterator,"
                " or yield the rows"
            )
        gathered: list[Any] = []
        until = time.monotonic() + _TURN_SECONDS
        for row in lazily(rows):
            gathered.append(row)
            if isinstance(row, pa.RecordBatch) or len(gathered) == _BATCH_ROWS_MAX:
                yield from self._converted(gathered)
                gathered = []
            if time.monotonic() > until:
                yield None
                until = time.monotonic() + _TURN_SECONDS
        yield from self._converted(gathered)

    def _converted(self, rows: list[Any]) -> Iterator[pa.RecordBatch]:
        """As Spark does it, with its refusals of rows that do not fit."""
        from pyspark.sql.worker.plan_data_source_read import records_to_arrow_batches

        source = self._source
        for batch in records_to_arrow_batches(
            iter(rows), _BATCH_ROWS_MAX, source.columns, source.data_source
        ):
            yield batch.select(source.columns.names).cast(source.schema)

    def on_checkpoint_complete(self, checkpoint_id: CheckpointId, splits: Sequence[Split]) -> None:
        for at in (_At.of(split.position) for split in splits):
            if self._ranges is not None and not at.is_initial and at.offset != self._committed:
                self._ranges.commit(at.offset)
                self._committed = at.offset

    def close(self) -> None:
        if self._ranges is not None:
            self._ranges.stop()
