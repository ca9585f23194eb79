"""A `KeyProcessor` as the program that a `Transform` calls.

Theory of operation: rows are made of whole columns, for all keys of a batch at once; a key's rows
are then a slice of each list. The values of the key itself are made once for each key and not for
each row. What the processor answers is gathered over many keys before it becomes a batch. States
and timers are those of `runtime/transforming`, with both clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, islice, repeat
from operator import sub
from typing import Any, NamedTuple, cast, get_args

import pyarrow as pa
import pyarrow.types as pt

from stillframe.api.ddl import schema_of_ddl
from stillframe.api.processors import KeyProcessor, KeyStates, Reduction, TtlRefresh
from stillframe.api.programs import Fired, Groups, KeyedProgram, States
from stillframe.api.timers import TimerClock
from stillframe.config import parse_duration_seconds
from stillframe.errors import BuildError, UserCodeError
from stillframe.runtime.row_functions import (
    at_row,
    batch_of,
    joined,
    python_values,
    record_maker,
)
from stillframe.state.handles import (
    OPAQUE_SCHEMA,
    PICKLED,
    AggregatingHandle,
    ListHandle,
    MapHandle,
    NamedReducingHandle,
    OpaqueHandle,
    ReducingHandle,
    ValueHandle,
)
from stillframe.user_code import LAZY, fail, lazily, shown

_OUTPUT_ROWS = 16_384
"""So many rows are gathered before they become columns. With a quarter of that, an eighth of the
time of a processor that answers every row was spent on starting over."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST = datetime.max.replace(tzinfo=UTC)

OtherSchema = Callable[[Any], pa.Schema]
"""The Arrow schema of what is neither DDL nor one already: a `StructType`."""


def schema_given(what: str, schema: Any, other: OtherSchema | None) -> pa.Schema:
    """A schema as a user writes it."""
    if isinstance(schema, str):
        found = schema_of_ddl(schema)
    elif isinstance(schema, pa.Schema):
        found = schema
    elif other is not None and hasattr(schema, "fields"):
        found = other(schema)
    else:
        raise UserCodeError(
            f"the schema of {what} is a StructType or a DDL string, not {schema!r}: write for"
            ' example "count long"'
        )
    if PICKLED in found.names:
        raise UserCodeError(
            f"the schema of {what} has a field named {PICKLED}, which only opaque states have:"
            " rename it"
        )
    return found


@dataclass(frozen=True)
class KeyProgram:
    """Makes a program of a processor; travels in the plan."""

    make: Callable[[], KeyProcessor]
    name: str
    schema: pa.Schema
    other_schema: OtherSchema | None = None

    def __call__(self) -> KeyedProgram:
        processor = self.make()
        if not isinstance(processor, KeyProcessor):
            raise UserCodeError(
                f"{self.name} made a {type(processor).__name__}: process wants what makes a"
                " KeyProcessor each time"
            )
        return _Program(processor, self)


