"""The world outside the job: numbered records to read, and transactional systems to write to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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
    Discovered,
    EndOfData,
    NothingYet,
    Polled,
    Source,
    SourceContext,
    SourceReader,
    Split,
    SplitEnumerator,
)
from stillframe.errors import StorageError
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid
from stillframe.json_values import JsonObject
from stillframe.testing.simulation.world import World

RECORD_SCHEMA = pa.schema([("id", pa.int64()), ("key", pa.int64())])
IDS_PER_SPLIT = 1_000_000
_SPLITS_KEPT_MAX = 512
_DISCOVERY_SECONDS = 0.5
_CALM_BATCH_ROWS_MAX = 60

Row = tuple[int, ...]
OnVisible = Callable[[str, list[Row], CheckpointId | None], None]
"""Called with who wrote the rows, one subtask of one sink, the rows, and, where that is known, the
checkpoint they were prepared for."""


Records = npt.NDArray[np.int64]
"""Ids and keys, two columns."""
NO_RECORDS: Records = np.empty((0, 2), dtype=np.int64)


@lru_cache(_SPLITS_KEPT_MAX)
def records_of(split: int, length: int, keys: int) -> Records:
    """The records of a split: an id tells split and place, a key is scattered."""
    ids = split * IDS_PER_SPLIT + np.arange(length, dtype=np.int64)
    return np.stack([ids, (ids * 2_654_435_761 >> 8) % keys], axis=1)


@lru_cache(_SPLITS_KEPT_MAX)
def _batch_of(split: int, length: int, keys: int) -> pa.RecordBatch:
    columns = records_of(split, length, keys).T
    return pa.record_batch([pa.array(column.copy()) for column in columns], RECORD_SCHEMA)


def place_of(record_id: int) -> tuple[int, int]:
    """The split a record comes from, and its place there."""
    return divmod(record_id, IDS_PER_SPLIT)


@dataclass(slots=True)
class Hearing:
    """Who is told what the readers of a source hear of completed checkpoints."""

    on_complete: Callable[[CheckpointId, Sequence[Split]], None] = lambda checkpoint_id, splits: (
        None
    )


@dataclass(frozen=True, eq=False)
class NumbersSource(Source):
    """Splits of numbered records, read in batches of any size, with pauses."""

    world: World
    lengths: tuple[int, ...]
    keys: int
    batch_rows_max: int
    pause_chance: float = 0.7
    """How often there is nothing when it is asked."""
    appear_at_seconds: tuple[float, ...] | None = None
    """When each split can first be discovered; None: all are there and there is no enumerator."""
    hearing: Hearing = field(default_factory=Hearing)

    @property
    def schema(self) -> pa.Schema:
        return RECORD_SCHEMA

    @property
    def discovery_interval_seconds(self) -> float | None:
        return None if self.appear_at_seconds is None else _DISCOVERY_SECONDS

    def splits(self, parallelism: int) -> list[Split]:
        return self.splits_from(0) if self.appear_at_seconds is None else []

    def splits_from(self, first: int) -> list[Split]:
        return [Split(split_name(index), {"next": 0}) for index in range(first, len(self.lengths))]

    def open_enumerator(self, state: JsonObject | None) -> SplitEnumerator:
        return _NumbersEnumerator(self, state)

    def open(self, splits: Sequence[Split], context: SourceContext) -> SourceReader:
        return _NumbersReader(self, splits)

    def describe(self) -> str:
        return "numbers"

    def records(self, split: int) -> Records:
        return records_of(split, self.lengths[split], self.keys)

    def batch(self, split: int, start: int, stop: int) -> pa.RecordBatch:
        return _batch_of(split, self.lengths[split], self.keys).slice(start, stop - start)


class _NumbersEnumerator(SplitEnumerator):
    """Its state is how many splits it has found; they appear in their order."""

    def __init__(self, source: NumbersSource, state: JsonObject | None) -> None:
        self._source = source
        self._found = cast(int, state["found"]) if state else 0

    def discover(self) -> Discovered:
        source, before = self._source, self._found
        moments = source.appear_at_seconds
        assert moments is not None
        self._found = sum(moment <= source.world.now for moment in moments)
        splits = source.splits_from(before)[: self._found - before]
        return Discovered(splits, {"found": self._found}, self._found == len(moments))


class _NumbersReader(SourceReader):
    def __init__(self, source: NumbersSource, splits: Sequence[Split]) -> None:
        self._source = source
        self._next = {split.id: cast(int, split.position["next"]) for split in splits}
        self._polled: str | None = None

    def poll(self) -> Polled:
        world, lengths = self._source.world, self._source.lengths
        unread = self._unread()
        if not unread:
            return EndOfData()
        if not world.is_calm and world.chance(self._source.pause_chance):
            return NothingYet(world.random.random() * 0.6)
        self._polled = name = world.random.choice(unread)
        start = self._next[name]
        count_max = _CALM_BATCH_ROWS_MAX if world.is_calm else self._source.batch_rows_max
        stop = min(start + world.random.randint(1, count_max), lengths[split_index(name)])
        self._next[name] = stop
        return self._source.batch(split_index(name), start, stop)

    def _unread(self) -> list[str]:
        lengths = self._source.lengths
        return [name for name, at in self._next.items() if at < lengths[split_index(name)]]

    def open_splits(self) -> frozenset[str]:
        return frozenset(self._unread())

    def polled_split(self) -> str | None:
        return self._polled

    def splits(self) -> list[Split]:
        """Ended ones too, unless an enumerator remembers them."""
        lengths = self._source.lengths
        keeps_ended = self._source.appear_at_seconds is None
        return [
            Split(name, {"next": at})
            for name, at in self._next.items()
            if keeps_ended or at < lengths[split_index(name)]
        ]

    def add_splits(self, splits: Sequence[Split]) -> None:
        self._next.update((split.id, cast(int, split.position["next"])) for split in splits)

    def on_checkpoint_complete(self, checkpoint_id: CheckpointId, splits: Sequence[Split]) -> None:
        self._source.hearing.on_complete(checkpoint_id, splits)

    def close(self) -> None:
        """Nothing is held."""


def rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    columns = [column.to_numpy().tolist() for column in batch.columns]  # no nulls in any
    return zip(*columns, strict=True)


def split_name(split: int) -> str:
    return f"split-{split:03d}"


def split_index(name: str) -> int:
    return int(name.removeprefix("split-"))


@dataclass(slots=True)
class Outside:
    """A system with two-phase commit, as one sink sees it."""

    prepared: dict[str, tuple[Attempt, list[Row]]] = field(default_factory=dict)
    committed: set[str] = field(default_factory=set)
    """The marks of those that may be asked for again."""
    on_visible: OnVisible = lambda writer, rows, prepared_for: None

    def commit(self, transaction: str) -> None:
        if transaction in self.committed:
            return
        if transaction not in self.prepared:
            raise StorageError(f"there is no prepared transaction {transaction}")
        _, rows = self.prepared.pop(transaction)
        self.committed.add(transaction)
        self.on_visible(transaction.rsplit("-", 2)[0], rows, None)


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

    def open_committer(self, context: CommitterContext) -> Committer:
        return _TransactionalCommitter(self.outside)

    def describe(self) -> str:
        return self.name


class _TransactionalWriter(SinkWriter):
    def __init__(self, outside: Outside, context: SinkContext) -> None:
        self._outside = outside
        self._context = context
        self._rows: list[Row] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._rows += rows_of(batch)

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

    def commit(self, epoch: Epoch, prepared: Sequence[Prepared]) -> None:
        for committable in committables_of(prepared):
            self._outside.commit(str(committable["transaction"]))

    def forget(self, committables: Sequence[Committable]) -> None:
        self._outside.committed -= {str(each["transaction"]) for each in committables}

    def sweep(
        self, job: str, uid: OperatorUid, older_than: Attempt, keep: Sequence[Committable]
    ) -> None:
        kept = {str(committable["transaction"]) for committable in keep}
        for transaction, (attempt, _) in list(self._outside.prepared.items()):
            if attempt < older_than and transaction not in kept:
                del self._outside.prepared[transaction]
