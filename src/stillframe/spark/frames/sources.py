"""DataFrames as sources: fed to the slots by Spark itself, or written to files once.

Theory of operation
-------------------
A job that reads a DataFrame has a placeholder in its graph until it starts; then the placeholder
becomes a real source. Spark can feed one DataFrame straight into the barrier stage: partition p
to slot p. After a failure it is computed again and the rows that were already taken are skipped
by count, so this is right only if the plan gives the same rows in the same order each time. That
is known of a few kinds of plan; a DataFrame of any other kind is *spooled*: written to Parquet
files before the job's first attempt, and read from there ever after.

Rules of this file
------------------
1. In doubt, spool: what is not on the list of plans that repeat themselves does not.
2. A spool that is complete is never written again, or a restored job would skip other rows than
   those it has seen.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.java_gateway import JavaObject
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from stillframe.api.sources import Source, SourceContext, Split
from stillframe.connectors.frame import FrameSource
from stillframe.connectors.parquet import ParquetSource
from stillframe.errors import BuildError, StartRefused
from stillframe.graph.logical import Node, Read, moved, walk
from stillframe.graph.pruning import columns_read
from stillframe.ids import OperatorUid
from stillframe.spark.types import to_arrow_schema
from stillframe.storage.places import address_of, is_on_disk, place_of

_REPEATING = frozenset(
    [
        "RangeExec",
        "LocalTableScanExec",
        "OneRowRelationExec",
        "FileSourceScanExec",
        "ProjectExec",
        "FilterExec",
        "GenerateExec",
        # Spark takes a UDF for deterministic unless it is told otherwise, and so do we.
        "BatchEvalPythonExec",
        "ArrowEvalPythonExec",
    ]
)
"""Kinds of physical plan that repeat their rows in order, and keep the number of partitions.

Not on it, though they look harmless: Coalesce and Union (a barrier stage refuses a chain whose
partitions change in number), cached tables (a lost block is computed anew, from any plan), RDDs
(nobody knows what their functions do), mapInArrow and mapInPandas (the same), samples and limits.
"""

_FIELDS_MAX = 100_000
_SUCCESS = "_SUCCESS"
"""Spark writes this file last."""


@dataclass(frozen=True, slots=True, eq=False)
class UnresolvedFrame(Source):
    """Stands in the graph for a DataFrame until the job starts. Never leaves the driver."""

    frame: DataFrame
    arrow_schema: pa.Schema

    @property
    def schema(self) -> pa.Schema:
        return self.arrow_schema

    def splits(self, parallelism: int) -> list[Split]:
        self._refuse()

    def open(self, splits: Sequence[Split], context: SourceContext) -> NoReturn:
        self._refuse()

    def describe(self) -> str:
        """Only what is the same at every start: the uid, and with it the state, hangs on it."""
        return f"DataFrame({', '.join(self.arrow_schema.names)})"

    def __reduce__(self) -> NoReturn:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError(f"{self.describe()} was not resolved before the job started")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A graph without placeholders, and what the barrier stage is made of."""

    sinks: tuple[Node, ...]
    feed: DataFrame | None
    """The DataFrame in whose tasks the slots run; None where no DataFrame is fed directly."""
    parallelism: int | None
    """How many slots: the feed's partitions, or what was asked for."""


def frame_node(spark: SparkSession, frame: DataFrame) -> Node:
    """A source node for a DataFrame. Nothing is computed before the job starts."""
    if not isinstance(frame, DataFrame):
        raise BuildError(
            f"still.stream(...) takes a DataFrame, not a {type(frame).__name__}: make one with"
            " spark.read or spark.createDataFrame"
        )
    repeated = sorted({name for name in frame.columns if frame.columns.count(name) > 1})
    if repeated:
        raise BuildError(
            f"the DataFrame has more than one column named {repeated[0]}: rename one of them"
        )
    schema = to_arrow_schema(frame.schema)
    return Node(Read(UnresolvedFrame(frame, schema)), schema)


def resolve_frames(
    spark: SparkSession,
    sinks: Sequence[Node],
    parallelism: int | None,
    spool_directory: Callable[[OperatorUid], str],
    max_slots: int,
    settings: Mapping[str, str] | None = None,
) -> Resolved:
    """Make real sources of all DataFrames in the graph; spools those that cannot be fed directly.

    Called on the driver when the job starts, before its first attempt. Operators keep their uids.
    `spool_directory` raises StartRefused where there is no place for one; `settings` say how that
    place is reached.
    """
    nodes = walk(sinks)
    reached = settings or {}
    placeholders = [node for node in nodes if _placeholder(node) is not None]
    least = max((node.parallelism or 1 for node in nodes), default=1)
    sources: dict[int, Source] = {}
    feed: DataFrame | None = None
    for node in placeholders:
        source, frame = _resolved(node)
        fed = None
        if feed is None and not _has_spool(node.uid, spool_directory, reached):
            wanted = {node.parallelism, parallelism} - {None}
            fed = _fed(source, range(least, max_slots + 1), wanted)
        if fed is not None:
            feed, parallelism = _narrowed(frame, columns_read(node, nodes)), fed.partitions
        sources[id(node)] = fed or _spooled(source, spool_directory(node.uid), reached)
    return Resolved(tuple(rewritten(nodes, sinks, sources)), feed, parallelism)


