"""What runs in a chain: one object per operator, made from the plan, fed whole batches.

An operator that remembers something splits its snapshot in two: `snapshot` runs in the loop and
must be quick; the function it answers runs in the background and writes. The answer of that
function goes back to the loop, where `described` turns it into what the acknowledgement carries:
everything but the writing itself is done by the loop thread alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from stillframe.errors import UserCodeError
from stillframe.evaluator.beside import Evaluator
from stillframe.graph.expressions import Expression, Named
from stillframe.graph.logical import MapInArrow
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import (
    FileHandle,
    GroupsReached,
    OperatorSnapshot,
)
from stillframe.runtime.expressions import filter_batch, project
from stillframe.runtime.row_functions import in_batch
from stillframe.runtime.state_files import FrozenState, StateFiles
from stillframe.state.aggregates import AggregateTable
from stillframe.state.partials import is_partial
from stillframe.state.reached import BEGINNING_US, Reached
from stillframe.storage.paths import number_of_file
from stillframe.storage.store import Store
from stillframe.user_code import fail, lazily

Background = Callable[[], Any]


class RunningOperator(ABC):
    """One operator of one subtask, in one attempt. Called by the loop thread only."""

    late_rows: int = 0
    """Records that came too late for it in this attempt and were dropped."""
    timers_fired: int = 0
    """In this attempt, by either clock."""
    keeps_late: bool = False
    """Whether somebody takes those that come too late; then they are not dropped."""
    sees_batches: bool = False
    """Whether it is called by the batch, so that which records come together can be seen in what it
    answers; batches are then left as they came."""

    @abstractmethod
    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Take one batch, answer what follows from it."""

    def on_watermark(self, time_us: int) -> Iterable[pa.RecordBatch]:
        """Event time has come this far; answer what follows from that."""
        return ()

    def time_after(self, time_us: int) -> int:
        """How far event time is behind this operator when it has come this far in front of it."""
        return time_us

    def take_late(self) -> Iterable[pa.RecordBatch]:
        """What came too late since this was called last, as it came in; if it is to keep that."""
        return ()

    def on_barrier(self) -> Iterable[pa.RecordBatch]:
        """A snapshot is about to be taken; answer what still belongs to the epoch it ends."""
        return ()

    def finish(self) -> Iterable[pa.RecordBatch]:
        """The records have ended; answer what is left to say. Called once in the job's life."""
        return ()

    def close(self) -> None:  # noqa: B027 - most operators hold nothing
        """Give everything back. Called once, also after a failure."""


class StatefulOperator(RunningOperator):
    """An operator with something to remember."""

    watermark_us: int | None = None
    """How far event time has come here, of those that remember it."""

    @abstractmethod
    def snapshot(self, checkpoint_id: CheckpointId, savepoint: Store | None = None) -> Background:
        """The synchronous part; the function it answers is run once, in the background.

        Into the `savepoint` goes all there is, as rows, and nothing later builds upon it.
        """

    @abstractmethod
    def described(self, checkpoint_id: CheckpointId, written: Any) -> OperatorSnapshot:
        """What the acknowledgement says, made of what the background part answered."""

    def completed(self, checkpoint_id: CheckpointId) -> None:
        """This checkpoint is complete; at the start of an attempt, the one it was restored from."""

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        """This checkpoint was given up; its snapshot may still be under way, or never begin."""


def files_written(
    checkpoint_id: CheckpointId, operators: Iterable[OperatorSnapshot]
) -> list[FileHandle]:
    """The files that this checkpoint wrote, without those of older ones that it refers to.

    What is kept in the metadata is written with it every time, also if it has not changed.
    The number alone tells them apart: what is referred to belongs to a completed checkpoint, and
    a job's checkpoints are numbered upwards from the completed one it was restored from.
    """
    files = (file for each in operators for file in each.files())
    return [file for file in files if file.is_inline or number_of_file(file.path) == checkpoint_id]


class Passing(RunningOperator):
    """Answers what it is given."""

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        return (batch,)


class Projecting(RunningOperator):
    def __init__(
        self, columns: tuple[Named, ...], schema: pa.Schema, evaluator: Evaluator | None = None
    ) -> None:
        self._columns = columns
        self._schema = schema
        self._evaluator = evaluator

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        return (project(self._columns, batch, self._schema, self._evaluator),)


class Filtering(RunningOperator):
    def __init__(self, condition: Expression, evaluator: Evaluator | None = None) -> None:
        self._condition = condition
        self._evaluator = evaluator

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        return (filter_batch(self._condition, batch, self._evaluator),)


