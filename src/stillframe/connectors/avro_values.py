"""Avro's binary records, one in each value, as columns; with a schema that is given as JSON text.

Theory of operation
-------------------
A record has no field boundaries: each field begins where the one before it ended. So all records
are decoded side by side, field by field: each has a cursor, and one step moves the cursors of all
records (or of those that have a value in a union) by whole-array arithmetic. Items of arrays are
decoded round by round: the first items of all arrays, then the second ones.

A record that cannot be what the schema says (it is too short, or an index or a length is wrong) is
marked, its cursor stays at its end, and the others are not touched. Bytes behind the last field are
passed over, as in Spark.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stillframe.errors import BuildError

_Ints: TypeAlias = npt.NDArray[np.int64]
_CONFLUENT_BYTES = 5
"""A zero, and the number of a schema."""
_PADDING = b"\0" * 16
_VARINT_BYTES_MAX = 10
_DECIMAL_BYTES = 16
_UTC_MICROS = pa.timestamp("us", tz="UTC")
_LOCAL_MICROS = pa.timestamp("us")


@dataclass(frozen=True)
class AvroFormat:
    """What the values are, and what becomes of one that is not."""

    schema: str
    fails_on_malformed: bool = True
    """As in Spark's `from_avro`: FAILFAST is the default. Otherwise it is a row of nulls."""
    has_confluent_header: bool = False

    def columns(self) -> pa.Schema:
        """The columns of the values; raises a `BuildError` if it cannot be read."""
        return pa.schema([field.with_nullable(True) for field in _root(self.schema).type])


@dataclass(frozen=True)
class Decoded:
    batch: pa.RecordBatch
    malformed: Sequence[int]
    """The places of the values that were not what the schema says; their rows are nulls."""


class AvroReader:
    """Makes columns of values."""

    def __init__(self, form: AvroFormat) -> None:
        self._root = _root(form.schema)
        self._skips_bytes = _CONFLUENT_BYTES if form.has_confluent_header else 0
        self._schema = form.columns()

    def read(self, values: Sequence[bytes | None]) -> Decoded:
        """A row for each; one that is null is a row of nulls."""
        there = np.fromiter((value is not None for value in values), np.bool_, len(values))
        cursors = _Cursors([value for value in values if value is not None])
        if self._skips_bytes:
            cursors.skip_confluent(self._skips_bytes)
        rows: pa.StructArray = self._root.decode(cursors, cursors.all())
        good = there.copy()
        good[there] = ~cursors.bad
        if not good.all():
            at = np.cumsum(there) - 1
            rows = rows.take(pa.array(at, mask=~good))
        batch = pa.RecordBatch.from_arrays(rows.flatten(), schema=self._schema)
        return Decoded(batch, np.flatnonzero(there & ~good).tolist())


class _Cursors:
    """Where each record is read."""

    def __init__(self, values: Sequence[bytes]) -> None:
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        self.data = np.frombuffer(b"".join([*values, _PADDING]), np.uint8)
        self._ends = np.cumsum(lengths)
        self._at = self._ends - lengths
        self.bad = np.zeros(len(values), np.bool_)

    def all(self) -> _Ints:
        return np.arange(len(self.bad))

    def skip_confluent(self, size: int) -> None:
        starts = self.taken(self.all(), size)
        self.mark(self.all(), self.data[starts] != 0)

    def mark(self, rows: _Ints, is_wrong: npt.NDArray[np.bool_]) -> None:
        """These have a value that cannot be; they stay at their end."""
        if is_wrong.any():
            wrong = rows[is_wrong]
            self.bad[wrong] = True
            self._at[wrong] = self._ends[wrong]

    def left(self, rows: _Ints) -> _Ints:
        return self._ends[rows] - self._at[rows]

    def taken(self, rows: _Ints, sizes: _Ints | int) -> _Ints:
        """Where the next bytes of each begin, which are passed; of a marked one that means
        nothing, but may be read."""
        starts = self._at[rows]
        after = starts + sizes
        self._at[rows] = after
        is_wrong = after > self._ends[rows]
        if is_wrong.any():
            self.mark(rows, is_wrong)
            starts = np.where(is_wrong, 0, starts)
        return starts

    def integers(self, rows: _Ints) -> _Ints:
        """The next number of each, in zigzag."""
        at = self._at[rows]
        byte = self.data[at]
        found = (byte & 0x7F).astype(np.uint64)
        at += 1
        more = np.flatnonzero(byte & 0x80)
        for step in range(1, _VARINT_BYTES_MAX):
            if not len(more):
                break
            # Behind its end only for a record that is marked below.
            byte = self.data[np.minimum(at[more], len(self.data) - 1)]
            found[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * step)
            at[more] += 1
            more = more[(byte & 0x80) != 0]
        is_wrong = at > self._ends[rows]
        is_wrong[more] = True
        self._at[rows] = at
        self.mark(rows, is_wrong)
        half = (found >> np.uint64(1)).view(np.int64)
        signs: _Ints = -(found & np.uint64(1)).view(np.int64)
        return cast(_Ints, half ^ signs)

    def spans(self, rows: _Ints) -> tuple[_Ints, _Ints]:
        """Where the next bytes of each begin, and how many they are."""
        sizes = self.integers(rows)
        self.mark(rows, (sizes < 0) | (sizes > self.left(rows)))
        sizes[self.bad[rows]] = 0
        return self.taken(rows, sizes), sizes


