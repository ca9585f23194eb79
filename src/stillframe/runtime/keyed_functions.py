"""The user's function as an operator: fed batch by batch, its rows and its timers kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from stillframe.api.functions import KeyedFunction, StatefulFunction
from stillframe.api.timers import TimerClock, Timers
from stillframe.clock import Clock
from stillframe.errors import UserCodeError
from stillframe.graph.logical import Connect, Process
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.key_groups import fixed_width_values, hash_columns, key_groups_of
from stillframe.protocol.manifests import OperatorSnapshot
from stillframe.runtime.firing import FiringOperator
from stillframe.runtime.operators import Background
from stillframe.runtime.row_functions import fitted, in_batch
from stillframe.runtime.state_files import StateFiles, Write
from stillframe.state.key_places import keyed_by
from stillframe.state.reached import BEGINNING_US
from stillframe.state.timers import CLOCKS, TIME, TimerTable
from stillframe.storage.store import Store
from stillframe.user_code import calling, fail, lazily

FIRED_ROWS_MAX = 1024
"""How many timers fire in one call of the user's function: a barrier waits for no more."""

Function = TypeVar("Function", bound=StatefulFunction)


class FunctionOperator(FiringOperator, Generic[Function]):
    """Calls the user's function; what it raises names the function, not our insides."""

    STATE = "function"
    TIMERS = "timers"
    KIND: ClassVar[type[StatefulFunction]]
    METHOD: ClassVar[str]
    """What it is called by in the user's program."""

    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        attempt: Attempt,
        operator: Connect | Process,
        input_schema: pa.Schema,
        schema: pa.Schema,
        store: Store | None,
        max_parallelism: int,
        clock: Clock,
        watermark_us: int | None = None,
    ) -> None:
        self.watermark_us = None if watermark_us == BEGINNING_US else watermark_us
        self._uid = uid
        self._subtask = subtask
        self._operator = operator
        self._name = f"function {operator.name}"
        keys = operator.keys
        self._key_schema = None if keys is None else pa.schema(map(input_schema.field, keys))
        self._schema = schema
        self._max_parallelism = max_parallelism
        self._clock = clock
        self._has_finished = False
        self._timers: TimerTable | None = None
        """None: there are no keys to have any."""
        if self._key_schema is not None:
            self._timers = TimerTable(self._key_schema, max_parallelism)
        self._files = StateFiles(uid, subtask, attempt, store)
        self._function = self._made()
        self._answer_of(lambda: self._function.open(_FunctionTimers(self)))

    # --- what comes ---

    def on_watermark(self, time_us: int) -> Iterable[pa.RecordBatch]:
        if self.watermark_us is None or time_us > self.watermark_us:
            self.watermark_us = time_us
        return ()

    def finish(self) -> Iterator[pa.RecordBatch]:
        if self._timers is not None and not self._has_finished:
            with calling(self._name, "the end of all records"):
                yield from self._made_of(self._function.finish())
            self._timers.clear()
        self._has_finished = True

    # --- timers ---

    @property
    def now_us(self) -> int:
        return self._clock.wall_ms() * 1000

    def is_due(self) -> bool:
        if self._timers is None or self.watermark_us is None:
            return False
        next_us = self._timers.next_us("event")
        return next_us is not None and next_us <= self.watermark_us

    def fire(self) -> Iterator[pa.RecordBatch]:
        assert self.watermark_us is not None
        return self._fire("event", self.watermark_us, self._function.on_event_timers)

    def due_in_seconds(self) -> float | None:
        next_us = self._timers.next_us("processing") if self._timers is not None else None
        return None if next_us is None else max(0, next_us - self.now_us) / 1e6

    def fire_by_clock(self) -> Iterator[pa.RecordBatch]:
        return self._fire("processing", self.now_us, self._function.on_processing_timers)

    def _fire(
        self,
        clock: TimerClock,
        until_us: int,
        call: Callable[[pa.RecordBatch], Iterable[pa.RecordBatch]],
    ) -> Iterator[pa.RecordBatch]:
        assert self._timers is not None
        fired = self._timers.take(clock, until_us, FIRED_ROWS_MAX)
        if not fired.num_rows:
            return iter(())
        self.timers_fired += fired.num_rows
        return self._called_with(call, fired, are_timers=True)

    def timers_of_keys(self, what: str) -> TimerTable:
        """Those of this operator, for the user's function, which wants to do this with them."""
        if self._timers is None:
            raise UserCodeError(
                f"function {self._operator.name} calls {what}, but it is connected to a broadcast"
                " stream, where nobody owns a key: connect by key to have timers"
            )
        if TIME in (self._operator.keys or ()):
            raise UserCodeError(
                f"function {self._operator.name} calls {what}, but one of its keys is named {TIME},"
                " as the times of timers are: rename the key with withColumnRenamed"
            )
        return self._timers

    def keys_of_timers(self, keys: Any, what: str) -> list[pa.Array]:
        """The key columns of a batch from the user's function, with the types of the stream."""
        assert self._key_schema is not None
        name = self._operator.name
        if not isinstance(keys, pa.RecordBatch | pa.Table):
            raise UserCodeError(
                f"function {name} calls {what} with a {type(keys).__name__}: give the keys as a"
                f" pyarrow RecordBatch with {', '.join(self._key_schema.names)}"
            )
        missing = [key for key in self._key_schema.names if keys.schema.names.count(key) != 1]
        if missing:
            raise UserCodeError(
                f"function {name} calls {what} with a batch of {', '.join(keys.schema.names)},"
                f" which has not the one column {missing[0]!r}: give it the key columns"
            )
        table = pa.Table.from_batches([keys]) if isinstance(keys, pa.RecordBatch) else keys
        return list(_one_batch(self._with_key_types(table, f"the keys given to {what}")).columns)

    # --- snapshots ---

    def restore(self, batch: pa.RecordBatch) -> None:
        self._answer_of(lambda: self._function.restore(batch))

    def restore_timers(self, batch: pa.RecordBatch) -> None:
        assert self._timers is not None, "timers of a function without keys"
        self._timers.restore(batch)

    def snapshot(self, checkpoint_id: CheckpointId, savepoint: Store | None = None) -> Background:
        self._answer_of(lambda: self._function.on_snapshot(checkpoint_id))
        rows = self._rows()
        writes = []
        if self._timers is not None:
            timers = self.TIMERS, self._timers.version, self._timers.freeze
            writes.append(self._files.write(checkpoint_id, *timers, savepoint))
        if rows is not None and rows.num_rows:
            writes.append(self._rows_write(checkpoint_id, rows, savepoint))
        # A subtask that knows nothing yet says so: the others' time must not become its own.
        watermark_us = BEGINNING_US if self.watermark_us is None else self.watermark_us
        return lambda: ([write() for write in writes], watermark_us)

    def described(self, checkpoint_id: CheckpointId, written: Any) -> OperatorSnapshot:
        named, watermark_us = written
        states = self._files.written(checkpoint_id, named)
        if self._key_schema is None:
            return OperatorSnapshot(self._uid, self._subtask, broadcast=states)
        snapshot = OperatorSnapshot(self._uid, self._subtask, keyed=states)
        return replace(snapshot, watermark_us=watermark_us)

    def completed(self, checkpoint_id: CheckpointId) -> None:
        self._files.completed(checkpoint_id)
        self._answer_of(lambda: self._function.on_checkpoint_complete(checkpoint_id))

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        self._files.aborted(checkpoint_id)

    def _rows_write(
        self, checkpoint_id: CheckpointId, rows: pa.Table, savepoint: Store | None
    ) -> Write:
        keys = None
        if self._key_schema is not None:
            keys = self._with_key_types(
                rows.select(self._key_schema.names),
                f"the snapshot of function {self._operator.name}",
            )
        frozen = RowsAtRest(rows, keys, self._max_parallelism)
        return self._files.write_anew(checkpoint_id, self.STATE, frozen, savepoint)

    def _rows(self) -> pa.Table | None:
        """Nothing once it has finished by key: a restored job must not finish those keys again."""
        if self._has_finished and self._key_schema is not None:
            return None
        rows = self._answer_of(self._function.snapshot)
        if rows is None:
            return None
        if not isinstance(rows, pa.RecordBatch | pa.Table):
            raise UserCodeError(
                f"the snapshot of function {self._operator.name} is a {type(rows).__name__}: answer"
                " a pyarrow RecordBatch or Table, or None"
            )
        self._refuse_repeated(rows.schema.names)
        missing = set(self._operator.keys or ()) - set(rows.schema.names)
        if missing:
            raise UserCodeError(
                f"the snapshot of function {self._operator.name} has no column"
                f" {sorted(missing)[0]!r}: its rows must have the keys they are found by"
            )
        return pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows

    def _refuse_repeated(self, names: list[str]) -> None:
        if len(set(names)) < len(names):
            raise UserCodeError(
                f"the snapshot of function {self._operator.name} has two columns of one name"
                f" ({', '.join(names)}): give each its own"
            )

    def _with_key_types(self, rows: pa.Table, what: str) -> pa.Table:
        """The keys with the types they have in the streams: by others they would not be found.

        Whoever goes by way of pandas gets times in other units, and numbers as floats.
        """
        assert self._key_schema is not None
        keys = rows.select(self._key_schema.names)
        if keys.schema.types == self._key_schema.types:
            return keys
        nullable = pa.schema([field.with_nullable(True) for field in self._key_schema])
        try:
            return keys.cast(nullable)
        except pa.ArrowException as error:
            raise UserCodeError(
                f"{what} has keys of other types than the"
                f" streams ({_in_words(keys.schema)}, not {_in_words(nullable)}), and they cannot"
                f" be cast ({error}): answer keys as they came"
            ) from error

    # --- calls ---

    def _called_with(
        self,
        call: Callable[[pa.RecordBatch], Iterable[pa.RecordBatch]],
        batch: pa.RecordBatch,
        *,
        are_timers: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._made_of(call(batch))
        except (Exception, SystemExit) as error:
            words, rows, row = in_batch(batch)
            if are_timers:
                fail(self._name, error, f"timers, {words}", row=row)
            fail(self._name, error, words, rows, row)

    def _made_of(self, answer: Any) -> Iterator[pa.RecordBatch]:
        return map(self._checked, lazily(self._iterable(answer)))

    def _answer_of(self, call: Callable[[], Any]) -> Any:
        with calling(self._name):
            return call()

    def _made(self) -> Function:
        function = self._answer_of(self._operator.make)
        if not isinstance(function, self.KIND):
            raise UserCodeError(
                f"{self._operator.name} made a {type(function).__name__}: {self.METHOD} wants what"
                f" makes a {self.KIND.__name__}"
            )
        return cast(Function, function)

    def _iterable(self, answer: Any) -> Iterable[Any]:
        if answer is None or isinstance(answer, pa.RecordBatch | pa.Table):
            raise UserCodeError(
                f"function {self._operator.name} answered"
                f" {'None' if answer is None else 'a ' + type(answer).__name__}: yield record"
                " batches, or answer a list of them, which may be empty"
            )
        return cast(Iterable[Any], answer)

    def _checked(self, made: Any) -> pa.RecordBatch:
        if not isinstance(made, pa.RecordBatch):
            raise UserCodeError(
                f"function {self._operator.name} yielded a {type(made).__name__}: {self.METHOD}"
                " wants pyarrow.RecordBatch objects"
            )
        return fitted(made, self._schema, self._operator.name)


class Processing(FunctionOperator[KeyedFunction]):
    """The user's function over one stream."""

    KIND = KeyedFunction
    METHOD = "process"

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        return self._called_with(self._function.process, batch)


class _FunctionTimers(Timers):
    """The timers as the user's function sees them; what it gives is checked here."""

    def __init__(self, operator: FunctionOperator[Any]) -> None:
        self._operator = operator

    @property
    def watermark_us(self) -> int | None:
        return self._operator.watermark_us

    @property
    def now_us(self) -> int:
        return self._operator.now_us

    def register(self, keys: pa.RecordBatch, times: pa.Array, clock: TimerClock = "event") -> None:
        what = "timers.register"
        self._table(what, clock).register(*self._given(keys, times, what), clock)

    def delete(self, keys: pa.RecordBatch, times: pa.Array, clock: TimerClock = "event") -> None:
        what = "timers.delete"
        self._table(what, clock).delete(*self._given(keys, times, what), clock)

    def registered(
        self, keys: pa.RecordBatch | None = None, clock: TimerClock = "event"
    ) -> pa.RecordBatch:
        what = "timers.registered"
        table = self._table(what, clock)
        wanted = None if keys is None else self._operator.keys_of_timers(keys, what)
        return table.registered(wanted, clock)

    def _table(self, what: str, clock: TimerClock) -> TimerTable:
        table = self._operator.timers_of_keys(what)
        if clock not in CLOCKS:
            raise UserCodeError(
                f"{what} takes the clock {' or '.join(map(repr, CLOCKS))}, not {clock!r}"
            )
        return table

    def _given(
        self, keys: Any, times: Any, what: str
    ) -> tuple[list[pa.Array], npt.NDArray[np.int64]]:
        columns = self._operator.keys_of_timers(keys, what)
        if isinstance(times, pa.ChunkedArray):
            times = times.combine_chunks()
        if not isinstance(times, pa.Array) or not pt.is_timestamp(times.type):
            seen = times.type if isinstance(times, pa.Array) else type(times).__name__
            raise UserCodeError(
                f"{what} takes the times as a pyarrow Array of timestamps, not of {seen}: cast"
                " them, such as pa.array(microseconds).cast(pa.timestamp('us', 'UTC'))"
            )
        if len(times) != len(columns[0]):
            raise UserCodeError(
                f"{what} is given {len(columns[0])} keys and {len(times)} times: give one time for"
                " each key"
            )
        if times.null_count:
            valid = times.is_valid()
            columns, times = [column.filter(valid) for column in columns], times.drop_null()
        return columns, _microseconds(times)


def _microseconds(times: pa.Array) -> npt.NDArray[np.int64]:
    if times.type.unit == "ns":  # up, so that it is never early
        nanoseconds: npt.NDArray[np.int64] = fixed_width_values(times)
        return -(-nanoseconds // 1_000)
    values: npt.NDArray[np.int64] = fixed_width_values(
        times.cast(pa.timestamp("us", times.type.tz))
    )
    return values


class RowsAtRest:
    """Rows at rest, to be written by key group; all in one where there are no keys."""

    def __init__(self, rows: pa.Table, keys: pa.Table | None, max_parallelism: int) -> None:
        self._rows = rows.combine_chunks()
        self._keys = keys
        self._max_parallelism = max_parallelism

    def __len__(self) -> int:
        return len(self._rows)

    def release(self) -> None:
        """They are nobody else's."""

    @property
    def snapshot_schema(self) -> pa.Schema:
        schema = self._rows.schema
        if self._keys is None:
            return schema
        return keyed_by(schema, [schema.get_field_index(key) for key in self._keys.column_names])

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        if self._keys is None:
            yield 0, _one_batch(self._rows)
            return
        columns = _one_batch(self._keys).columns
        groups = key_groups_of(hash_columns(columns), self._max_parallelism)
        order = np.argsort(groups, kind="stable")
        bounds = np.searchsorted(groups.take(order), np.arange(self._max_parallelism + 1))
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            rows = order[bounds[group] : bounds[group + 1]]
            yield group, _one_batch(self._rows.take(pa.array(rows)))


def _one_batch(rows: pa.Table) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [column.combine_chunks() for column in rows.columns], schema=rows.schema
    )


def _in_words(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
