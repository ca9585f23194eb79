"""The user's program as an operator: called key by key, its states and timers kept.

Theory of operation
-------------------
A batch is grouped once, as a whole: every row gets its key's number, and the rows are put in the
order of these numbers, so that a key's rows are a slice. The program then goes from key to key, and
whatever it does with its states or timers is about the key that it has come to.

Where states are kept, and how they are snapshotted, is said in `kept_states`. Those of a checkpoint
that the program does not declare any more are carried along, as they were, until it deletes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from stillframe.api.programs import Fired, Groups, KeyedProgram
from stillframe.api.timers import TimerClock
from stillframe.clock import Clock
from stillframe.errors import UserCodeError
from stillframe.graph.logical import TimeMode, Transform
from stillframe.ids import CheckpointId
from stillframe.key_groups import Positions, fixed_width_values, hash_columns, key_groups_of
from stillframe.protocol.manifests import OperatorSnapshot
from stillframe.runtime.firing import FiringOperator
from stillframe.runtime.kept_states import KeptStates
from stillframe.runtime.keyed_functions import FIRED_ROWS_MAX, RowsAtRest
from stillframe.runtime.operators import Background
from stillframe.runtime.outputs import key_columns
from stillframe.runtime.row_functions import fitted
from stillframe.runtime.state_files import Freeze
from stillframe.state.aggregates import canonical
from stillframe.state.backends import Backend, Declared, Kind
from stillframe.state.handles import (
    ListHandle,
    MapHandle,
    NamedReducingHandle,
    Scene,
    ValueHandle,
)
from stillframe.state.key_timers import KeyTimers
from stillframe.state.reached import BEGINNING_US
from stillframe.state.reductions import reductions_of
from stillframe.state.rows import RecordMaker, RowType, plain_tuples
from stillframe.storage.paths import quoted_name
from stillframe.storage.store import Store
from stillframe.user_code import calling

_SHORT_NUMBERS = 1 << 16
"""Numbers below this are sorted as 16-bit ones, which numpy does ten times as fast."""
_CLOCKS: dict[TimeMode, tuple[TimerClock, ...]] = {
    "none": (),
    "processingTime": ("processing",),
    "eventTime": ("event",),
    "both": ("event", "processing"),
}


class KeyedStates:
    """The states and timers of one program in one subtask."""

    def __init__(self, operator: Transform, backend: Backend[Any], clock: Clock) -> None:
        self.backend = backend
        self.scene: Scene[Any] = Scene()
        self.watermark_us: int | None = None
        self.carried: dict[str, list[pa.RecordBatch]] = {}
        """Rows of states that are in the checkpoint and not in the program."""
        self.is_open = True
        """Whether states may still be declared."""
        self._operator = operator
        self._clock = clock
        self._deleted: set[str] = set()
        self.key_timers: dict[TimerClock, KeyTimers[Any]] = {
            clock: KeyTimers(backend, f"${clock}_timers") for clock in _CLOCKS[operator.time_mode]
        }
        for timers in self.key_timers.values():
            timers.rebuild()  # a database comes with what it held

    # --- time

    @property
    def now_ms(self) -> int:
        return self.scene.now_ms

    @property
    def watermark_ms(self) -> int:
        return 0 if self.watermark_us is None else max(0, self.watermark_us // 1000)

    def look_at_clock(self) -> int:
        self.scene.now_ms = self._clock.wall_ms()
        return self.scene.now_ms

    # --- states

    def value(
        self,
        name: str,
        schema: pa.Schema,
        ttl_ms: int | None,
        records: RecordMaker = plain_tuples,
        *,
        named: bool = False,
        refreshes: bool = False,
    ) -> ValueHandle[Any]:
        row = RowType(schema, records, named=named)
        declared = Declared(name, Kind.VALUE, row, None, ttl_ms is not None)
        self._refuse(name, ttl_ms)
        table = self.backend.values(declared)
        return ValueHandle(self.scene, table, ttl_ms, refreshes=refreshes)

    def list(
        self,
        name: str,
        schema: pa.Schema,
        ttl_ms: int | None,
        records: RecordMaker = plain_tuples,
        *,
        named: bool = False,
        refreshes: bool = False,
    ) -> ListHandle[Any]:
        row = RowType(schema, records, named=named)
        declared = Declared(name, Kind.LIST, row, None, ttl_ms is not None)
        self._refuse(name, ttl_ms)
        table = self.backend.lists(declared)
        return ListHandle(self.scene, table, ttl_ms, refreshes=refreshes)

    def map(
        self,
        name: str,
        user_key: pa.Schema,
        schema: pa.Schema,
        ttl_ms: int | None,
        records: RecordMaker = plain_tuples,
        *,
        named: bool = False,
        refreshes: bool = False,
    ) -> MapHandle[Any]:
        row = RowType(schema, records, named=named)
        found_by = RowType(user_key, records, named=named)
        declared = Declared(name, Kind.MAP, row, found_by, ttl_ms is not None)
        self._refuse(name, ttl_ms)
        table = self.backend.maps(declared)
        return MapHandle(self.scene, table, ttl_ms, refreshes=refreshes)

    def reducing(
        self,
        name: str,
        schema: pa.Schema,
        reduce: str | Mapping[str, str],
        records: RecordMaker = plain_tuples,
        *,
        named: bool = False,
    ) -> NamedReducingHandle[Any]:
        self._refuse(name, None)
        functions = reductions_of(name, schema, reduce)
        declared = Declared(name, Kind.VALUE, RowType(schema, records, named=named))
        return NamedReducingHandle(self.scene, self.backend.reduced(declared, functions))

    def delete(self, name: str) -> None:
        self.backend.drop(name)
        self.carried.pop(name, None)
        self._deleted.add(name)

    def restore(self, name: str, batch: pa.RecordBatch) -> None:
        for timers in self.key_timers.values():
            if name == timers.table.declared.name:
                timers.restore(batch)
                return
        for table in self.backend.tables:
            if table.declared.name == name:
                table.restore(batch)
                return
        if name not in self._deleted:
            self.carried.setdefault(name, []).append(batch)

    def tidy(self) -> None:
        renamed = self.backend.tidy(self.now_ms)
        if renamed is not None:
            for timers in self.key_timers.values():
                timers.rename(renamed)

    def _refuse(self, name: str, ttl_ms: int | None) -> None:
        if not self.is_open:
            raise UserCodeError(
                f"Cannot create state variable with name={name} after initialization is complete:"
                " declare all states in init"
            )
        if not isinstance(name, str) or name.startswith("$"):
            raise UserCodeError(f"a state cannot be named {name!r}: choose a name without $")
        quoted_name(name, "state name", kept="_.")
        if ttl_ms is None:
            return
        if "processing" not in self.key_timers:
            raise UserCodeError(
                f"Cannot use TTL for state={name} in timeMode={self._operator.time_mode}, use"
                " timeMode 'processingTime' instead"
            )
        if isinstance(ttl_ms, bool) or not isinstance(ttl_ms, int) or ttl_ms <= 0:
            raise UserCodeError(
                f"TTL duration must be greater than zero for State store operation on state={name},"
                f" not {ttl_ms!r}"
            )

    # --- timers

    def register_timer(self, time_ms: int, clock: TimerClock | None = None) -> None:
        self._timers("register", clock).register(self.scene.key, int(time_ms))

    def delete_timer(self, time_ms: int, clock: TimerClock | None = None) -> None:
        self._timers("delete", clock).delete(self.scene.key, int(time_ms))

    def timers(self, clock: TimerClock | None = None) -> Iterator[int]:
        return iter(self._timers("list", clock).of(self.scene.key))

    def _timers(self, what: str, clock: TimerClock | None) -> KeyTimers[Any]:
        if not self.key_timers:
            raise UserCodeError(
                f"Cannot perform stateful processor operation={what}_timer with timeMode=none: use"
                " timeMode 'processingTime' or 'eventTime' to have timers"
            )
        if clock is None:
            (only,) = self.key_timers.values()
            return only
        return self.key_timers[clock]


class Transforming(FiringOperator):
    """Calls the user's program; what it raises names the program, not our insides."""

    def __init__(
        self,
        operator: Transform,
        input_schema: pa.Schema,
        schema: pa.Schema,
        kept: KeptStates,
        max_parallelism: int,
        clock: Clock,
        watermark_us: int | None = None,
    ) -> None:
        self._operator = operator
        self._schema = schema
        self._kept = kept
        self._max_parallelism = max_parallelism
        self._key_schema = pa.schema([input_schema.field(key) for key in operator.keys])
        self._late: list[pa.RecordBatch] = []
        self._states = KeyedStates(operator, kept.backend, clock)
        self.watermark_us = self._states.watermark_us = (
            None if watermark_us == BEGINNING_US else watermark_us
        )
        self._program: KeyedProgram = self._answer_of(operator.make)
        self.sees_batches = self._program.sees_batches
        self._states.look_at_clock()
        self._answer_of(lambda: self._program.open(self._states))
        self._states.is_open = False

    def start(self, owned: range) -> None:
        """Begin with what is known before the first rows, of the keys that are here.

        Called instead of `restore`, where no checkpoint knows of this operator.
        """
        table = self._operator.initial
        if not isinstance(table, pa.Table) or not table.num_rows:
            return
        batch = table.combine_chunks().to_batches()[0]
        columns = self._initial_keys(batch)
        groups = key_groups_of(hash_columns(columns), self._max_parallelism)
        mine = np.flatnonzero((groups >= owned.start) & (groups < owned.stop))
        columns = [column.take(pa.array(mine)) for column in columns]
        grouped = self._grouped(batch.take(pa.array(mine)), columns)
        self._answer_of(lambda: self._program.handle_initial(grouped))
        self._states.scene.leave()

    def _initial_keys(self, batch: pa.RecordBatch) -> list[pa.Array]:
        named = zip(self._operator.initial_keys, self._key_schema, strict=True)
        return [batch.column(name).cast(field.type) for name, field in named]

    # --- what comes

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        batch = self._in_time(batch)
        if not batch.num_rows:
            return iter(())
        self._states.look_at_clock()
        self._states.tidy()
        grouped = self._grouped(batch, key_columns(batch, self._operator.keys))
        return self._called(lambda: self._program.handle(grouped))

    def on_watermark(self, time_us: int) -> Iterable[pa.RecordBatch]:
        if self.watermark_us is None or time_us > self.watermark_us:
            self.watermark_us = self._states.watermark_us = time_us
        return ()

    def finish(self) -> Iterable[pa.RecordBatch]:
        for timers in self._states.key_timers.values():
            timers.clear()
        return ()

    def close(self) -> None:
        self._states.backend.close()
        self._answer_of(self._program.close)

    def _in_time(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Without what comes too late; a record without a time is never late."""
        if self._operator.time is None or self.watermark_us is None:
            return batch
        times = batch.column(self._operator.time)
        late = (fixed_width_values(times) <= self.watermark_us) & np.asarray(times.is_valid())
        if not late.any():
            return batch
        if self.keeps_late:
            self._late.append(batch.filter(pa.array(late)))
        else:
            self.late_rows += int(late.sum())
        return batch.filter(pa.array(~late))

    def take_late(self) -> Iterable[pa.RecordBatch]:
        late, self._late = self._late, []
        return late

    def _grouped(self, batch: pa.RecordBatch, columns: list[pa.Array]) -> Groups:
        numbers, names = self._states.backend.keys_of(columns)
        order = _stable_order(numbers)
        by_key = numbers[order]
        is_first = np.ones(len(by_key), dtype=np.bool_)
        is_first[1:] = by_key[1:] != by_key[:-1]
        starts = np.flatnonzero(is_first)
        firsts = pa.array(order[starts])
        keys = pa.RecordBatch.from_arrays(
            [canonical(column.take(firsts)) for column in columns], names=self._key_schema.names
        )
        here = [names[number] for number in by_key[starts].tolist()]
        enter = self._states.scene.enter
        return Groups(
            batch,
            pa.array(order),
            keys,
            [*starts.tolist(), len(by_key)],
            lambda place: enter(here[place]),
        )

    # --- timers

    def is_due(self) -> bool:
        if self.watermark_us is None:
            return False
        next_ms = self._next_ms("event")
        return next_ms is not None and next_ms * 1000 <= self.watermark_us

    def fire(self) -> Iterator[pa.RecordBatch]:
        assert self.watermark_us is not None
        return self._fire("event", self.watermark_us // 1000)

    def due_in_seconds(self) -> float | None:
        next_ms = self._next_ms("processing")
        return None if next_ms is None else max(0, next_ms - self._states.look_at_clock()) / 1e3

    def fire_by_clock(self) -> Iterator[pa.RecordBatch]:
        return self._fire("processing", self._states.look_at_clock())

    def _next_ms(self, clock: TimerClock) -> int | None:
        timers = self._states.key_timers.get(clock)
        return None if timers is None else timers.next_ms()

    def _fire(self, clock: TimerClock, until_ms: int) -> Iterator[pa.RecordBatch]:
        self._states.look_at_clock()
        self._states.tidy()
        fired = self._due(clock, until_ms)
        return self._called(lambda: self._program.fire(fired))

    def _due(self, clock: TimerClock, until_ms: int) -> Fired:
        timers, scene = self._states.key_timers[clock], self._states.scene
        due = timers.due(until_ms, FIRED_ROWS_MAX)
        columns = self._states.backend.columns_of([key for key, _ in due])

        def enter(place: int) -> bool:
            scene.enter(due[place][0])
            fires = timers.is_registered(*due[place])
            self.timers_fired += fires
            return fires

        return Fired(
            pa.RecordBatch.from_arrays(columns, names=self._key_schema.names),
            [time_ms for _, time_ms in due],
            enter,
            lambda place: timers.delete(*due[place]),
            clock,
        )

    # --- snapshots

    def restore(self, name: str, batch: pa.RecordBatch) -> None:
        self._states.restore(name, batch)

    def snapshot(self, checkpoint_id: CheckpointId, savepoint: Store | None = None) -> Background:
        now_ms = self._states.look_at_clock()
        self._answer_of(lambda: self._program.on_snapshot(checkpoint_id))
        carried: dict[str, Freeze] = {
            name: partial(_Carried, batches, self) for name, batches in self._states.carried.items()
        }
        write = self._kept.snapshot(checkpoint_id, carried, now_ms, savepoint)
        # A subtask that knows nothing yet says so: the others' time must not become its own.
        watermark_us = BEGINNING_US if self.watermark_us is None else self.watermark_us
        return lambda: (write(), watermark_us)

    def described(self, checkpoint_id: CheckpointId, written: Any) -> OperatorSnapshot:
        states, watermark_us = written
        snapshot = self._kept.described(checkpoint_id, states)
        return replace(snapshot, watermark_us=watermark_us)

    def completed(self, checkpoint_id: CheckpointId) -> None:
        self._kept.completed(checkpoint_id)
        self._answer_of(lambda: self._program.on_checkpoint_complete(checkpoint_id))

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        self._kept.aborted(checkpoint_id)

    def at_rest(self, batches: list[pa.RecordBatch]) -> RowsAtRest:
        rows = pa.Table.from_batches(batches)
        return RowsAtRest(rows, rows.select(self._key_schema.names), self._max_parallelism)

    # --- calls

    def _called(self, call: Callable[[], Iterable[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        try:
            with calling(self._operator.name):
                for made in call():
                    yield fitted(made, self._schema, self._operator.name)
        finally:
            self._states.scene.leave()

    def _answer_of(self, call: Callable[[], Any]) -> Any:
        with calling(self._operator.name):
            return call()


class _Carried:
    """The rows of a state that the program does not declare, to be written as they were."""

    def __init__(self, batches: list[pa.RecordBatch], operator: Transforming) -> None:
        self._batches = batches
        self._operator = operator
        self.snapshot_schema = batches[0].schema

    def __len__(self) -> int:
        return sum(batch.num_rows for batch in self._batches)

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        return self._operator.at_rest(self._batches).batches_by_key_group()

    def release(self) -> None:
        """Nothing was taken."""


def _stable_order(numbers: Positions) -> Positions:
    if len(numbers) and numbers.max() < _SHORT_NUMBERS:
        numbers = numbers.astype(np.uint16)
    return np.argsort(numbers, kind="stable")