# --- What each type is and how it is read ----------------------------------------------------

_Read: TypeAlias = Callable[[_Cursors, _Ints], pa.Array]


@dataclass(frozen=True)
class _Type:
    type: pa.DataType
    decode: _Read
    """The next values of these records."""


def _integers(target: pa.DataType) -> _Type:
    def decode(cursors: _Cursors, rows: _Ints) -> pa.Array:
        found = cursors.integers(rows)
        if target.bit_width == 64:
            return pa.array(found).view(target)
        narrow = found.astype(np.int32)
        cursors.mark(rows, narrow != found)
        return pa.array(narrow).view(target)

    return _Type(target, decode)


def _millis(target: pa.DataType) -> _Type:
    def decode(cursors: _Cursors, rows: _Ints) -> pa.Array:
        found = cursors.integers(rows)
        micros = found * 1000
        cursors.mark(rows, micros // 1000 != found)
        return pa.array(micros).view(target)

    return _Type(target, decode)


def _gathered(cursors: _Cursors, rows: _Ints, size: int) -> npt.NDArray[np.uint8]:
    places = cursors.taken(rows, size)[:, None] + np.arange(size)
    return cast(npt.NDArray[np.uint8], cursors.data[np.minimum(places, len(cursors.data) - 1)])


def _floats(target: pa.DataType) -> _Type:
    def decode(cursors: _Cursors, rows: _Ints) -> pa.Array:
        size = target.bit_width // 8
        return pa.array(_gathered(cursors, rows, size).view(f"<f{size}").reshape(-1))

    return _Type(target, decode)


def _booleans(cursors: _Cursors, rows: _Ints) -> pa.Array:
    found = cursors.data[cursors.taken(rows, 1)]
    cursors.mark(rows, found > 1)
    return pa.array(found == 1)


def _nulls(cursors: _Cursors, rows: _Ints) -> pa.Array:
    return pa.nulls(len(rows))


def _texts(target: pa.DataType) -> _Type:
    def decode(cursors: _Cursors, rows: _Ints) -> pa.Array:
        starts, sizes = cursors.spans(rows)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(sizes, out=offsets[1:])
        places = np.repeat(starts - offsets[:-1], sizes) + np.arange(offsets[-1])
        buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(cursors.data[places])]
        return pa.Array.from_buffers(target, len(rows), buffers)

    return _Type(target, decode)


def _fixed(size: int) -> _Type:
    def decode(cursors: _Cursors, rows: _Ints) -> pa.Array:
        found = pa.py_buffer(_gathered(cursors, rows, size))
        fixed = pa.Array.from_buffers(pa.binary(size), len(rows), [None, found])
        return fixed.cast(pa.binary())

    return _Type(pa.binary(), decode)


def _decimals(target: pa.Decimal128Type, size: int | None) -> _Type:
    """The unscaled number, with the highest byte first; `size`: always that many bytes."""

    def decode(cursors: _Cursors, rows: _Ints) -> pa.Array:
        if size is None:
            starts, sizes = cursors.spans(rows)
        else:
            starts, sizes = cursors.taken(rows, size), np.full(len(rows), size)
        cursors.mark(rows, (sizes > _DECIMAL_BYTES) | (sizes == 0))
        sizes = np.clip(sizes, 1, _DECIMAL_BYTES)
        is_negative = cursors.data[starts] >= 0x80
        # From the lowest byte on; above the highest there are those of the sign.
        lowest = np.arange(_DECIMAL_BYTES)
        places = (starts + sizes - 1)[:, None] - lowest
        found = np.where(
            lowest < sizes[:, None],
            cursors.data[np.maximum(places, 0)],
            np.where(is_negative, 0xFF, 0)[:, None],
        ).astype(np.uint8)
        return pa.Array.from_buffers(target, len(rows), [None, pa.py_buffer(found)])

    return _Type(target, decode)


