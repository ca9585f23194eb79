"""A snapshot's columns as people see them in a DataFrame, and back.

Theory of operation
-------------------
A snapshot has one flat column for each part of the key, and then what the table keeps (`kept`). A
person sees what Spark's own `statestore` source shows: a struct `key`, a struct `value` (or
`list_element`, or `user_map_key` and `user_map_value`), and besides `key_group` and, where rows
have a time to live, `expires`. The elements of a list have a `list_index`, because a DataFrame has
no order. Both ways go by names, so that columns may come in any order and with more beside them.

There are two layouts. The states of handles (value, list, map) have their row in one struct column,
and say their kind; everything else (aggregates, windows, keys seen before, timers) has a column for
each value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from stillframe.errors import BuildError, DataError
from stillframe.state.backends import EXPIRES, EXPIRES_TYPE, USER_KEY, VALUE, Kind
from stillframe.state.key_places import key_places, keyed_by

KEY = "key"
SHOWN_VALUE = "value"
LIST_ELEMENT = "list_element"
LIST_INDEX = "list_index"
MAP_KEY = "user_map_key"
MAP_VALUE = "user_map_value"
SHOWN_EXPIRES = "expires"
KEY_GROUP = "key_group"

StateKind = Literal["value", "list", "map", "columns"]
"""`columns`: whatever is no handle of a program, but a table with a column for each value."""

_ROW_OF: dict[StateKind, str] = {
    "value": SHOWN_VALUE,
    "list": LIST_ELEMENT,
    "map": MAP_VALUE,
    "columns": SHOWN_VALUE,
}
_SHOWN_EXPIRES_TYPE = pa.timestamp("us", "UTC")


@dataclass(frozen=True)
class Shape:
    """What one state is kept as (`kept`, with what its metadata says) and shown as."""

    kept: pa.Schema

    @property
    def kind(self) -> StateKind:
        said = (self.kept.metadata or {}).get(b"kind", b"").decode()
        kinds: dict[str, StateKind] = {
            Kind.VALUE: "value", Kind.LIST: "list", Kind.MAP: "map"
        }  # fmt: skip
        return kinds.get(said, "columns")

    @property
    def key_fields(self) -> list[pa.Field]:
        """None of them where there is one key for all, or the snapshot does not say."""
        return [self.kept.field(place) for place in key_places(self.kept) or ()]

    @property
    def value_fields(self) -> list[pa.Field]:
        """Of a state with a column for each value: those that are not the key."""
        keys = key_places(self.kept) or ()
        return [field for place, field in enumerate(self.kept) if place not in keys]

    @property
    def shown(self) -> pa.Schema:
        fields = [pa.field(KEY, pa.struct(self.key_fields))] if self.key_fields else []
        if self.kind == "columns":
            values = self.value_fields
            fields += [pa.field(SHOWN_VALUE, pa.struct(values))] if values else []
            return pa.schema([*fields, pa.field(KEY_GROUP, pa.int32())])
        if self.kind == "map":
            fields.append(pa.field(MAP_KEY, self.kept.field(USER_KEY).type))
        fields.append(pa.field(_ROW_OF[self.kind], self.kept.field(VALUE).type))
        if self.kind == "list":
            fields.append(pa.field(LIST_INDEX, pa.int64()))
        if EXPIRES in self.kept.names:
            fields.append(pa.field(SHOWN_EXPIRES, _SHOWN_EXPIRES_TYPE))
        return pa.schema([*fields, pa.field(KEY_GROUP, pa.int32())])

    def show(self, batch: pa.RecordBatch, key_group: int | None) -> pa.RecordBatch:
        """Rows of a snapshot, all of one key group (None: they belong to none)."""
        made = {field.name: self._shown_column(batch, field, key_group) for field in self.shown}
        return pa.RecordBatch.from_arrays(list(made.values()), schema=self.shown)

    def _shown_column(
        self, batch: pa.RecordBatch, field: pa.Field, key_group: int | None
    ) -> pa.Array:
        match field.name:
            case "key":
                return _struct(batch, self.key_fields)
            case "value" if self.kind == "columns":
                return _struct(batch, self.value_fields)
            case "value" | "list_element" | "user_map_value":
                return batch.column(VALUE)
            case "user_map_key":
                return batch.column(USER_KEY)
            case "list_index":
                # Of the key group: what counts is the order of one key's elements.
                return pa.array(np.arange(batch.num_rows))
            case "expires":
                return batch.column(EXPIRES).cast(field.type)
            case _:
                group = pa.array([key_group], field.type)
                return group.take(np.zeros(batch.num_rows, np.int64))

    def keep(self, shown: pa.RecordBatch) -> pa.RecordBatch:
        """Rows as a snapshot has them, of rows as they are shown."""
        columns = [self._kept_column(shown, place, field) for place, field in enumerate(self.kept)]
        return pa.RecordBatch.from_arrays(columns, schema=self.kept)

    def _kept_column(self, shown: pa.RecordBatch, place: int, field: pa.Field) -> pa.Array:
        if place in (key_places(self.kept) or ()):
            return _member(shown.column(KEY), field)
        if self.kind == "columns":
            return _member(shown.column(SHOWN_VALUE), field)
        names = {USER_KEY: MAP_KEY, VALUE: _ROW_OF[self.kind], EXPIRES: SHOWN_EXPIRES}
        return _cast(shown.column(names[field.name]), field)

    @property
    def identity(self) -> list[int]:
        """The columns of which no two rows may have the same; none: rows may repeat."""
        keys = list(key_places(self.kept) or ())
        if self.kind == "value":
            return keys
        return [*keys, self.kept.get_field_index(USER_KEY)] if self.kind == "map" else []


def shape_of(shown: pa.Schema, kind: StateKind | None, like: Shape | None = None) -> Shape:
    """How to keep rows that are shown with these columns.

    `like` is the state they replace, of which a state with a column for each value keeps order and
    types, since its operator goes by them; a handle's rows may have changed.
    """
    kind = kind or _kind_of(shown, like)
    keys = _fields_of(shown, KEY) if KEY in shown.names else []
    if kind == "columns":
        values = _fields_of(shown, SHOWN_VALUE) if SHOWN_VALUE in shown.names else []
        if like is not None and like.kind == "columns":
            _refuse_other_columns(keys, like.key_fields, KEY)
            _refuse_other_columns(values, like.value_fields, SHOWN_VALUE)
            return like
        return Shape(_keyed(keys, values, {}))
    return Shape(_keyed(keys, list(_handle_fields(shown, kind)), {"kind": str(Kind(kind))}))


def _kind_of(shown: pa.Schema, like: Shape | None) -> StateKind:
    if LIST_ELEMENT in shown.names:
        return "list"
    if MAP_KEY in shown.names:
        return "map"
    if like is not None and like.kind in ("value", "columns"):
        return like.kind
    return "value"


def _handle_fields(shown: pa.Schema, kind: StateKind) -> Iterator[pa.Field]:
    if kind == "map":
        yield pa.field(USER_KEY, pa.struct(_fields_of(shown, MAP_KEY)))
    yield pa.field(VALUE, pa.struct(_fields_of(shown, _ROW_OF[kind])))
    if SHOWN_EXPIRES in shown.names:
        yield pa.field(EXPIRES, EXPIRES_TYPE)


def _keyed(keys: Sequence[pa.Field], rest: Sequence[pa.Field], said: dict[str, str]) -> pa.Schema:
    # Null is a key, whatever the DataFrame says; and nullability is not worth a mismatch.
    fields = [field.with_nullable(True) for field in (*keys, *rest)]
    return keyed_by(pa.schema(fields, said), range(len(keys)))


def _fields_of(shown: pa.Schema, name: str) -> list[pa.Field]:
    if name not in shown.names:
        raise BuildError(
            f"there is no column {name!r} among {', '.join(shown.names)}: give the columns as"
            " reading a snapshot shows them, or say with keys=[...] which of them are the key"
        )
    type_ = shown.field(name).type
    if not pt.is_struct(type_):
        raise BuildError(f"column {name!r} is a {type_}, and has to be a struct")
    return list(type_)


def _refuse_other_columns(
    given: Sequence[pa.Field], wanted: Sequence[pa.Field], column: str
) -> None:
    names, there = {field.name for field in given}, {field.name for field in wanted}
    if names != there:
        raise BuildError(
            f"column {column!r} has the fields {', '.join(sorted(names)) or 'none'}, and the state"
            f" that it replaces has {', '.join(sorted(there)) or 'none'}: give the same"
        )


def _struct(batch: pa.RecordBatch, fields: Sequence[pa.Field]) -> pa.Array:
    columns = [batch.column(field.name) for field in fields]
    return pa.StructArray.from_arrays(columns, fields=list(fields))


def _member(column: pa.Array, field: pa.Field) -> pa.Array:
    if column.null_count:
        raise DataError("a row has no key or no value at all: leave rows out where they are null")
    place = column.type.get_field_index(field.name)
    return _cast(column.flatten()[place], field)


def _cast(column: pa.Array, field: pa.Field) -> pa.Array:
    if column.type.equals(field.type):
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise DataError(
            f"{field.name} is a {column.type} and cannot become the {field.type} it was: {error}"
        ) from error
