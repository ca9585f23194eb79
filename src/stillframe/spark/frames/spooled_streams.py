"""Leaves of a streaming plan that only Spark can read: it writes them to files that are followed.

Theory of operation
-------------------
A query of Spark's own reads the leaf, nothing more, and writes its rows to files of Parquet beside
our checkpoints. It has its own checkpoint there, so it goes on where it was, and Spark's log of the
files (`_spark_metadata`) names each of them once, all of a micro-batch together. The job's source
follows that log. A file is deleted when a checkpoint is complete that has all of it behind it.

Spark's query begins when the job runs and its source is asked for files the first time. It belongs
to the driver and not to an attempt: it goes on while slots are lost, and ends with the job. If it
fails, so does the attempt; the next one starts it again.

Rules of this file
------------------
1. A file counts if Spark's log names it. What else is there is of a micro-batch that did not end.
2. What the log names and the job has not seen must be there. Where it is not, rows would be lost,
   so the job ends with a sentence.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from stillframe.api.sources import Discovered, Source, Split, SplitEnumerator
from stillframe.config import JobConfig
from stillframe.connectors.cleaning import Cleaning
from stillframe.connectors.files import Following
from stillframe.connectors.listing import FoundFile
from stillframe.connectors.parquet import ParquetSource
from stillframe.connectors.sink_log import SinkLog
from stillframe.coordinator.history import Event, JobEnded
from stillframe.coordinator.query import Query
from stillframe.errors import DataError, StartRefused, Unavailable
from stillframe.graph.logical import Node, Read, walk, without_twins
from stillframe.graph.plan import Plan
from stillframe.ids import CheckpointId, OperatorUid
from stillframe.json_values import JsonObject
from stillframe.spark.frames.sources import UnresolvedFrame, micros_in_parquet, rewritten
from stillframe.storage.places import address_of, is_on_disk, place_of

_LOOK_SECONDS = 0.5
_TRIGGER_SECONDS_MIN = 1.0
_STOP_SECONDS_MAX = 10.0
"""A job that is over waits so long for Spark's query, which may hang in its source."""
_RETENTION_SECONDS = int(Following().file_age_seconds_max)
"""How long Spark's log names a file: as long as followed files are remembered."""


@dataclass(frozen=True, slots=True, eq=False)
class UnresolvedLeaf(UnresolvedFrame):
    """Stands in the graph for such a leaf until the job starts. Never leaves the driver."""

    words: str
    """What it is and where it reads from."""
    digest: str
    """Of all its options, secrets too."""

    def describe(self) -> str:
        return _described(self.words)

    def __eq__(self, other: object) -> bool:
        """Two leaves that read the same are one, as in Spark."""
        return isinstance(other, UnresolvedLeaf) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity[:2])

    @property
    def _identity(self) -> tuple[str, str, pa.Schema]:
        return self.words, self.digest, self.arrow_schema


class SpooledStream(ParquetSource):
    """The files that Spark has written of a leaf so far, and those that it will write."""

    words: str
    directory: str

    def __init__(self, directory: str, schema: pa.Schema, words: str) -> None:
        following = Following(_LOOK_SECONDS, cleaning=Cleaning())
        super().__init__(_rows_in(directory), schema, following)
        object.__setattr__(self, "directory", directory)
        object.__setattr__(self, "words", words)

    def files_now(self) -> list[FoundFile]:
        return _readings[self.directory].files()

    def open_enumerator(self, state: JsonObject | None) -> SplitEnumerator:
        reading = _readings[self.directory]
        reading.begin_anew(is_fresh=state is None)
        if state is not None:
            refuse_another_spool(self.directory, _seen(state))
        return _SpooledFiles(reading, super().open_enumerator(state))

    def describe(self) -> str:
        return _described(self.words)


def _described(words: str) -> str:
    return f"{words}, read by Spark"


def _rows_in(directory: str) -> str:
    return f"{directory}/rows"


# --- At the start -----------------------------------------------------------------------------