def _has_spool(
    uid: OperatorUid, spool_directory: Callable[[OperatorUid], str], settings: Mapping[str, str]
) -> bool:
    try:
        return is_spooled(spool_directory(uid), settings)
    except StartRefused:
        return False  # a job that keeps nothing has no spool either


def _placeholder(node: Node) -> UnresolvedFrame | None:
    match node.operator:
        case Read(UnresolvedFrame() as source):
            return source
        case _:
            return None


def _resolved(node: Node) -> tuple[UnresolvedFrame, DataFrame]:
    source = _placeholder(node)
    assert source is not None
    return source, source.frame


def rewritten(
    nodes: Sequence[Node], sinks: Sequence[Node], sources: dict[int, Source]
) -> Iterator[Node]:
    """The sinks of a graph in which these nodes read from these sources."""
    new: dict[int, Node] = {}
    for node in nodes:
        source = sources.get(id(node))
        if source is not None:
            # The uid is given, as it followed from the placeholder; those behind follow from it.
            new[id(node)] = Node(Read(source), node.schema, (), node.uid, node.parallelism)
        else:
            new[id(node)] = moved(node, new)
    return (new[id(sink)] for sink in sinks)


# --- Fed directly ----------------------------------------------------------------------------


def _fed(source: UnresolvedFrame, slots: range, wanted: set[int | None]) -> FrameSource | None:
    """This DataFrame as what feeds the slots, if it may, and if the numbers fit.

    The slots are tasks of its own stage, so there will be as many as it has partitions.
    """
    if not _are_plain(source.frame.columns) or why_not_repeating(source.frame) is not None:
        return None
    partitions = int(_execution(source.frame).toRdd().getNumPartitions())
    if partitions not in slots or not wanted <= {partitions}:
        return None
    fingerprint = fingerprint_of(source.frame)
    return FrameSource(source.schema, partitions, fingerprint, source.describe())


def _are_plain(names: Sequence[str]) -> bool:
    """Whether each column is found by its mere name, as `mapInArrow` of PySpark asks for it."""
    are_alike = len({name.lower() for name in names}) < len(names)
    return not are_alike and not set(".`") & set("".join(names))


def _narrowed(frame: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Only these of its columns, so that Spark neither reads nor hands over the others; all of them
    where the rows might be others then, or come in another order, than those of the fingerprint.
    """
    if len(columns) == len(frame.columns):
        return frame
    narrow = frame.select(*columns)
    repeats = why_not_repeating(narrow) is None
    return narrow if repeats and _packing_of(narrow) == _packing_of(frame) else frame


def _packing_of(frame: DataFrame) -> list[str]:
    """How many partitions there are, and which part of which file each of them reads.

    A bucketed table is read bucket by bucket only if the columns of its buckets are read.
    """
    execution = _execution(frame)
    packing = [str(execution.toRdd().getNumPartitions())]
    for node in _walk_plan(execution.sparkPlan()):
        packing += _files_of(node)
    return packing


def why_not_repeating(frame: DataFrame) -> str | None:
    """What keeps this DataFrame's plan from giving the same rows in the same order each time."""
    execution = _execution(frame)
    analyzed = execution.analyzed()
    if not analyzed.deterministic():
        return "it has an expression whose value is another one each time"
    jvm: Any = frame.sparkSession._jvm
    pattern = jvm.org.apache.spark.sql.catalyst.trees.TreePattern
    if analyzed.containsPattern(pattern.CURRENT_LIKE()):
        return "it asks for the current time"
    if analyzed.containsPattern(pattern.PLAN_EXPRESSION()):
        return "it has a subquery"
    for node in _walk_plan(execution.sparkPlan()):
        if _class_name(node) not in _REPEATING:
            return f"it has the step {str(node.nodeName()).strip()}"
    return None


def fingerprint_of(frame: DataFrame) -> str:
    """Equal for plans of equal rows in equal order, also in another driver process.

    A plan that repeats itself only. The code of UDFs is not in it, only their names.
    """
    execution = _execution(frame)
    texts = [str(execution.toRdd().getNumPartitions())]
    for node in _walk_plan(execution.sparkPlan()):
        texts.append(str(node.simpleString(_FIELDS_MAX)))
        texts += _content_of(node)
        texts += _files_of(node)
    return hashlib.blake2b(_renumbered("\n".join(texts)).encode(), digest_size=12).hexdigest()


def _content_of(node: JavaObject) -> Iterator[str]:
    """The rows of a leaf that has them in itself, which its own description leaves out."""
    if _class_name(node) == "LocalTableScanExec":
        yield str(node.rows().hashCode())


def _files_of(node: JavaObject) -> Iterator[str]:
    """Which part of which file is read by which partition of a leaf, in which order."""
    if _class_name(node) == "FileSourceScanExec":
        for partition in _sequence(node.inputRDD().filePartitions()):
            yield str(partition.index())
            yield from (f"{file} {file.modificationTime()}" for file in partition.files())


def _renumbered(text: str) -> str:
    """Column ids are counted up in a session; only which of them are equal is worth something."""
    numbers: dict[str, str] = {}
    return re.sub(r"#\d+", lambda found: numbers.setdefault(found[0], f"#{len(numbers)}"), text)


def _execution(frame: DataFrame) -> JavaObject:
    return frame._jdf.queryExecution()


def _walk_plan(plan: JavaObject) -> Iterator[JavaObject]:
    yield plan
    for child in _sequence(plan.children()):
        yield from _walk_plan(child)


def _sequence(scala_seq: JavaObject) -> list[JavaObject]:
    return [scala_seq.apply(index) for index in range(scala_seq.size())]


def _class_name(node: JavaObject) -> str:
    return str(node.getClass().getSimpleName())


# --- Spooled ---------------------------------------------------------------------------------


def is_spooled(directory: str, settings: Mapping[str, str] | None = None) -> bool:
    """Whether a complete spool is there."""
    path = address_of(directory)
    return place_of(path, settings).facts(f"{path}/{_SUCCESS}") is not None


def _spooled(source: UnresolvedFrame, directory: str, settings: Mapping[str, str]) -> ParquetSource:
    path = address_of(directory)
    if is_spooled(path, settings):
        _refuse_other_columns(source, path, settings)
    elif is_on_disk(path):
        _spool(source.frame, path)
    else:
        _spool_by_tasks(source, path, settings)
    return ParquetSource(path, source.schema).listing(settings=settings)


def _spool(frame: DataFrame, path: str) -> None:
    writer = frame.write.mode("overwrite")  # of what an earlier driver did not finish
    writer = writer.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "true")
    with micros_in_parquet(frame.sparkSession):
        writer.parquet(f"file://{path}")
    if not is_spooled(path):
        raise StartRefused(
            f"Spark wrote the rows of a DataFrame to {path}, but the driver does not see them"
            " there: put checkpointLocation on storage that the driver and all executors share"
        )


