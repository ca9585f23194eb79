"""A join of two streams as an operator: the rows of both sides as state, watermarks that end it.

Theory of operation
-------------------
A batch of one side meets the rows of the other that came before it, and then stays with its own
side for those that come after: every pair is made once, whichever of the two came first. How long
a row stays follows from how far apart the event times of a pair may be: once event time is past
the last that could match, the row is forgotten, and if it never was matched and its side is an
outer one, it comes out with nulls. The same happens to all that is left when the records end.

Rules of this file:
- a row whose event time is not after the watermark is late, and dropped before it meets anything,
  as in Spark; so what has been forgotten could not have been matched;
- a row with a null among its keys, or without an event time where times are compared, matches
  nothing: it is not kept, and comes out at once where its side is an outer one;
- behind a join event time is as far as the oldest row that may still come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from stillframe.evaluator.beside import Evaluator
from stillframe.graph.expressions import Expression
from stillframe.graph.logical import Join, JoinSide
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.key_groups import Flags, Words
from stillframe.protocol.event_time import END_OF_TIME_US
from stillframe.protocol.manifests import OperatorSnapshot
from stillframe.protocol.restore import SubtaskState
from stillframe.runtime.connecting import TwoInputOperator
from stillframe.runtime.expressions import evaluate
from stillframe.runtime.operators import Background, SnapshotTime
from stillframe.runtime.state_files import Named, StateFiles
from stillframe.state.joins import (
    JoinRows,
    Moments,
    Pairs,
    SortedRows,
    TimeRange,
    fitted,
    moments_of,
)
from stillframe.state.reached import BEGINNING_US, Reached
from stillframe.storage.store import Store

LEFT, RIGHT = "left", "right"
_Written = tuple[list[Named], SnapshotTime]
"""The files of the sides, and how far event time had come."""


@dataclass(slots=True)
class _Side:
    """One input: its rows, and what is asked of those of the other."""

    name: str
    schema: pa.Schema
    rows: JoinRows
    time: int | None
    within: TimeRange
    """When the rows of the other side are that match one of this, counted from its time."""
    is_outer: bool
    """Whether its rows come out also without a match."""

    @property
    def stays_us(self) -> int | None:
        """How long after its event time a row may still be matched; None: for ever."""
        return self.within.to_us


class Joining(TwoInputOperator):
    """Pairs the rows of two inputs."""

    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        attempt: Attempt,
        operator: Join,
        schemas: tuple[pa.Schema, pa.Schema],
        schema: pa.Schema,
        store: Store | None,
        max_parallelism: int,
        state: SubtaskState | None = None,
        evaluator: Evaluator | None = None,
    ) -> None:
        """`schemas` are those of the two inputs, `schema` is that of what comes out."""
        state = state or SubtaskState()
        self._uid = uid
        self._evaluator = evaluator
        self._subtask = subtask
        self._operator = operator
        self._schema = schema
        self._files = StateFiles(uid, subtask, attempt, store)
        self._max_parallelism = max_parallelism
        self.watermark_us = None if state.watermark_us == BEGINNING_US else state.watermark_us
        self._reached = Reached.beyond(
            state.watermark_us,
            max_parallelism,
            ((each.first, each.stop, each.watermark_us) for each in state.reached),
        )
        self._left = self._side(LEFT, operator.left, schemas[0])
        self._right = self._side(RIGHT, operator.right, schemas[1])
        self._is_semi = operator.how == "semi"

    def _side(self, name: str, side: JoinSide, schema: pa.Schema) -> _Side:
        join = self._operator
        rows = JoinRows(
            schema,
            side.keys,
            side.time,
            self._max_parallelism,
            forgets_matched=name == LEFT and join.how == "semi",
        )
        # The bounds are on right.time - left.time.
        within = (
            TimeRange(join.earliest_us, join.latest_us)
            if name == LEFT
            else TimeRange(_negated(join.latest_us), _negated(join.earliest_us))
        )
        time = None if side.time is None else schema.get_field_index(side.time)
        is_outer = join.how in ("full", name)
        return _Side(name, schema, rows, time, within, is_outer)

    @property
    def state_rows(self) -> int:
        return len(self._left.rows) + len(self._right.rows)

    @property
    def state_bytes(self) -> int:
        return self._left.rows.state_bytes + self._right.rows.state_bytes

    # --- rows

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        return self._processed(self._left, self._right, batch)

    def process_second(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        return self._processed(self._right, self._left, batch)

    def _processed(
        self, mine: _Side, other: _Side, batch: pa.RecordBatch
    ) -> Iterator[pa.RecordBatch]:
        batch = fitted(batch, mine.schema)
        hashes, has_keys, times = mine.rows.keyed(batch)
        may_match = self._may_match(mine, batch, has_keys)
        late = self._is_late(mine, batch, hashes, times)
        if late is not None:
            self.late_rows += int(late.sum())
            may_match = ~late if may_match is None else may_match & ~late
        if may_match is not None:
            if mine.is_outer:
                alone = ~may_match if late is None else ~may_match & ~late
                yield self._with_nulls(mine, batch.filter(pa.array(alone)))
            batch = batch.filter(pa.array(may_match))
            hashes = hashes[may_match]
            times = None if times is None else times[may_match]
        if batch.num_rows:
            yield from self._met(mine, other, SortedRows.of(batch, hashes, times))

    def _may_match(
        self, side: _Side, batch: pa.RecordBatch, has_keys: Flags | None
    ) -> Flags | None:
        """Which rows have all that is compared; None: all of them."""
        if side.time is None or side.within == TimeRange(None, None):
            return has_keys
        has_time = moments_of(batch.column(side.time))[1]
        if has_keys is None or has_time is None:
            return has_time if has_keys is None else has_keys
        return has_keys & has_time

    def _is_late(
        self, side: _Side, batch: pa.RecordBatch, hashes: Words, times: Moments | None
    ) -> Flags | None:
        """Which rows event time has passed already; None: there are none."""
        if side.time is None or times is None or not len(times):
            return None
        late: Flags | None = None
        if self.watermark_us is not None and int(times.min()) <= self.watermark_us:
            late = times <= self.watermark_us
        if self._reached is not None:
            was_late = times <= self._reached.times_of(hashes)
            late = was_late if late is None else late | was_late
        if late is None:
            return None
        has_time = moments_of(batch.column(side.time))[1]
        if has_time is not None:
            late &= has_time
        return late if late.any() else None

    def _met(self, mine: _Side, other: _Side, rows: SortedRows) -> Iterator[pa.RecordBatch]:
        matched: Flags = np.zeros(len(rows), dtype=np.bool_)
        for pairs in other.rows.pairs(rows, mine.rows.key_places, mine.within):
            kept, made = self._kept(mine, rows, pairs)
            if self._is_semi:
                yield from self._semi(mine, rows, pairs, kept, matched)
            else:
                yield made
            matched[pairs.places[kept]] = True
            if other.is_outer:
                pairs.mark(kept)
        if self._is_semi and mine is self._left and matched.any():
            there = np.flatnonzero(~matched)
            rows = rows.at(there)
            matched = matched[there]
        mine.rows.add(rows, matched)

    def _kept(self, mine: _Side, rows: SortedRows, pairs: Pairs) -> tuple[Flags, pa.RecordBatch]:
        """Which pairs meet the condition, and those that do."""
        ours = rows.batch.take(pa.array(pairs.places))
        left, right = (ours, pairs.others) if mine is self._left else (pairs.others, ours)
        whole = pa.RecordBatch.from_arrays(
            [*left.columns, *right.columns], names=[*left.schema.names, *right.schema.names]
        )
        kept = _true(self._operator.condition, whole, self._evaluator)
        if self._is_semi:
            return kept, whole
        if not kept.all():
            whole = whole.filter(pa.array(kept))
        return kept, pa.RecordBatch.from_arrays(whole.columns, schema=self._schema)

    def _semi(
        self, mine: _Side, rows: SortedRows, pairs: Pairs, kept: Flags, matched: Flags
    ) -> Iterator[pa.RecordBatch]:
        """The left rows of these pairs, those that have not come out before."""
        if mine is self._left:
            new = np.unique(pairs.places[kept])
            yield self._shaped(rows.batch.take(pa.array(new[~matched[new]])))
        else:
            first = pairs.first_of_each_other(kept)
            yield self._shaped(pairs.others.filter(pa.array(first)))

    def _shaped(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(batch.columns, schema=self._schema)

    def _with_nulls(self, side: _Side, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of one side without any of the other."""
        other = self._right if side is self._left else self._left
        nulls = [pa.nulls(batch.num_rows, field.type) for field in other.schema]
        ours = batch.columns
        columns = [*ours, *nulls] if side is self._left else [*nulls, *ours]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    # --- time

    def on_watermark(self, time_us: int) -> Iterator[pa.RecordBatch]:
        if self.watermark_us is not None and time_us <= self.watermark_us:
            return
        self.watermark_us = time_us
        if self._reached is not None and self._reached.is_passed_by(time_us):
            self._reached = None
        for side in (self._left, self._right):
            for batch in self._over(side, time_us):
                yield self._with_nulls(side, batch)

    def _over(self, side: _Side, time_us: int) -> Iterable[pa.RecordBatch]:
        """Forget the rows that nothing can match any more; those that nothing ever matched."""
        if time_us == END_OF_TIME_US:
            return side.rows.drain(emits_unmatched=side.is_outer)
        if side.time is None or side.stays_us is None:
            return ()
        last_us = time_us - side.stays_us
        return side.rows.expire(last_us + 1, emits_unmatched=side.is_outer)

    def time_after(self, time_us: int) -> int:
        if time_us == END_OF_TIME_US:
            return time_us
        stays_us = [side.stays_us or 0 for side in (self._left, self._right)]
        return time_us - max(0, *stays_us)

    # --- snapshots

    def snapshot(self, checkpoint_id: CheckpointId, savepoint: Store | None = None) -> Background:
        time = SnapshotTime.of(self.watermark_us, self._reached)
        writes = [
            self._files.write(
                checkpoint_id, side.name, side.rows.version, side.rows.freeze, savepoint
            )
            for side in (self._left, self._right)
        ]
        return lambda: ([write() for write in writes], time)

    def described(self, checkpoint_id: CheckpointId, written: _Written) -> OperatorSnapshot:
        named, time = written
        keyed = self._files.written(checkpoint_id, named)
        return time.noted(OperatorSnapshot(self._uid, self._subtask, keyed=keyed))

    def completed(self, checkpoint_id: CheckpointId) -> None:
        self._files.completed(checkpoint_id)

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        self._files.aborted(checkpoint_id)

    def restore(self, name: str, batches: Iterable[pa.RecordBatch]) -> None:
        """Take the rows of the side of this name back, before any others come."""
        side = self._left if name == LEFT else self._right
        side.rows.restore(batches)


def _true(
    condition: Expression | None, batch: pa.RecordBatch, evaluator: Evaluator | None
) -> Flags:
    if condition is None:
        return np.ones(batch.num_rows, dtype=np.bool_)
    values = evaluate(condition, batch, evaluator)
    kept: Any = (values.fill_null(False) if values.null_count else values).to_numpy(
        zero_copy_only=False
    )
    return kept  # type: ignore[no-any-return]


def _negated(us: int | None) -> int | None:
    return None if us is None else -us