class _Program(KeyedProgram):
    def __init__(self, processor: KeyProcessor, about: KeyProgram) -> None:
        self._processor = processor
        self._about = about
        self._states: _KeyStates | None = None

    def open(self, states: States) -> None:
        self._states = _KeyStates(states, self._about.other_schema)
        self._processor.open(self._states)
        self._states.is_open = False

    def handle(self, groups: Groups) -> Iterator[pa.RecordBatch]:
        return joined(self._handled(groups))

    def _handled(self, groups: Groups) -> Iterator[pa.RecordBatch]:
        process, output = self._processor.process, _Output(self._about)
        keys, place, rows = _records(groups.keys), 0, iter(())
        try:
            for place, rows in rows_by_key(groups, record_maker(groups.names), python_values):
                if output.is_full_with(process(keys[place], rows)):
                    yield from output.rest_of_it()
        except (Exception, SystemExit) as error:
            fail(self._about.name, error, *at_row_of_key(groups, place, rows))
        yield from output.rest()

    def handle_initial(self, groups: Groups) -> None:
        raise AssertionError("a KeyProcessor is told nothing before the first rows")

    def fire(self, fired: Fired) -> Iterator[pa.RecordBatch]:
        return joined(self._fired(fired))

    def _fired(self, fired: Fired) -> Iterator[pa.RecordBatch]:
        on_timer, output = self._processor.on_timer, _Output(self._about)
        keys, place = _records(fired.keys), 0
        try:
            for place in fired:
                time = _time_of(fired.times_ms[place])
                if output.is_full_with(on_timer(keys[place], time, fired.clock)):
                    yield from output.rest_of_it()
        except (Exception, SystemExit) as error:
            fail(self._about.name, error, at_timer(fired, place))
        yield from output.rest()

    def on_snapshot(self, checkpoint_id: int) -> None:
        self._processor.on_snapshot(checkpoint_id)

    def on_checkpoint_complete(self, checkpoint_id: int) -> None:
        self._processor.on_checkpoint_complete(checkpoint_id)

    def close(self) -> None:
        self._processor.close()


def _records(batch: pa.RecordBatch) -> list[Any]:
    make = record_maker(tuple(batch.schema.names))
    return list(map(make, zip(*map(python_values, batch.columns), strict=True)))


def rows_by_key(
    groups: Groups,
    make: Callable[[Iterable[Any]], Any],
    values: Callable[[pa.Array], Sequence[Any]],
) -> Iterator[tuple[int, Iterator[Any]]]:
    """Each key in turn, by its place, and its rows.

    `make` makes a row of its values, `values` Python objects of a column.
    """
    repeated = {
        # Of floats, 0.0 and -0.0 are one key and look different.
        field.name: values(column)
        for field, column in zip(groups.keys.schema, groups.keys.columns, strict=True)
        if not pt.is_floating(field.type)
    }
    if repeated.keys() >= set(groups.names):
        # The rows of a key are all the same: one is made of them, and handed out again and again.
        made = map(make, zip(*map(repeated.__getitem__, groups.names), strict=True))
        for (place, start, stop), row in zip(groups, made, strict=True):
            yield place, repeat(row, stop - start)
        return
    columns = [
        _spread(repeated[name], groups.bounds) if name in repeated else values(groups.column(name))
        for name in groups.names
    ]
    for place, start, stop in groups:
        yield place, map(make, zip(*[column[start:stop] for column in columns], strict=True))


def at_row_of_key(groups: Groups, place: int, rows: Iterator[Any]) -> tuple[str, range, str]:
    """Which of its key's rows a program had taken last, for those who are told of an error."""
    begin, end = groups.bounds[place], groups.bounds[place + 1]
    taken = end - begin - sum(1 for _ in rows)
    [made] = _records(groups.keys.slice(place, 1))
    key = f"key {shown(made)}"
    if not taken:
        return f"{key}, before the first of its {end - begin} rows", range(0), key
    words, at, row = at_row(groups.batch, groups.order[begin + taken - 1].as_py())
    return f"{key}, the last row taken of {end - begin}: {words}", at, f"{key}: {row}"


def at_timer(fired: Fired, place: int) -> str:
    """The same for a timer."""
    [key] = _records(fired.keys.slice(place, 1))
    return f"key {shown(key)}, {fired.clock} timer of {_time_of(fired.times_ms[place])}"


def _spread(of_keys: Sequence[Any], bounds: Sequence[int]) -> list[Any]:
    """What each key has, once for each of its rows."""
    counts = map(sub, islice(bounds, 1, None), bounds)
    return list(chain.from_iterable(map(repeat, of_keys, counts)))