def _enums(symbols: Sequence[str]) -> _Type:
    names = pa.array(symbols, pa.string())

    def decode(cursors: _Cursors, rows: _Ints) -> pa.Array:
        found = cursors.integers(rows)
        is_wrong = (found < 0) | (found >= len(symbols))
        cursors.mark(rows, is_wrong)
        return names.take(pa.array(np.where(is_wrong, 0, found)))

    return _Type(pa.string(), decode)


def _records(fields: Sequence[tuple[str, _Type]]) -> _Type:
    target = pa.struct([pa.field(name, each.type) for name, each in fields])

    def decode(cursors: _Cursors, rows: _Ints) -> pa.Array:
        columns = [each.decode(cursors, rows) for _, each in fields]
        return pa.StructArray.from_arrays(columns, fields=list(target))

    return _Type(target, decode)


def _unions(branches: Sequence[_Type], target: pa.DataType) -> _Type:
    """Of null and one other type, or of two numbers that Spark reads as the wider one."""

    def decode(cursors: _Cursors, rows: _Ints) -> pa.Array:
        which = cursors.integers(rows)
        cursors.mark(rows, (which < 0) | (which >= len(branches)))
        found: list[pa.Array] = []
        places = np.zeros(len(rows), np.int64)
        is_there = np.zeros(len(rows), np.bool_)
        for number, branch in enumerate(branches):
            if pa.types.is_null(branch.type):
                continue
            chosen = which == number
            begins = sum(map(len, found))
            places[chosen] = np.arange(begins, begins + np.count_nonzero(chosen))
            is_there |= chosen
            found.append(branch.decode(cursors, rows[chosen]).cast(target))
        values = pa.concat_arrays(found) if len(found) > 1 else found[0]
        if len(values) == len(rows) and len(found) == 1:
            return values
        return values.take(pa.array(places, mask=~is_there))

    return _Type(target, decode)


def _many(item: _Type, as_lists: Callable[[pa.Array, pa.Array], pa.Array]) -> _Read:
    """Items in blocks, each with its count; a negative count is followed by the block's size."""

    def decode(cursors: _Cursors, rows: _Ints) -> pa.Array:
        counts = np.zeros(len(rows), np.int64)
        owners: list[_Ints] = [np.zeros(0, np.int64)]
        items: list[pa.Array] = [pa.array([], item.type)]
        active = np.arange(len(rows))
        while len(active):
            block = cursors.integers(rows[active])
            is_sized = block < 0
            if is_sized.any():
                cursors.integers(rows[active[is_sized]])
            block = np.abs(block)
            cursors.mark(rows[active], (block > cursors.left(rows[active])) | (block < 0))
            is_open = (block > 0) & ~cursors.bad[rows[active]]
            active, block = active[is_open], block[is_open]
            counts[active] += block
            for number in range(int(block.max(initial=0))):
                owner = active[block > number]
                owners.append(owner)
                items.append(item.decode(cursors, rows[owner]))
        order = np.argsort(np.concatenate(owners), kind="stable")
        offsets = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        return as_lists(pa.array(offsets), pa.concat_arrays(items).take(pa.array(order)))

    return decode


def _lists(item: _Type) -> _Type:
    target = pa.list_(item.type)
    return _Type(target, _many(item, lambda offsets, items: _as(target, offsets, items)))


def _maps(value: _Type) -> _Type:
    target = pa.map_(pa.string(), value.type)
    entry = _records([("key", _texts(pa.string())), ("value", value)])

    def as_maps(offsets: pa.Array, items: pa.StructArray) -> pa.Array:
        return pa.MapArray.from_arrays(offsets, items.field(0), items.field(1), target)

    return _Type(target, _many(entry, as_maps))


