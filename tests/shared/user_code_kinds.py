"""One small job for each kind of code that a user can give; `trouble` happens at one record.

Every job reads the records 0 to 999 in two splits, passes each of them on, and writes it to the
directory `said`. What is given to `plan_of` as trouble is called, in the user's code of that kind,
with the ids that the code has at hand. It is pickled with the plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import cloudpickle
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from stillframe import KeyedFunction, KeyProcessor, KeyStates, StreamFunction
from stillframe.api.sinks import Committer, CommitterContext, Sink, SinkContext, SinkWriter
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.staged import StagedSink
from stillframe.graph.expressions import Column, Named, RowFunction
from stillframe.graph.logical import (
    MapInArrow,
    Node,
    Process,
    ProcessStream,
    Project,
    Read,
    Transform,
    Write,
)
from stillframe.graph.plan import Plan, build_plan
from stillframe.ids import Mark
from stillframe.runtime.key_processing import KeyProgram
from stillframe.runtime.row_functions import ArrowFunction, PandasFunction, RowFlatMap, RowMap
from stillframe.secrets import Secret
from stillframe.spark.processors.programs import ProcessorProgram
from stillframe.testing.sources import Gate, ScriptedSource, Wait

SCHEMA = pa.schema([("id", pa.int64()), ("app", pa.string())])
RECORDS, BATCH = 1_000, 100
AT = 437
"""The record at which there is trouble."""

Trouble = Callable[[Iterable[int]], None]


@dataclass(frozen=True)
class Raises:
    """Raises at one record; once, if a gate is given that remembers it."""

    error: type[BaseException]
    once: Gate | None = None
    closes: Gate | None = None
    """Which the record has passed, and must wait for again."""

    def __call__(self, ids: Iterable[int]) -> None:
        if AT in ids and (self.once is None or not self.once.is_open):
            if self.closes is not None:
                self.closes.close()
            if self.once is not None:
                self.once.open()
            raise self.error()


@dataclass(frozen=True)
class Tells(Raises):
    """Raises at one record with a secret in its text."""

    secret: Secret = field(kw_only=True)

    def __call__(self, ids: Iterable[int]) -> None:
        if AT in ids and (self.once is None or not self.once.is_open):
            if self.once is not None:
                self.once.open()
            raise self.error(f"no login as {self.secret.reveal()!r}")


@dataclass(frozen=True)
class Hangs(Raises):
    """Hangs at one record, once, until it is let go."""

    error: type[BaseException] = AssertionError
    let_go: Gate | None = None

    def __call__(self, ids: Iterable[int]) -> None:
        assert self.once is not None
        assert self.let_go is not None
        if AT in ids and not self.once.is_open:
            self.once.open()
            self.let_go.await_open(1_000)


def batch(first: int) -> pa.RecordBatch:
    ids = list(range(first, first + BATCH))
    return pa.record_batch([ids, [f"app-{each % 7}" for each in ids]], schema=SCHEMA)


def records(source: type[ScriptedSource] = ScriptedSource, **more: Any) -> ScriptedSource:
    batches = [batch(first) for first in range(0, RECORDS, BATCH)]
    return source(SCHEMA, (tuple(batches[::2]), tuple(batches[1::2])), **more)


def records_behind(gate: Gate) -> ScriptedSource:
    """The same; the batch in which there is trouble comes when the gate is open."""
    splits = records().scripts
    waits = [
        [*([Wait(gate)] if each.column("id")[0].as_py() == AT // BATCH * BATCH else []), each]
        for each in splits[0]
    ]
    return ScriptedSource(SCHEMA, (tuple(item for pair in waits for item in pair), splits[1]))


def said(home: Path) -> Counter[int]:
    return Counter(pq.read_table(home / "said")["id"].to_pylist())


# --- the code of each kind


@dataclass(frozen=True)
class Rows:
    """`map_rows`"""

    trouble: Trouble

    def __call__(self, row: Any) -> Any:
        self.trouble([row.id])
        return row


@dataclass(frozen=True)
class ManyRows:
    """`flat_map_rows`, with something lazy that only Python itself iterates."""

    trouble: Trouble

    def __call__(self, row: Any) -> Any:
        return map(Rows(self.trouble), [row])


@dataclass(frozen=True)
class Batches:
    """`mapInArrow`, lazy too."""

    trouble: Trouble

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Any:
        return map(self._one, batches)

    def _one(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self.trouble(batch["id"].to_pylist())
        return batch


@dataclass(frozen=True)
class Frames:
    """`mapInPandas`"""

    trouble: Trouble

    def __call__(self, frames: Iterator[Any]) -> Any:
        return filter(self._is_good, frames)

    def _is_good(self, frame: Any) -> bool:
        self.trouble(frame["id"].tolist())
        return True


@dataclass(frozen=True)
class Udf:
    """A function of one value of each row."""

    trouble: Trouble

    def __call__(self, value: int) -> int:
        self.trouble([value])
        return value


class Hears:
    """What a function hears of checkpoints goes to its trouble, if that wants to know."""

    trouble: Any

    def on_snapshot(self, checkpoint_id: int) -> None:
        self._hear("snapshot", checkpoint_id)

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._hear("complete", checkpoint_id)

    def _hear(self, what: str, checkpoint_id: int) -> None:
        if hasattr(self.trouble, "hears"):
            self.trouble.hears(what, checkpoint_id)


class Keys(Hears, KeyProcessor):
    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble

    def process(self, key: Any, rows: Iterator[Any]) -> Any:
        return map(Rows(self.trouble), rows)


class Reduces(KeyProcessor):
    """The function that reduces is called by the state, and that by something lazy."""

    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble

    def open(self, states: KeyStates) -> None:
        self.newest = states.reducing("newest", "id long", self._reduce)

    def _reduce(self, kept: Any, more: Any) -> Any:
        self.trouble([more[0]])
        return more

    def process(self, key: Any, rows: Iterator[Any]) -> Iterator[Any]:
        taken = list(rows)
        list(map(self.newest.add, [(row.id,) for row in taken]))
        yield from taken


class Processor(Hears, StatefulProcessor):
    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble

    def init(self, handle: Any) -> None:
        """Nothing is kept."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return map(self._one, rows)

    def _one(self, row: Any) -> Row:
        self.trouble([row.id])
        return Row(id=row.id, app=row.app)

    def close(self) -> None:
        """Nothing is held."""