class _Output:
    """Gathers what a processor answers, for many keys, and makes batches of it."""

    def __init__(self, about: KeyProgram) -> None:
        self._about = about
        self._rows: list[Any] = []
        self._coming: Iterator[Any] = iter(())

    def is_full_with(self, made: Iterable[Any] | None) -> bool:
        """Take this too; whether there may be more of it than is gathered at a time.

        None is nothing: what a method answers that has no yield in it.
        """
        if made is None:
            return False
        self._coming = coming = iter(lazily(made) if type(made) in LAZY else made)
        rows = self._rows
        rows.extend(islice(coming, _OUTPUT_ROWS - len(rows)))
        return len(rows) >= _OUTPUT_ROWS

    def rest_of_it(self) -> Iterator[pa.RecordBatch]:
        """What is gathered, and then what is still to come of what was taken last."""
        yield from self.rest()
        while self.is_full_with(self._coming):
            yield from self.rest()

    def rest(self) -> Iterator[pa.RecordBatch]:
        if self._rows:
            rows, self._rows = self._rows, []
            yield batch_of(rows, self._about.schema, self._about.name)


# --- states


class _Lifetime(NamedTuple):
    ttl_ms: int | None
    refreshes: bool


class _KeyStates(KeyStates):
    """What a processor is given; what it declares is checked here."""

    def __init__(self, states: States, other_schema: OtherSchema | None) -> None:
        self._states = states
        self._other_schema = other_schema
        self.is_open = True
        """Whether states may still be declared."""

    def value(
        self,
        name: str,
        schema: Any,
        *,
        ttl: str | timedelta | None = None,
        ttl_refresh: TtlRefresh = "write",
    ) -> ValueHandle[Any]:
        return self._value(name, self._schema(name, schema), _lifetime(name, ttl, ttl_refresh))

    def list(
        self,
        name: str,
        schema: Any,
        *,
        ttl: str | timedelta | None = None,
        ttl_refresh: TtlRefresh = "write",
    ) -> ListHandle[Any]:
        declared, life = self._schema(name, schema), _lifetime(name, ttl, ttl_refresh)
        made = self._states.list(
            name, declared, life.ttl_ms, record_maker, named=True, refreshes=life.refreshes
        )
        return cast(ListHandle[Any], made)

    def map(
        self,
        name: str,
        key_schema: Any,
        value_schema: Any,
        *,
        ttl: str | timedelta | None = None,
        ttl_refresh: TtlRefresh = "write",
    ) -> MapHandle[Any]:
        schemas = self._schema(name, key_schema), self._schema(name, value_schema)
        life = _lifetime(name, ttl, ttl_refresh)
        made = self._states.map(
            name, *schemas, life.ttl_ms, record_maker, named=True, refreshes=life.refreshes
        )
        return cast(MapHandle[Any], made)

    def reducing(
        self,
        name: str,
        schema: Any,
        reduce: Callable[[Any, Any], tuple[Any, ...]] | Reduction | Mapping[str, Reduction],
        *,
        ttl: str | timedelta | None = None,
        ttl_refresh: TtlRefresh = "write",
    ) -> ReducingHandle[Any] | NamedReducingHandle[Any]:
        if isinstance(reduce, str | Mapping):
            if _lifetime(name, ttl, ttl_refresh).ttl_ms is not None:
                raise UserCodeError(
                    f"state {name} has a ttl, {ttl!r}, and a reduction with a name, {reduce!r},"
                    " whose rows do not expire: give a function as reduce, or leave ttl out"
                )
            declared = self._schema(name, schema)
            made = self._states.reducing(name, declared, reduce, record_maker, named=True)
            return cast(NamedReducingHandle[Any], made)
        return ReducingHandle(self.value(name, schema, ttl=ttl, ttl_refresh=ttl_refresh), reduce)

    def aggregating(
        self,
        name: str,
        schema: Any,
        add: Callable[[Any, Any], tuple[Any, ...]],
        result: Callable[[Any], Any],
        *,
        ttl: str | timedelta | None = None,
        ttl_refresh: TtlRefresh = "write",
    ) -> AggregatingHandle[Any]:
        kept = self.value(name, schema, ttl=ttl, ttl_refresh=ttl_refresh)
        return AggregatingHandle(kept, add, result)

    def opaque(
        self,
        name: str,
        *,
        ttl: str | timedelta | None = None,
        ttl_refresh: TtlRefresh = "write",
    ) -> OpaqueHandle[Any]:
        self._refuse_late(name)
        kept = self._value(name, OPAQUE_SCHEMA, _lifetime(name, ttl, ttl_refresh))
        return OpaqueHandle(kept, name)

    def delete(self, name: str) -> None:
        self._states.delete(name)

    def _value(self, name: str, schema: pa.Schema, life: _Lifetime) -> ValueHandle[Any]:
        made = self._states.value(
            name, schema, life.ttl_ms, record_maker, named=True, refreshes=life.refreshes
        )
        return cast(ValueHandle[Any], made)

    def _schema(self, name: str, schema: Any) -> pa.Schema:
        self._refuse_late(name)
        return schema_given(f"state {name}", schema, self._other_schema)

    def _refuse_late(self, name: str) -> None:
        if not self.is_open:
            raise UserCodeError(
                f"state {name} is declared while rows are handled: declare all states in open"
            )

    # --- timers

    def register_timer(self, time: datetime, clock: TimerClock = "event") -> None:
        what = "register_timer"
        self._states.register_timer(_ms_of(time, what), _clock(clock, what))

    def delete_timer(self, time: datetime, clock: TimerClock = "event") -> None:
        what = "delete_timer"
        self._states.delete_timer(_ms_of(time, what), _clock(clock, what))

    def timers(self, clock: TimerClock = "event") -> Iterator[datetime]:
        return map(_time_of, self._states.timers(_clock(clock, "timers")))

    @property
    def now(self) -> datetime:
        return _time_of(self._states.now_ms)

    @property
    def watermark(self) -> datetime | None:
        reached_us = self._states.watermark_us
        if reached_us is None:
            return None
        try:
            return _EPOCH + timedelta(microseconds=reached_us)
        except OverflowError:  # the end of all records
            return _LAST


