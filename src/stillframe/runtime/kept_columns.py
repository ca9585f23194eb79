"""A state with a column for each value, and how rows of a snapshot get the columns it has now.

What may change is decided in `protocol/columns`, by names; which types a column may have had is in
`state/evolution`. The driver asks before the start, the slots when they take the rows back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import StartRefused
from stillframe.json_values import JsonValue
from stillframe.protocol.columns import (
    Changed,
    Column,
    Part,
    Refused,
    StateColumns,
    change_of,
)
from stillframe.state.accumulators import accumulators_of
from stillframe.state.evolution import can_be_cast, hash_alike, made
from stillframe.state.key_places import key_places
from stillframe.state.snapshots import kind_of, schema_text


@dataclass(frozen=True, slots=True)
class ValueColumns:
    """Columns of a state that come and go together: those of an aggregate, or one of a row."""

    name: str
    fields: tuple[pa.Field, ...]
    empty: Callable[[int], Sequence[pa.Array]]
    """What so many rows have in them that were kept without."""


def columns_of_aggregates(
    input_schema: pa.Schema, calls: Sequence[AggregateCall]
) -> tuple[ValueColumns, ...]:
    return tuple(
        ValueColumns(each.call.name, tuple(each.snapshot_fields()), each.empty)
        for each in accumulators_of(input_schema, calls)
    )


def columns_of_rows(schema: pa.Schema, lasting: Collection[str]) -> tuple[ValueColumns, ...]:
    """Of rows that are kept as they came: each column but those by which they are found."""

    def nulls(field: pa.Field) -> Callable[[int], Sequence[pa.Array]]:
        return lambda count: [pa.nulls(count, field.type)]

    return tuple(
        ValueColumns(field.name, (field,), nulls(field))
        for field in schema
        if field.name not in lasting
    )


@dataclass(frozen=True)
class KeptColumns:
    """A state with a column for each value, as an operator keeps it now."""

    schema: pa.Schema
    uid: str
    as_before: str = "group and aggregate"
    """What to do as it was done."""
    values: Sequence[ValueColumns] = ()
    """What may come and go; the rest of the columns stays."""
    given: Mapping[str, JsonValue] = field(default_factory=dict)
    """What new ones begin with, where a person says it."""

    def fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of a snapshot with these columns; raises if they cannot have them."""
        change = self.change_from(batch.schema)
        if batch.schema.equals(self.schema):
            return batch
        added = dict(self._added(change, batch.num_rows))
        columns = [
            added[place] if place in added else self._cast(batch, place)
            for place in range(len(self.schema))
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def change_from(self, found: pa.Schema) -> Changed:
        """What becomes of a state that has these columns; raises if it cannot go on."""
        kind, wanted = kind_of(found), kind_of(self.schema)
        if kind and kind != wanted:
            raise StartRefused(
                f"the state of operator {self.uid!r} holds {kind} in the snapshot, and the job"
                f" keeps {wanted or 'none'}: {self._remedy}"
            )
        change = self._change(found)
        places = self._places(change)
        if not all(self._can_become(found, place) for place in places):
            raise self._refused(found)
        return change

    def _change(self, found: pa.Schema) -> Changed:
        if found.names == self.schema.names:
            return Changed()
        keys_before, keys = key_places(found), key_places(self.schema)
        is_clear = len(set(found.names)) == len(found) and len(set(self.schema.names)) == len(
            self.schema
        )
        if keys_before is None or keys is None or not is_clear or not self.values:
            raise self._refused(found)
        parts = tuple(Part(each.name, tuple(map(_column, each.fields))) for each in self.values)
        key_names = tuple(self.schema.field(place).name for place in keys)
        come_and_go = {column.name for part in parts for column in part.columns}
        lasting = {*self.schema.names} - {*key_names} - come_and_go
        change = change_of(
            [_column(each) for each in found],
            [found.field(place).name for place in keys_before],
            StateColumns(key_names, tuple(sorted(lasting)), parts),
            self.given,
        )
        if isinstance(change, Refused):
            raise StartRefused(
                f"the state of operator {self.uid!r} has the columns {schema_text(found)} in the"
                f" snapshot, and the job keeps {schema_text(self.schema)}; {change.why}:"
                f" {change.remedy}"
            )
        return change

    def _places(self, change: Changed) -> list[int]:
        """Where the columns are that the snapshot has."""
        added = {f.name for each in self.values if each.name in change.added for f in each.fields}
        return [place for place, each in enumerate(self.schema) if each.name not in added]

    def _can_become(self, found: pa.Schema, place: int) -> bool:
        """By the types alone, so that the driver says the same of no rows as a slot of many."""
        old, new = found.field(_place_in(found, self.schema, place)).type, self.schema.field(place)
        if place in (key_places(self.schema) or ()):
            return hash_alike(old, new.type)
        return can_be_cast(old, new.type)

    def _cast(self, batch: pa.RecordBatch, place: int) -> pa.Array:
        column = batch.column(_place_in(batch.schema, self.schema, place))
        try:
            return made(column, self.schema.field(place).type)
        except pa.ArrowException as error:
            raise self._refused(batch.schema, f" ({error})") from error

    def _added(self, change: Changed, count: int) -> Iterator[tuple[int, pa.Array]]:
        for each in self.values:
            if each.name not in change.added:
                continue
            arrays = each.empty(count)
            if self.given.get(each.name) is not None:
                arrays = [self._default(each, count)]
            for one, array in zip(each.fields, arrays, strict=True):
                yield self.schema.get_field_index(one.name), array

    def _default(self, part: ValueColumns, count: int) -> pa.Array:
        value, [*types] = self.given[part.name], [each.type for each in part.fields]
        try:
            if len(types) > 1:
                raise pa.ArrowInvalid(f"it is kept as {len(types)} numbers")
            # Times and decimals are texts in JSON.
            is_text = isinstance(value, str)
            given = pa.scalar(value).cast(types[0]) if is_text else pa.scalar(value, types[0])
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise StartRefused(
                f"the state of operator {self.uid!r} cannot begin with {value!r} for {part.name},"
                f" of type {' and '.join(map(str, types))} ({error}): give stateDefaults a value of"
                " this type, or null to begin with nothing"
            ) from error
        return pa.repeat(given, count)

    def _refused(self, found: pa.Schema, problem: str = "") -> StartRefused:
        return StartRefused(
            f"the state of operator {self.uid!r} has the columns {schema_text(found)} in the"
            f" snapshot, and the job keeps {schema_text(self.schema)}{problem}: {self._remedy}"
        )

    @property
    def _remedy(self) -> str:
        return f"{self.as_before} as before, or give the operator another uid"


def _place_in(found: pa.Schema, wanted: pa.Schema, place: int) -> int:
    """Columns of the same names are the same by their places: two may have one name."""
    if found.names == wanted.names:
        return place
    return int(found.get_field_index(wanted.field(place).name))


def _column(field: pa.Field) -> Column:
    return Column(field.name, str(field.type))
