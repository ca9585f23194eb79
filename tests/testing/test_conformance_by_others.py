"""Four connectors, wrong in one place each and right in their twins, by someone who had read the
contracts' text and not the kit.

They work on a good day. The docstring of each says which sentence it breaks and what would show it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

import stillframe
from stillframe.api.sinks import (
    Committable,
    Committer,
    CommitterContext,
    Prepared,
    Sink,
    SinkContext,
    SinkWriter,
    committables_of,
)
from stillframe.api.sources import (
    BlockingReader,
    EndOfData,
    NothingYet,
    Polled,
    Source,
    SourceContext,
    SourceReader,
    Split,
)
from stillframe.ids import Attempt, CheckpointId, Epoch, Mark, OperatorUid, Writer
from stillframe.json_values import JsonObject
from stillframe.testing.conformance import PromiseBroken, check_sink, check_source

pytestmark = pytest.mark.slow

SCHEMA = pa.schema([("number", pa.int64()), ("name", pa.string())])


# --- A queue whose messages are deleted when they are acknowledged -----------------------------


@dataclass(frozen=True)
class QueueSource(Source):
    """Two queues in a database; a message stays until it is deleted."""

    path: str
    last: int = 19

    @classmethod
    def filled(cls, place: Path) -> Source:
        source = cls(str(place / "queue.db"))
        with contextlib.closing(sqlite3.connect(source.path)) as queue, queue:
            queue.execute("CREATE TABLE message (queue TEXT, number INTEGER, name TEXT)")
            rows = [(q, n, f"{q}-{n}") for q in ("left", "right") for n in range(source.last + 1)]
            queue.executemany("INSERT INTO message VALUES (?, ?, ?)", rows)
        return source

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(queue, {"next": 0}) for queue in ("left", "right")]

    def open(self, splits: Sequence[Split], context: SourceContext) -> SourceReader:
        return QueueReader(self, splits)

    def describe(self) -> str:
        return f"queues of {self.path}"


class QueueReader(SourceReader):
    def __init__(self, source: QueueSource, splits: Sequence[Split]) -> None:
        self.last = source.last
        self.queue = sqlite3.connect(source.path)
        self.next: dict[str, Any] = {split.id: split.position["next"] for split in splits}

    def poll(self) -> Polled:
        unread = [queue for queue, number in self.next.items() if number <= self.last]
        for name in sorted(unread, key=self.next.__getitem__):
            rows = self.queue.execute(
                "SELECT number, name FROM message WHERE queue = ? AND number >= ?"
                " ORDER BY number LIMIT 3",
                (name, self.next[name]),
            ).fetchall()
            if rows:
                self.next[name] = rows[-1][0] + 1
                return pa.record_batch([*map(list, zip(*rows, strict=True))], schema=SCHEMA)
        return NothingYet(0.01) if unread else EndOfData()

    def splits(self) -> list[Split]:
        return [Split(queue, {"next": number}) for queue, number in self.next.items()]

    def on_checkpoint_complete(self, checkpoint_id: CheckpointId, splits: Sequence[Split]) -> None:
        with self.queue:
            for split in splits:
                self.queue.execute(
                    "DELETE FROM message WHERE queue = ? AND number < ?",
                    (split.id, split.position["next"]),
                )

    def close(self) -> None:
        self.queue.close()


@dataclass(frozen=True)
class AcknowledgesTheLastBarrier(QueueSource):
    """Acknowledges what was handed out at the last barrier.

    Breaks: "`splits` are those of this reader, as they are in it", that is in the checkpoint that
    is complete, and "a queue may be told to forget" what lies before *these* positions. The author
    thought of records read since the barrier, but not of a second barrier that has come meanwhile.

    In production: a slow upload lets two checkpoints be in flight; the older one completes, its
    slot dies, the job restarts from it, and what lies between the two barriers is gone.
    """

    def open(self, splits: Sequence[Split], context: SourceContext) -> SourceReader:
        return LastBarrierReader(self, splits)


class LastBarrierReader(QueueReader):
    def __init__(self, source: QueueSource, splits: Sequence[Split]) -> None:
        super().__init__(source, splits)
        self.to_acknowledge = list(splits)

    def splits(self) -> list[Split]:
        self.to_acknowledge = super().splits()
        return self.to_acknowledge

    def on_checkpoint_complete(self, checkpoint_id: CheckpointId, splits: Sequence[Split]) -> None:
        super().on_checkpoint_complete(checkpoint_id, self.to_acknowledge)


# --- A log in numbered segments ----------------------------------------------------------------


@dataclass(frozen=True)
class SegmentSource(Source):
    """A log in files that are named by a number: segment-8, segment-9, segment-10."""

    path: str

    @classmethod
    def filled(cls, place: Path) -> Source:
        for segment in range(8, 12):
            lines = [json.dumps({"number": 10 * segment + n, "name": "x"}) for n in range(5)]
            (place / f"segment-{segment}").write_text("\n".join(lines))
        return cls(str(place))

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("log", {"segment": "segment-8", "line": 0})]

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return SegmentReader(self.path, splits)

    def goes_back(self, position: JsonObject, later: JsonObject) -> bool:
        return _in_order(later) < _in_order(position)

    def describe(self) -> str:
        return f"log {self.path}"


def _in_order(position: JsonObject) -> tuple[int, int]:
    segment, line = str(position["segment"]), position["line"]
    assert isinstance(line, int)
    return int(segment.removeprefix("segment-")), line


class SegmentReader(BlockingReader):
    def __init__(self, path: str, splits: Sequence[Split]) -> None:
        self.path, self.given, self.interrupted = Path(path), splits, False

    def read(self) -> Iterator[tuple[Split, pa.RecordBatch]]:
        for split in self.given:
            segment, line = _in_order(split.position)
            while not self.interrupted and (self.path / f"segment-{segment}").exists():
                lines = (self.path / f"segment-{segment}").read_text().split("\n")
                rows = [json.loads(each) for each in lines[line : line + 2]]
                line += 2
                if line >= len(lines):
                    segment, line = segment + 1, 0
                position: JsonObject = {"segment": f"segment-{segment}", "line": line}
                batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
                yield Split(split.id, position), batch

    def interrupt(self) -> None:
        self.interrupted = True

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class ComparesNumbersAsTexts(SegmentSource):
    """Compares positions as they are written.

    Breaks: "Whether `later`, of the same split, lies before `position`" (`goes_back`): as a text
    segment-10 lies before segment-9.

    In production: runs for weeks, until the log comes to its tenth segment. Then the job ends with
    a sentence about a source that went back, and does so after each start.
    """

    def goes_back(self, position: JsonObject, later: JsonObject) -> bool:
        texts = [(str(each["segment"]), str(each["line"])) for each in (later, position)]
        return texts[0] < texts[1]


# --- Files that are renamed into a directory that several jobs share ---------------------------


@dataclass(frozen=True)
class FolderSink(Sink):
    """One JSON file for each subtask and checkpoint, staged in `.staged` and then renamed."""

    path: str
    sweeps_all: ClassVar[bool] = False

    @classmethod
    def made(cls, place: Path) -> Sink:
        (place / ".staged").mkdir()
        return cls(str(place))

    def open_writer(self, context: SinkContext) -> SinkWriter:
        return FolderWriter(Path(self.path), context)

    def open_committer(self, context: CommitterContext) -> Committer:
        return FolderCommitter(Path(self.path), self.sweeps_all)

    def describe(self) -> str:
        return f"folder {self.path}"


class FolderWriter(SinkWriter):
    def __init__(self, path: Path, context: SinkContext) -> None:
        self.path, self.context = path, context
        self.rows: list[dict[str, Any]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.to_pylist()

    def rotate(self, checkpoint_id: CheckpointId) -> Callable[[], Sequence[Committable]]:
        ended, self.rows = self.rows, []
        who = self.context
        whose = f"{who.job}.{who.uid}.{who.incarnation}"
        name = f"{whose}.{who.attempt}.{who.subtask}.{checkpoint_id}"
        return partial(self.staged, name, ended)

    def staged(self, name: str, rows: list[dict[str, Any]]) -> Sequence[Committable]:
        if not rows:
            return []
        with open(self.path / ".staged" / name, "w") as file:
            json.dump(rows, file)
            file.flush()
            os.fsync(file.fileno())
        return [{"name": name}]

    def close(self) -> None:
        self.rows = []


class FolderCommitter(Committer):
    def __init__(self, path: Path, sweeps_all: bool) -> None:
        self.path, self.sweeps_all = path, sweeps_all

    def commit(self, epoch: Epoch, prepared: Sequence[Prepared]) -> None:
        for committable in committables_of(prepared):
            name = str(committable["name"])
            try:
                os.replace(self.path / ".staged" / name, self.path / f"{name}.json")
            except FileNotFoundError:
                if not (self.path / f"{name}.json").exists():
                    raise

    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        kept = {each["name"] for each in keep}
        for file in (self.path / ".staged").iterdir():
            whose, _incarnation, attempt, _subtask, _checkpoint_id = file.name.rsplit(".", 4)
            is_ours = self.sweeps_all or whose == f"{job}.{uid}"
            if is_ours and int(attempt) < older_than and file.name not in kept:
                file.unlink(missing_ok=True)


@dataclass(frozen=True)
class SweepsForOthers(FolderSink):
    """Sweeps whatever an attempt with a smaller number has staged, whoever it belongs to.

    Breaks: "Remove what attempts before `older_than` left behind, but not what `keep` still needs":
    attempts are counted by each job, and `keep` speaks for the job and uid that are given. "Every
    name carries all of it" so that a sweep can tell; this one has the name and does not look.

    In production: two jobs, or two queries of one, write to one folder. One of them restarts, for
    the seventh time, and removes what the other one, still in its first attempt, has prepared; the
    other one's commit then finds nothing, and its rows are lost.
    """

    sweeps_all: ClassVar[bool] = True


def in_folder(sink: FolderSink) -> list[dict[str, Any]]:
    return [row for file in Path(sink.path).glob("*.json") for row in json.loads(file.read_text())]


# --- A table, with a table of marks beside it --------------------------------------------------


@dataclass(frozen=True)
class TableSink(stillframe.TransactionalSink):
    """Rows and marks in one database; a lock of the whole database shuts out the others."""

    path: str
    forgets_incarnation: ClassVar[bool] = False

    @classmethod
    def made(cls, place: Path) -> Sink:
        sink = cls(str(place / "table.db"))
        with contextlib.closing(sqlite3.connect(sink.path)) as table:
            table.execute("CREATE TABLE record (number INTEGER, name TEXT)")
            table.execute("CREATE TABLE mark (writer TEXT PRIMARY KEY, checkpoint_id INTEGER)")
        return sink

    def open_target(self) -> stillframe.Target:
        return TableTarget(self.path, self.forgets_incarnation)

    def describe(self) -> str:
        return f"table {self.path}"


class TableTarget(stillframe.Target):
    def __init__(self, path: str, forgets_incarnation: bool) -> None:
        self.table = sqlite3.connect(
            path, timeout=0.2, isolation_level=None, check_same_thread=False
        )
        self.forgets_incarnation = forgets_incarnation

    def key(self, writer: Writer) -> str:
        return f"{writer.uid}/{writer.subtask}" if self.forgets_incarnation else str(writer)

    def begin(self, writer: Writer) -> CheckpointId | None:
        try:
            self.table.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            raise stillframe.Unavailable(f"the table is locked ({error})") from error
        found = self.table.execute(
            "SELECT checkpoint_id FROM mark WHERE writer = ?", (self.key(writer),)
        ).fetchone()
        return CheckpointId(found[0]) if found else None

    def write(
        self,
        mark: Mark,
        rows: Iterator[pa.RecordBatch],
        refuse: Callable[[pa.RecordBatch, str], None],
    ) -> None:
        for batch in rows:
            values = zip(*(column.to_pylist() for column in batch.columns), strict=True)
            self.table.executemany("INSERT INTO record VALUES (?, ?)", values)
        self.table.execute(
            "INSERT OR REPLACE INTO mark VALUES (?, ?)", (self.key(mark.writer), mark.checkpoint_id)
        )
        self.table.execute("COMMIT")

    def abandon(self) -> None:
        if self.table.in_transaction:
            self.table.execute("ROLLBACK")

    def close(self) -> None:
        self.table.close()


@dataclass(frozen=True)
class MarksWithoutIncarnation(TableSink):
    """Keeps its marks by uid and subtask.

    Breaks: "A mark is (incarnation, uid, subtask, checkpoint id)", and `begin` looks for the newest
    mark of "this writer", who is one of its job's incarnation: "Two jobs that start from one
    savepoint have different incarnations and never see each other's marks."

    In production: a job is begun again with an empty checkpoint location, on the same table. Its
    checkpoints count from 1, the old marks say 5,000: each epoch of the first days is taken for
    done, and not a row of them is written.
    """

    forgets_incarnation: ClassVar[bool] = True


def in_table(sink: TableSink) -> list[dict[str, Any]]:
    with contextlib.closing(sqlite3.connect(sink.path)) as table:
        rows = table.execute("SELECT number, name FROM record").fetchall()
    return [{"number": number, "name": name} for number, name in rows]


# --- What the kit says -------------------------------------------------------------------------

CHECKS = 40

SOURCES = [
    (QueueSource, AcknowledgesTheLastBarrier, "on_checkpoint_complete says what is never asked"),
    (SegmentSource, ComparesNumbersAsTexts, "only goes forward, and goes_back knows that"),
]
SINKS = [
    (FolderSink, SweepsForOthers, in_folder, "what another job, or another sink of the job, has"),
    (TableSink, MarksWithoutIncarnation, in_table, "a mark belongs to one incarnation of the job"),
]


@pytest.mark.parametrize(("right", "wrong", "promise"), SOURCES)
def test_a_wrong_source_is_told_by_its_promise_and_its_twin_passes(right, wrong, promise):
    check_source(right.filled, checks=CHECKS)
    with pytest.raises(PromiseBroken) as broken:
        check_source(wrong.filled, checks=CHECKS)
    assert promise in broken.value.promise


@pytest.mark.parametrize(("right", "wrong", "visible", "promise"), SINKS)
def test_a_wrong_sink_is_told_by_its_promise_and_its_twin_passes(right, wrong, visible, promise):
    check_sink(right.made, visible, schema=SCHEMA, checks=CHECKS)
    with pytest.raises(PromiseBroken) as broken:
        check_sink(wrong.made, visible, schema=SCHEMA, checks=CHECKS)
    assert promise in broken.value.promise