def _lifetime(name: str, ttl: Any, refresh: Any) -> _Lifetime:
    if refresh not in get_args(TtlRefresh):
        raise UserCodeError(
            f"ttl_refresh of state {name} is 'write' or 'read and write', not {refresh!r}"
        )
    if ttl is None:
        if refresh != "write":
            raise UserCodeError(
                f"state {name} has ttl_refresh={refresh!r} and no ttl: give it a ttl, such as"
                " '1 hour', or leave ttl_refresh out"
            )
        return _Lifetime(None, refreshes=False)
    return _Lifetime(_milliseconds(name, ttl), refresh != "write")


def _milliseconds(name: str, ttl: Any) -> int:
    if isinstance(ttl, timedelta):
        seconds = ttl.total_seconds()
    elif isinstance(ttl, str):
        try:
            seconds = parse_duration_seconds("ttl", ttl)
        except BuildError:
            seconds = 0.0
    else:
        seconds = 0.0
    if seconds * 1000 < 1:
        raise UserCodeError(
            f"ttl of state {name} is a duration of a millisecond or more, such as '1 hour' or a"
            f" timedelta, not {ttl!r}"
        )
    return int(seconds * 1000)


def _clock(clock: Any, what: str) -> TimerClock:
    if clock not in get_args(TimerClock):
        raise UserCodeError(f"{what} takes the clock 'event' or 'processing', not {clock!r}")
    return cast(TimerClock, clock)


def _ms_of(time: Any, what: str) -> int:
    if not isinstance(time, datetime) or time.tzinfo is None:
        raise UserCodeError(
            f"{what} takes a datetime with a time zone, such as those of a timestamp column, not"
            f" {time!r}"
        )
    # Up, so that it is never early.
    return -((_EPOCH - time) // timedelta(milliseconds=1))


def _time_of(time_ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=time_ms)