class Mapping(RunningOperator):
    """Calls the user's function; what it raises names the function, not our insides."""

    def __init__(self, operator: MapInArrow, schema: pa.Schema) -> None:
        self._operator = operator
        self._schema = schema

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        try:
            for made in lazily(self._operator.function(iter((batch,)))):
                yield self._checked(made)
        except (Exception, SystemExit) as error:
            fail(f"function {self._operator.name}", error, *in_batch(batch))

    def _checked(self, made: pa.RecordBatch) -> pa.RecordBatch:
        if made.schema.equals(self._schema):
            return made
        if made.schema.names != self._schema.names:
            raise UserCodeError(
                f"function {self._operator.name} yielded the columns {made.schema.names} but"
                f" declared {self._schema.names}: make the two agree"
            )
        return made.cast(self._schema)


class KeptState(Protocol):
    """Keyed state that can be frozen, and knows whether it has changed."""

    @property
    def version(self) -> int: ...

    def freeze(self) -> FrozenState: ...


class KeyedOperator(StatefulOperator):
    """An operator with keyed state; what has not changed is not written again."""

    STATE: ClassVar[str]

    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        attempt: Attempt,
        state: KeptState,
        store: Store | None,
    ) -> None:
        self._uid = uid
        self._subtask = subtask
        self._state = state
        self._files = StateFiles(uid, subtask, attempt, store)

    def snapshot(self, checkpoint_id: CheckpointId, savepoint: Store | None = None) -> Background:
        of_state = self.STATE, self._state.version, self._state.freeze
        return self._files.write(checkpoint_id, *of_state, savepoint)

    def described(self, checkpoint_id: CheckpointId, written: Any) -> OperatorSnapshot:
        keyed = self._files.written(checkpoint_id, [written])
        return OperatorSnapshot(self._uid, self._subtask, keyed=keyed)

    def completed(self, checkpoint_id: CheckpointId) -> None:
        self._files.completed(checkpoint_id)

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        self._files.aborted(checkpoint_id)


class TimedState(KeptState, Protocol):
    """Keyed state that event time changes."""

    @property
    def reached(self) -> Reached | None:
        """Key groups for which it had come further before a restore."""


class TimedOperator(KeyedOperator):
    """An operator with keyed state that remembers how far event time has come."""

    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        attempt: Attempt,
        state: TimedState,
        store: Store | None,
        watermark_us: int | None = None,
    ) -> None:
        super().__init__(uid, subtask, attempt, state, store)
        self.watermark_us = None if watermark_us == BEGINNING_US else watermark_us
        self._timed = state

    def snapshot(self, checkpoint_id: CheckpointId, savepoint: Store | None = None) -> Background:
        time = SnapshotTime.of(self.watermark_us, self._timed.reached)
        write = super().snapshot(checkpoint_id, savepoint)
        return lambda: (write(), time)

    def described(self, checkpoint_id: CheckpointId, written: Any) -> OperatorSnapshot:
        states, time = written
        noted: SnapshotTime = time
        return noted.noted(super().described(checkpoint_id, states))


@dataclass(frozen=True, slots=True)
class SnapshotTime:
    """How far event time had come when a snapshot was taken."""

    watermark_us: int
    reached: tuple[GroupsReached, ...]

    @classmethod
    def of(cls, watermark_us: int | None, reached: Reached | None) -> SnapshotTime:
        """A subtask that knows nothing yet says so: the others' time must not become its own."""
        spans = () if reached is None else tuple(GroupsReached(*each) for each in reached.spans())
        return cls(BEGINNING_US if watermark_us is None else watermark_us, spans)

    def noted(self, snapshot: OperatorSnapshot) -> OperatorSnapshot:
        return replace(snapshot, watermark_us=self.watermark_us, reached=self.reached)


class Aggregates(Protocol):
    """Running aggregates, wherever they are kept."""

    def update(self, batch: pa.RecordBatch) -> pa.RecordBatch: ...

    def merge(self, partials: pa.RecordBatch) -> pa.RecordBatch: ...


def folded_into(aggregates: Aggregates, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The new values of the keys in the batch, which may have been combined on its way."""
    return aggregates.merge(batch) if is_partial(batch) else aggregates.update(batch)


class Aggregating(KeyedOperator):
    """Running aggregates per key, kept as columns."""

    STATE = "aggregates"

    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        attempt: Attempt,
        table: AggregateTable,
        store: Store | None,
        *,
        emits_all: bool = False,
    ) -> None:
        super().__init__(uid, subtask, attempt, table, store)
        self._table = table
        self._emits_all = emits_all

    def process(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        changed = folded_into(self._table, batch)
        return () if self._emits_all else (changed,)

    def on_barrier(self) -> Iterable[pa.RecordBatch]:
        return (self._table.results(),) if self._emits_all else ()