def resolve_leaves(
    sinks: Sequence[Node], spool_directory: Callable[[OperatorUid], str], config: JobConfig
) -> Sequence[Node]:
    """Make real sources of all leaves in the graph that Spark reads. Operators keep their uids.

    Called on the driver when the job starts; Spark reads nothing before it runs. `spool_directory`
    raises StartRefused where there is no place for one.
    """
    if not any(is_read_by_spark(node.operator) for node in walk(sinks)):
        return sinks
    sinks = without_twins(sinks)
    nodes = walk(sinks)
    sources: dict[int, Source] = {}
    for node in nodes:
        if isinstance(node.operator, Read) and isinstance(node.operator.source, UnresolvedLeaf):
            leaf = node.operator.source
            directory = _directory(leaf, node.uid, spool_directory)
            sources[id(node)] = SpooledStream(directory, leaf.schema, leaf.words)
            if directory in _readings and _readings[directory].is_under_way:
                raise StartRefused(
                    f"a job that runs already has Spark read {leaf.words} into {directory}: stop it"
                    " first, or give this one another queryName"
                )
            _readings[directory] = _Reading(leaf.frame, directory, leaf.words, config)
    return list(rewritten(nodes, sinks, sources))


def _directory(
    leaf: UnresolvedLeaf, uid: OperatorUid, spool_directory: Callable[[OperatorUid], str]
) -> str:
    try:
        directory = address_of(spool_directory(uid))
    except StartRefused as error:
        raise StartRefused(
            f"{leaf.words} is a source that Spark reads for the job, and its rows are written to"
            " files beside the checkpoints: set checkpointLocation"
        ) from error
    if not is_on_disk(directory):
        raise StartRefused(
            f"{leaf.words} is a source that Spark reads for the job, and its rows are written to"
            f" files beside the checkpoints, but {directory} is no directory of a disk: set"
            " checkpointLocation to one that all machines share"
        )
    return directory


def is_read_by_spark(operator: object) -> bool:
    """Whether Spark runs a query for it, beside the slots."""
    return isinstance(operator, Read) and isinstance(
        operator.source, UnresolvedLeaf | SpooledStream
    )


def stop_when_ended(query: Query, plan: Plan) -> None:
    """Spark's queries end with the job that they are for."""
    readings = list(_of_plan(plan))

    def listen(event: Event) -> None:
        if isinstance(event, JobEnded):
            stopping = [threading.Thread(target=each.stop, daemon=True) for each in readings]
            for thread in stopping:
                thread.start()
            for thread in stopping:
                thread.join(_STOP_SECONDS_MAX)

    if readings:
        query.add_listener(listen)


def _of_plan(plan: Plan) -> Iterator[_Reading]:
    for _, planned in plan.operators():
        operator = planned.operator
        if isinstance(operator, Read) and isinstance(operator.source, SpooledStream):
            yield _readings[operator.source.directory]


# --- Spark's query ----------------------------------------------------------------------------


