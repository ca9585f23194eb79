"""The world outside the job: numbered records to read, and transactional systems to write to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import pyarrow as pa

from stillframe.api.sinks import Committable, Committer, Sink, SinkContext, SinkWriter
from stillframe.api.sources import (
    EndOfData,
    NothingYet,
    Polled,
    Source,
    SourceContext,
    SourceReader,
    Split,
)
from stillframe.errors import StorageError
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid
from stillframe.testing.simulation.world import World

RECORD_SCHEMA = pa.schema([("id", pa.int64()), ("key", pa.int64())])
IDS_PER_SPLIT = 1_000_000

Row = tuple[int, ...]


def record(split: int, index: int, keys: int) -> Row:
    """Record `index` of a split: its id tells both, its key is scattered."""
    number = split * IDS_PER_SPLIT + index
    return number, (number * 2_654_435_761 >> 8) % keys


@dataclass(frozen=True, eq=False)
class NumbersSource(Source):
    """Splits of numbered records, read in batches of any size, with pauses."""

    world: World
    lengths: tuple[int, ...]
    keys: int
    batch_rows_max: int

    @property
    def schema(self) -> pa.Schema:
        return RECORD_SCHEMA

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(f"split-{index:03d}", {"next": 0}) for index in range(len(self.lengths))]

    def open(self, splits: Sequence[Split], context: SourceContext) -> SourceReader:
        return _NumbersReader(self, splits)

    def describe(self) -> str:
        return "numbers"


class _NumbersReader(SourceReader):
    def __init__(self, source: NumbersSource, splits: Sequence[Split]) -> None:
        self._source = source
        self._next = {split.id: cast(int, split.position["next"]) for split in splits}

    def poll(self) -> Polled:
        world, lengths = self._source.world, self._source.lengths
        unread = [name for name, at in self._next.items() if at < lengths[_split_index(name)]]
        if not unread:
            return EndOfData()
        if world.chance(0.7):
            return NothingYet(world.random.random() * 0.6)
        name = world.random.choice(unread)
        start = self._next[name]
        count = world.random.randint(1, self._source.batch_rows_max)
        stop = min(start + count, lengths[_split_index(name)])
        rows = [
            record(_split_index(name), index, self._source.keys) for index in range(start, stop)
        ]
        self._next[name] = stop
        return pa.record_batch(
            [pa.array(column) for column in zip(*rows, strict=True)], RECORD_SCHEMA
        )

    def splits(self) -> list[Split]:
        return [Split(name, {"next": at}) for name, at in self._next.items()]

    def close(self) -> None:
        """Nothing is held."""


def _split_index(name: str) -> int:
    return int(name.removeprefix("split-"))


@dataclass(slots=True)
class Outside:
    """A system with two-phase commit, as one sink sees it."""

    prepared: dict[str, tuple[Attempt, list[Row]]] = field(default_factory=dict)
    committed: set[str] = field(default_factory=set)
    visible: list[Row] = field(default_factory=list)
    on_visible: Callable[[list[Row]], None] = lambda rows: None

    def commit(self, transaction: str) -> None:
        if transaction in self.committed:
            return
        if transaction not in self.prepared:
            raise StorageError(f"there is no prepared transaction {transaction}")
        _, rows = self.prepared.pop(transaction)
        self.committed.add(transaction)
        self.visible += rows
        self.on_visible(rows)


@dataclass(frozen=True, eq=False)
class TransactionalSink(Sink):
    """Writes to an outside system; commits in the slots, or all together at the coordinator."""

    outside: Outside
    name: str
    at_coordinator: bool

    @property
    def commits_at_coordinator(self) -> bool:  # type: ignore[override]
        return self.at_coordinator

    def open_writer(self, context: SinkContext) -> SinkWriter:
        return _TransactionalWriter(self.outside, context)

    def open_committer(self) -> Committer:
        return _TransactionalCommitter(self.outside)

    def describe(self) -> str:
        return self.name


class _TransactionalWriter(SinkWriter):
    def __init__(self, outside: Outside, context: SinkContext) -> None:
        self._outside = outside
        self._context = context
        self._rows: list[Row] = []

    def write(self, batch: pa.RecordBatch) -> None:
        columns = [column.to_pylist() for column in batch.columns]
        self._rows += zip(*columns, strict=True)

    def rotate(self, checkpoint_id: CheckpointId) -> Callable[[], Sequence[Committable]]:
        rows, self._rows = self._rows, []
        who = self._context
        transaction = f"{who.uid}-{who.subtask}-{who.attempt}-{checkpoint_id}"

        def prepare() -> Sequence[Committable]:
            if not rows:
                return []
            self._outside.prepared[transaction] = (who.attempt, rows)
            return [{"transaction": transaction}]

        return prepare

    def close(self) -> None:
        self._rows = []


class _TransactionalCommitter(Committer):
    def __init__(self, outside: Outside) -> None:
        self._outside = outside

    def commit(self, epoch: Epoch, committables: Sequence[Committable]) -> None:
        for committable in committables:
            self._outside.commit(str(committable["transaction"]))

    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        kept = {str(committable["transaction"]) for committable in keep}
        for transaction, (attempt, _) in list(self._outside.prepared.items()):
            if attempt < older_than and transaction not in kept:
                del self._outside.prepared[transaction]