def _spool_by_tasks(source: UnresolvedFrame, path: str, settings: Mapping[str, str]) -> None:
    """Where Spark itself may not reach the place: each task puts a file, and those of the tasks
    that counted are kept."""
    place = place_of(path, settings)
    place.has_directory(
        path
    )  # a bucket that is not there, or denies, is told here and not by Spark
    write = partial(_write_part, source.schema, path, dict(settings))
    answered = source.frame.mapInArrow(write, "file string").collect()
    kept = {str(row.file) for row in answered} or {_put(source.schema, path, settings, 0, ())}
    for found in list(place.walk(path, lambda name: False)):
        if found.path not in kept:  # of a task that came twice, or of an earlier driver
            place.delete(found.path)
    place.create_if_absent(f"{path}/{_SUCCESS}", str(source.schema).encode())


def _write_part(
    schema: pa.Schema, path: str, settings: Mapping[str, str], batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Called on executors, once for each partition and try."""
    task = TaskContext.get()
    assert task is not None, "this runs in a task"
    yield pa.record_batch({"file": [_put(schema, path, settings, task.partitionId(), batches)]})


def _put(
    schema: pa.Schema,
    path: str,
    settings: Mapping[str, str],
    partition: int,
    batches: Iterable[pa.RecordBatch],
) -> str:
    file = f"{path}/part-{partition:05d}-{uuid.uuid4().hex}.parquet"
    draft = place_of(path, settings).draft(file)
    try:
        with pq.ParquetWriter(draft.file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch.cast(schema))
    except BaseException:
        draft.discard()
        raise
    draft.finish()
    return file


def _refuse_other_columns(source: UnresolvedFrame, path: str, settings: Mapping[str, str]) -> None:
    if is_on_disk(path):
        spooled: object = source.frame.sparkSession.read.parquet(f"file://{path}").dtypes
        is_same = spooled == source.frame.dtypes
    else:
        with place_of(path, settings).open(f"{path}/{_SUCCESS}") as file:
            spooled = file.readall().decode()
        is_same = spooled == str(source.schema)
    if not is_same:
        raise StartRefused(
            f"{path} holds the rows of another DataFrame, with the columns {spooled}: give the job"
            " the one it began with, another queryName, or another checkpointLocation"
        )


@contextmanager
def micros_in_parquet(spark: SparkSession) -> Iterator[None]:
    """What Spark begins to write now has times as we read them.

    Its own choice is INT96, which is read back in nanoseconds and so ends in 2262.
    """
    name = "spark.sql.parquet.outputTimestampType"
    before: Any = spark.conf.get(name)
    spark.conf.set(name, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        spark.conf.set(name, before)