class _Reading:
    """Spark's query of one leaf, for one run of the job. Any thread may call it."""

    def __init__(self, frame: DataFrame, directory: str, words: str, config: JobConfig) -> None:
        self._frame = frame
        self._directory = directory
        self._words = words
        self._available_now = config.available_now
        self._begins_anew = config.fresh
        self._interval_seconds = config.checkpoint_interval_seconds or _TRIGGER_SECONDS_MIN
        self._lock = threading.RLock()
        self._query: StreamingQuery | None = None
        self._is_over = False
        self._place = place_of(directory)
        self._log = SinkLog(self._place, _rows_in(directory))

    def begin_anew(self, *, is_fresh: bool) -> None:
        """Of a job that was asked to start over, once: Spark starts over too."""
        with self._lock:
            if self._begins_anew and is_fresh:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._log = SinkLog(self._place, _rows_in(self._directory))
            self._begins_anew = False

    def go_on(self) -> None:
        """Have Spark read; with availableNow, to the end of what is there."""
        with self._lock:
            if self._is_over:
                return
            if self._query is None:
                self._query = self._started()
            query = self._query
        failure: PySparkException | None
        try:
            while self._available_now and not query.awaitTermination(_LOOK_SECONDS):  # type: ignore[arg-type]
                pass
            failure = query.exception()
        except PySparkException as error:
            failure = error
        if failure is not None:
            self._forget(query)
            raise Unavailable(f"Spark cannot read {self._words}: {_said_by_spark(failure)}")
        if not self._available_now and not query.isActive:
            self._forget(query)  # somebody has stopped it: it is started again

    @property
    def is_under_way(self) -> bool:
        with self._lock:
            return self._query is not None and not self._is_over

    def stop(self) -> None:
        """The job is over."""
        with self._lock:
            self._is_over = True
            query, self._query = self._query, None
        if query is not None and query.isActive:
            query.stop()

    def files(self) -> list[FoundFile]:
        """What Spark has written and the job has not let go."""
        named = self.named()
        found = self._place.walk(
            _rows_in(self._directory), lambda name: name.startswith(("_", "."))
        )
        return [
            FoundFile(facts.path, facts=facts)
            for facts in found
            if os.path.basename(facts.path) in named
        ]

    def named(self) -> Mapping[str, int]:
        """The files that Spark's log names, with their times of change."""
        with self._lock:
            self._log.look()
            return self._log.files

    def _started(self) -> StreamingQuery:
        # By its class: `writeStream` may be ours (`stillframe.everywhere`).
        writer = DataStreamWriter(self._frame).format("parquet")
        writer = writer.option("checkpointLocation", f"file://{self._directory}/checkpoints")
        writer = writer.option("retention", f"{_RETENTION_SECONDS}s")
        if self._available_now:
            writer = writer.trigger(availableNow=True)
        else:
            # Rows show when a checkpoint is complete, so more files than checkpoints are of no use.
            seconds = max(self._interval_seconds, _TRIGGER_SECONDS_MIN)
            writer = writer.trigger(processingTime=f"{int(seconds * 1000)} milliseconds")
        try:
            with micros_in_parquet(self._frame.sparkSession):
                return writer.start(f"file://{_rows_in(self._directory)}")
        except PySparkException as error:
            raise DataError(f"Spark cannot read {self._words}: {_said_by_spark(error)}") from error

    def _forget(self, query: StreamingQuery) -> None:
        with self._lock:
            if self._query is query:
                self._query = None


_readings: dict[str, _Reading] = {}
"""Of the jobs of this process, by the directory they write to."""


def _said_by_spark(error: Exception) -> str:
    """Its first sentence, without the numbers of the query, which are others each time."""
    line = str(error).strip().partition("\n")[0]
    return line.partition("terminated with exception: ")[2] or line


# --- The files --------------------------------------------------------------------------------


class _SpooledFiles(SplitEnumerator):
    def __init__(self, reading: _Reading, files: SplitEnumerator) -> None:
        self._reading = reading
        self._files = files

    def discover(self) -> Discovered:
        self._reading.go_on()
        named = self._reading.named()
        found = self._files.discover()
        forgotten = cast(int | None, found.state["forgotten_before_ms"])
        refuse_lost(named, _seen(found.state), forgotten or 0)
        return found

    def on_checkpoint_complete(
        self, checkpoint_id: CheckpointId, state: JsonObject | None, splits: Sequence[Split]
    ) -> None:
        self._files.on_checkpoint_complete(checkpoint_id, state, splits)


def _seen(state: JsonObject) -> Mapping[str, int]:
    return cast(Mapping[str, int], state["seen"])


def refuse_another_spool(directory: str, seen: Iterable[str]) -> None:
    """Raise where the job goes on from files elsewhere: Spark's own position is there too."""
    elsewhere = [path for path in seen if not path.startswith(f"{directory}/")]
    if elsewhere:
        raise DataError(
            f"the job goes on from rows that Spark has written to {os.path.dirname(elsewhere[0])},"
            f" and not to {directory}: how far Spark had read is known there only, so start the job"
            " with that checkpointLocation, or over again (fresh)"
        )


def refuse_lost(named: Mapping[str, int], seen: Iterable[str], forgotten_before_ms: int) -> None:
    """Raise if a file that Spark has written and the job has not read is gone."""
    known = {os.path.basename(path) for path in seen}
    lost = [n for n, at in named.items() if n not in known and at >= forgotten_before_ms]
    if lost:
        raise DataError(
            f"{len(lost)} files of rows that Spark has written for the job are not there any more,"
            f" such as {lost[0]}: a later checkpoint had read them. Go on from the newest"
            " checkpoint, or start the job over (fresh); on a cluster, checkpointLocation has to be"
            " a directory that all machines share"
        )
