"""A small sink that is written by hand and right, and sinks that are each wrong in one place.

Rows are staged as JSON files and committed into an SQLite file with their mark. What the classes
below it break is a promise of the contract; none of them fails in a job without failures.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from secrets import token_hex

from stillframe.api.sinks import Committer, Prepared, Sink, SinkContext, SinkWriter


@dataclass(frozen=True)
class SmallSink(Sink):
    """Right."""

    path: str

    def open_writer(self, context):
        return SmallWriter(self, context)

    def open_committer(self, context):
        return SmallCommitter(self)

    def describe(self):
        return f"small {self.path}"

    # What others get wrong:

    def stage(self, context: SinkContext, checkpoint_id: int, rows: list) -> list:
        """Make rows durable where nobody looks; answers the committables."""
        name = f"{context.attempt}-{context.subtask}-{checkpoint_id}-{token_hex(4)}"
        return self._staged(f"{name}-{context.job}-{context.uid}.json", rows)

    def _staged(self, name: str, rows: list) -> list:
        if not rows:
            return []
        with open(os.path.join(self.path, name), "w") as file:
            json.dump(rows, file)
        return [{"file": name}]

    def rows_of(self, committable) -> list:
        with open(os.path.join(self.path, committable["file"])) as file:
            return json.load(file)

    def mark(self, epoch: int, part: Prepared) -> tuple[str, int]:
        return str(part.mark.writer), part.mark.checkpoint_id

    def commit(self, outside: sqlite3.Connection, epoch: int, part: Prepared) -> None:
        outside.execute("begin immediate")
        if not self.is_done(outside, epoch, part):
            self.write_rows(outside, part)
            self.write_mark(outside, epoch, part)
        outside.execute("commit")

    def is_done(self, outside, epoch: int, part: Prepared) -> bool:
        writer, number = self.mark(epoch, part)
        found = outside.execute("select number from marks where writer = ?", [writer]).fetchone()
        return found is not None and found[0] >= number

    def write_rows(self, outside, part: Prepared) -> None:
        for committable in part.committables:
            outside.executemany("insert into rows values (?, ?)", self.rows_of(committable))

    def write_mark(self, outside, epoch: int, part: Prepared) -> None:
        outside.execute("insert or replace into marks values (?, ?)", self.mark(epoch, part))

    def is_left_behind(self, name: str, older_than: int, keep: set[str]) -> bool:
        return int(name.partition("-")[0]) < older_than and name not in keep

    def opened(self) -> sqlite3.Connection:
        outside = sqlite3.connect(
            os.path.join(self.path, "outside.db"), timeout=5, isolation_level=None
        )
        outside.execute("create table if not exists rows (id integer, name text)")
        outside.execute("create table if not exists marks (writer text primary key, number)")
        return outside


class SmallWriter(SinkWriter):
    def __init__(self, sink: SmallSink, context: SinkContext) -> None:
        self._sink = sink
        self._context = context
        self._rows: list = []

    def write(self, batch):
        self._rows += [list(row.values()) for row in batch.to_pylist()]

    def rotate(self, checkpoint_id):
        ended, self._rows = self._rows, []
        return lambda: self._sink.stage(self._context, checkpoint_id, ended)

    def close(self):
        self._rows = []


class SmallCommitter(Committer):
    def __init__(self, sink: SmallSink) -> None:
        self._sink = sink

    def commit(self, epoch, prepared: Sequence[Prepared]):
        with closing(self._sink.opened()) as outside:
            for part in prepared:
                self._sink.commit(outside, epoch, part)

    def sweep(self, job, uid, older_than, keep):
        kept = {each.get("file") for each in keep}
        for name in os.listdir(self._sink.path):
            is_ours = name.endswith(f"-{job}-{uid}.json")
            if is_ours and self._sink.is_left_behind(name, older_than, kept):
                os.unlink(os.path.join(self._sink.path, name))


def rows_in(sink: SmallSink) -> list:
    with closing(sink.opened()) as outside:
        return outside.execute("select id, name from rows").fetchall()


# --- wrong ones --------------------------------------------------------------------------------


class SeenAtPrepare(SmallSink):
    def stage(self, context, checkpoint_id, rows):
        with closing(self.opened()) as outside:
            outside.executemany("insert into rows values (?, ?)", rows)
        return []


class ByEpoch(SmallSink):
    def mark(self, epoch, part):
        return f"{part.mark.writer.uid}/{part.mark.writer.subtask}", epoch


class CommitsTwice(SmallSink):
    def is_done(self, outside, epoch, part):
        return False


class SweepsAll(SmallSink):
    def is_left_behind(self, name, older_than, keep):
        return int(name.partition("-")[0]) < older_than


class MarkApart(SmallSink):
    def commit(self, outside, epoch, part):
        outside.execute("begin immediate")
        if not self.is_done(outside, epoch, part):
            self.write_rows(outside, part)
            outside.execute("commit")
            outside.execute("begin immediate")
            self.write_mark(outside, epoch, part)
        outside.execute("commit")


class LooksBeforeTheFence(SmallSink):
    def commit(self, outside, epoch, part):
        if not self.is_done(outside, epoch, part):
            outside.execute("begin immediate")
            self.write_rows(outside, part)
            self.write_mark(outside, epoch, part)
            outside.execute("commit")


@dataclass(frozen=True)
class KeptInTheSink(SmallSink):
    """Its committable is the key of something that only its own process has."""

    kept: dict = field(default_factory=dict, compare=False)

    def stage(self, context, checkpoint_id, rows):
        key = f"{context.attempt}-{token_hex(4)}"
        self.kept[key] = rows
        return [{"key": key}]

    def rows_of(self, committable):
        return self.kept[committable["key"]]


class NamesWithoutTheAttempt(SmallSink):
    def stage(self, context, checkpoint_id, rows):
        name = f"0-{context.subtask}-{checkpoint_id}-{context.incarnation}"
        return self._staged(f"{name}-{context.job}-{context.uid}.json", rows)

    def is_left_behind(self, name, older_than, keep):
        return False


class AnyIncarnation(SmallSink):
    def mark(self, epoch, part):
        return f"{part.mark.writer.uid}/{part.mark.writer.subtask}", part.mark.checkpoint_id


class NotJson(SmallSink):
    def stage(self, context, checkpoint_id, rows):
        return [{**each, "rows": (0, len(rows))} for each in super().stage(context, 0, rows)]


class PreparesWhatIsThereNow(SmallSink):
    def open_writer(self, context):
        return _PreparesWhatIsThereNow(self, context)


class _PreparesWhatIsThereNow(SmallWriter):
    def rotate(self, checkpoint_id):
        def prepare():
            ended, self._rows = self._rows, []
            return self._sink.stage(self._context, checkpoint_id, ended)

        return prepare


_KEPT: dict = {}


class KeptInTheProcess(SmallSink):
    """As `KeptInTheSink`, but in a module: every copy in the process finds it."""

    def stage(self, context, checkpoint_id, rows):
        key = f"{context.attempt}-{token_hex(4)}"
        _KEPT[key] = rows
        return [{"key": key}]

    def rows_of(self, committable):
        return _KEPT[committable["key"]]