def _as(target: pa.DataType, offsets: pa.Array, items: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(offsets, items, target)


# --- The schema ------------------------------------------------------------------------------

_PLAIN: Mapping[str, _Type] = {
    "null": _Type(pa.null(), _nulls),
    "boolean": _Type(pa.bool_(), _booleans),
    "int": _integers(pa.int32()),
    "long": _integers(pa.int64()),
    "float": _floats(pa.float32()),
    "double": _floats(pa.float64()),
    "bytes": _texts(pa.binary()),
    "string": _texts(pa.string()),
}
_LOGICAL: Mapping[tuple[str, str], _Type] = {
    ("int", "date"): _integers(pa.date32()),
    ("long", "timestamp-millis"): _millis(_UTC_MICROS),
    ("long", "timestamp-micros"): _integers(_UTC_MICROS),
    ("long", "local-timestamp-millis"): _millis(_LOCAL_MICROS),
    ("long", "local-timestamp-micros"): _integers(_LOCAL_MICROS),
}
"""Others are read as the type they are written in, as in Spark."""
_WIDER = {frozenset({"int", "long"}): pa.int64(), frozenset({"float", "double"}): pa.float64()}


def _root(text: str) -> _Type:
    try:
        said = json.loads(text)
    except json.JSONDecodeError as error:
        raise BuildError(
            f"option avroSchema is no JSON ({error.msg} at character {error.pos}): give the text of"
            " an Avro schema"
        ) from None
    root = _Names().type_of(said, "")
    if not isinstance(said, dict) or said.get("type") != "record":
        raise BuildError(
            f"option avroSchema says {_brief(said)}: only a record becomes columns, so wrap it in"
            " one"
        )
    return root


class _Names:
    """Types by the names that a schema has given them so far."""

    def __init__(self) -> None:
        self._known: dict[str, _Type] = {}

    def type_of(self, said: Any, space: str) -> _Type:
        if isinstance(said, str):
            return self._named(said, space)
        if isinstance(said, list):
            return self._union(said, space)
        if not isinstance(said, dict) or "type" not in said:
            raise _wrong(said, "is no type")
        kind = said["type"]
        if not isinstance(kind, str) or kind in self._known:
            return self.type_of(kind, space)
        if kind in ("record", "error", "enum", "fixed"):
            return self._define(said, kind, space)
        if kind == "array":
            return _lists(self.type_of(said.get("items"), space))
        if kind == "map":
            return _maps(self.type_of(said.get("values"), space))
        logical = said.get("logicalType")
        if kind == "bytes" and logical == "decimal":
            return _decimals(_decimal_type(said), None)
        return _LOGICAL.get((kind, str(logical))) or self._named(kind, space)

    def _named(self, name: str, space: str) -> _Type:
        found = _PLAIN.get(name) or self._known.get(_full(name, space)) or self._known.get(name)
        if found is None:
            raise _wrong(name, "is not known, or contains itself")
        return found

    def _define(self, said: dict[str, Any], kind: str, space: str) -> _Type:
        name = _full(str(said.get("name", "")), str(said.get("namespace", space)))
        inner = name.rpartition(".")[0]
        if kind == "enum":
            made = _enums([str(each) for each in said.get("symbols", ())])
        elif kind == "fixed":
            size = said.get("size")
            if not isinstance(size, int):
                raise _wrong(said, "has no size")
            is_decimal = said.get("logicalType") == "decimal"
            made = _decimals(_decimal_type(said), size) if is_decimal else _fixed(size)
        else:
            fields = said.get("fields")
            if not isinstance(fields, list) or not fields:
                raise _wrong(said, "has no fields")
            made = _records(
                [(str(each["name"]), self.type_of(each["type"], inner)) for each in fields]
            )
        self._known[name] = made
        return made

    def _union(self, said: list[Any], space: str) -> _Type:
        branches = [self.type_of(each, space) for each in said]
        others = [
            (each, branch)
            for each, branch in zip(said, branches, strict=True)
            if not pa.types.is_null(branch.type)
        ]
        if len(others) == 1:
            return _unions(branches, others[0][1].type)
        wider = _WIDER.get(frozenset(each for each, _ in others if isinstance(each, str)))
        if wider is None or len(others) != 2:
            raise _wrong(said, "is a union of several types: only one beside null is read")
        return _unions(branches, wider)


def _decimal_type(said: Mapping[str, Any]) -> pa.Decimal128Type:
    precision, scale = said.get("precision"), said.get("scale", 0)
    if not isinstance(precision, int) or not isinstance(scale, int) or not 0 < precision <= 38:
        raise _wrong(said, "is a decimal whose precision is not between 1 and 38")
    return cast(pa.Decimal128Type, pa.decimal128(precision, scale))


def _full(name: str, space: str) -> str:
    return name if "." in name or not space else f"{space}.{name}"


def _wrong(said: Any, why: str) -> BuildError:
    return BuildError(f"option avroSchema: {_brief(said)} {why}")


def _brief(said: Any) -> str:
    text = json.dumps(said)
    return text if len(text) <= 80 else f"{text[:80]}…"