class KeyedBatches(Hears, KeyedFunction):
    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble

    def process(self, batch: pa.RecordBatch) -> Any:
        return Batches(self.trouble)(iter((batch,)))

    def snapshot(self) -> None:
        return None


class Stream(Hears, StreamFunction):
    def __init__(self, trouble: Trouble) -> None:
        self.trouble = trouble

    def process(self, batch: pa.RecordBatch) -> Any:
        return Batches(self.trouble)(iter((batch,)))


@dataclass(frozen=True)
class TroubledSource(ScriptedSource):
    trouble: Trouble | None = None

    def open(self, splits: Any, context: Any) -> Any:
        reader = super().open(splits, context)
        poll, trouble = reader.poll, self.trouble
        assert trouble is not None

        def troubled() -> Any:
            polled = poll()
            if isinstance(polled, pa.RecordBatch):
                trouble(polled["id"].to_pylist())
            return polled

        reader.poll = troubled  # type: ignore[method-assign]
        return reader


@dataclass(frozen=True)
class TroubledSink(Sink):
    """Has trouble when it writes, prepares or commits."""

    sink: Sink
    trouble: Trouble
    when: str

    def open_writer(self, context: SinkContext) -> SinkWriter:
        return _TroubledWriter(self, self.sink.open_writer(context))

    def open_committer(self, context: CommitterContext) -> Committer:
        return _TroubledCommitter(self, self.sink.open_committer(context))

    def describe(self) -> str:
        return self.sink.describe()

    def meet(self, when: str, ids: Iterable[int]) -> None:
        if self.when == when:
            self.trouble(ids)


class _TroubledWriter(SinkWriter):
    def __init__(self, troubled: TroubledSink, writer: SinkWriter) -> None:
        self._troubled = troubled
        self._writer = writer

    def write(self, batch: pa.RecordBatch) -> None:
        self._troubled.meet("writes", batch["id"].to_pylist())
        self._writer.write(batch)

    def rotate(self, checkpoint_id: Any) -> Any:
        prepare = self._writer.rotate(checkpoint_id)

        def prepared() -> Any:
            self._troubled.meet("prepares", [AT])
            return prepare()

        return prepared

    def close(self) -> None:
        self._writer.close()


class _TroubledCommitter(Committer):
    def __init__(self, troubled: TroubledSink, committer: Committer) -> None:
        self._troubled = troubled
        self._committer = committer

    def commit(self, epoch: Any, prepared: Any) -> None:
        self._troubled.meet("commits", [AT])
        self._committer.commit(epoch, prepared)

    def sweep(self, *what: Any) -> None:
        self._committer.sweep(*what)

    def close(self) -> None:
        self._committer.close()


class Handler:
    """What `foreachBatch` is behind: called on the driver with the files of an epoch."""

    def __init__(self, home: Path, trouble: Trouble) -> None:
        self._said = home / "said"
        self._trouble = trouble

    def __call__(self, epoch: int, mark: Mark, files: list[str]) -> None:
        tables = [pq.read_table(file) for file in files]
        for table in tables:
            self._trouble(table["id"].to_pylist())
        self._said.mkdir(exist_ok=True)
        if tables:
            pq.write_table(pa.concat_tables(tables), self._said / f"{epoch}.parquet")


# --- their jobs


def _written(home: Path, node: Node, sink: Sink | None = None) -> Plan:
    sink = sink or FileSink(str(home / "said"), "parquet", SCHEMA)
    return build_plan("said", [Node(Write(sink), SCHEMA, (node,), given_uid="write")], 2)


def _read(source: ScriptedSource | None = None) -> Node:
    return Node(Read(source or records()), SCHEMA, given_uid="read")


def _with(operator: Any, home: Path) -> Plan:
    return _written(home, Node(operator, SCHEMA, (_read(),), given_uid="code"))


def _row(home: Path, trouble: Trouble) -> Plan:
    return _with(MapInArrow(RowMap(Rows(trouble), SCHEMA), "Rows"), home)


def _rows(home: Path, trouble: Trouble) -> Plan:
    return _with(MapInArrow(RowFlatMap(ManyRows(trouble), SCHEMA), "ManyRows"), home)


def _arrow(home: Path, trouble: Trouble) -> Plan:
    return _with(MapInArrow(ArrowFunction(Batches(trouble), SCHEMA), "Batches"), home)


def _pandas(home: Path, trouble: Trouble) -> Plan:
    return _with(MapInArrow(PandasFunction(Frames(trouble), SCHEMA, "UTC"), "Frames"), home)


def _udf(home: Path, trouble: Trouble) -> Plan:
    called = RowFunction(Udf(trouble), (Column("id", pa.int64()),), pa.int64(), "Udf")
    columns = (Named("id", called), Named("app", Column("app", pa.string())))
    return _with(Project(columns), home)


def _key_processor(home: Path, trouble: Trouble) -> Plan:
    program = KeyProgram(partial(Keys, trouble), "Keys", SCHEMA)
    return _with(Transform(program, "Keys", ("app",), "both"), home)


def _reducing(home: Path, trouble: Trouble) -> Plan:
    program = KeyProgram(partial(Reduces, trouble), "Reduces", SCHEMA)
    return _with(Transform(program, "Reduces", ("app",), "both"), home)


def _stateful_processor(home: Path, trouble: Trouble) -> Plan:
    pickled = cloudpickle.dumps(Processor(trouble))
    program = ProcessorProgram(pickled, "Processor", SCHEMA, "none", "UTC", False)
    return _with(Transform(program, "Processor", ("app",)), home)


def _keyed_function(home: Path, trouble: Trouble) -> Plan:
    return _with(Process(partial(KeyedBatches, trouble), "KeyedBatches", ("app",)), home)


def _stream_function(home: Path, trouble: Trouble) -> Plan:
    return _with(ProcessStream(partial(Stream, trouble), "Stream"), home)


def _source(home: Path, trouble: Trouble) -> Plan:
    return _written(home, _read(replace(records(TroubledSource), trouble=trouble)))


def _sink(home: Path, trouble: Trouble, when: str = "writes") -> Plan:
    sink = TroubledSink(FileSink(str(home / "said"), "parquet", SCHEMA), trouble, when)
    return _written(home, _read(), sink)


def _for_each_batch(home: Path, trouble: Trouble) -> Plan:
    sink = StagedSink(str(home / "staged"), Handler(home, trouble), SCHEMA)
    return _written(home, _read(), sink)


KINDS: dict[str, Callable[[Path, Trouble], Plan]] = {
    "row function": _row,
    "row function of many": _rows,
    "Arrow function": _arrow,
    "pandas function": _pandas,
    "UDF": _udf,
    "KeyProcessor": _key_processor,
    "reducing function": _reducing,
    "StatefulProcessor": _stateful_processor,
    "KeyedFunction": _keyed_function,
    "StreamFunction": _stream_function,
    "source": _source,
    "sink": _sink,
    "sink that prepares": partial(_sink, when="prepares"),
    "sink that commits": partial(_sink, when="commits"),
    "foreachBatch": _for_each_batch,
}


def plan_of(kind: str, home: Path, trouble: Trouble) -> Plan:
    """The job of this kind; its files are below `home`."""
    return KINDS[kind](home, trouble)
