"""Texts as columns: quick readers for what they surely read as Spark does, `rows` for the rest.

Theory of operation
-------------------
Flat records go to `flat`, all or none. For the others, and where it refuses a text, there is
Arrow's reader. It takes a hundred times as many texts in a second as one could in Python, but it is
another parser, and one that some texts crash. So it gets only texts that are whole objects, as far
as their first and last byte tell: since no `}` is followed by a `{` within JSON, as many records as
texts means one record in each. Texts in which it would see something else than Jackson are left
out: what is not UTF-8, what may be `NaN` or `Infinity` without quotes, what is nested too deeply.

Where Arrow refuses, the texts are halved until those are found that it does not like. What it gives
is converted where Spark is more liberal (times, dates, Base64), and rows of which that cannot be
done column by column are read again by `rows`, as are the texts that were left out.

That both ways agree is tested with texts made of chance (`tests/test_json_texts.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json

from stillframe.json_texts.flat import FlatReader, is_flat
from stillframe.json_texts.rows import RowReader, TextRows
from stillframe.json_texts.rules import JsonRules
from stillframe.json_texts.tokens import DEPTH_MAX, NUMBER_CHARACTERS_MAX
from stillframe.zones import INSTANT, WALL_CLOCK, instants, zone_of

_Mask = npt.NDArray[np.bool_]
_Places = npt.NDArray[np.int64]

_FEW_TEXTS = 4
"""So few that it is not worth the while to ask Arrow which of them it does not like."""
_NON_NUMBER = re.compile(rb"[:,\[]\s*[+-]?(?:NaN|Inf)")
_LONG_NUMBER = re.compile(rb"[0-9.]{%d}" % NUMBER_CHARACTERS_MAX)
_IS_DIGIT = np.zeros(256, dtype=np.bool_)
_IS_DIGIT[list(b"0123456789.")] = True


class Texts:
    """Texts that lie one behind the other in one piece of memory, with something between them."""

    def __init__(self, data: bytes | memoryview, starts: _Places, ends: _Places) -> None:
        self.data = data
        self.starts = starts
        self.ends = ends

    @classmethod
    def lines(cls, block: bytes) -> Texts:
        """The lines of a file; a carriage return ends one, too, as it does for Spark."""
        octets = np.frombuffer(block, dtype=np.uint8)
        is_end = octets == ord("\n")
        if b"\r" in block:
            is_end |= octets == ord("\r")
        ends = np.flatnonzero(is_end)
        starts = np.concatenate(([0], ends + 1))
        return cls(block, starts, np.concatenate((ends, [len(block)])))

    @classmethod
    def of(cls, texts: Iterable[bytes]) -> Texts:
        parts = list(texts)
        lengths = np.fromiter(map(len, parts), np.int64, len(parts))
        ends = np.cumsum(lengths + 1) - 1
        return cls(b"\n".join(parts), ends - lengths, ends)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, place: int) -> bytes:
        return bytes(self.data[self.starts[place] : self.ends[place]])

    def picked(self, places: _Places | slice) -> Texts:
        return Texts(self.data, self.starts[places], self.ends[places])

    def all_begin_with(self, sign: bytes) -> bool:
        """With this byte; none of them is empty."""
        octets = np.frombuffer(self.data, dtype=np.uint8)
        return bool((octets[self.starts] == ord(sign)).all())

    def text_around(self, at: int) -> int:
        """The place of the text that this byte belongs to."""
        return int(np.searchsorted(self.starts, at, side="right")) - 1


@dataclass(frozen=True, slots=True)
class Parsed:
    """The rows of some texts."""

    batch: pa.RecordBatch
    text_of_row: _Places
    """Which text each row is of, in their order. A blank one has none, an array may have many."""
    malformed: Mapping[int, str]
    """The rows that are malformed, and why."""


class TimeColumns:
    """Texts as times of one zone, where they do not say theirs."""

    def __init__(self, zone: str) -> None:
        self._zone = zone

    def timestamps(self, array: pa.Array, type_: pa.DataType) -> tuple[pa.Array, _Mask | None]:
        """The times, and where a text may mean another one or none, which the cast cannot tell."""
        is_plain, has_zone = _times_of_known_form(array)
        if type_.tz is None:
            made, doubts = _cast_or_null(_only(array, is_plain & ~has_zone), WALL_CLOCK)
            return made, _or(doubts, ~is_plain | has_zone)
        if has_zone.all():
            made, doubts = _cast_or_null(_only(array, is_plain), INSTANT)
            return made, _or(doubts, ~is_plain)
        made, doubts = _cast_or_null(_only(array, is_plain & ~has_zone), WALL_CLOCK)
        made = self._at_the_session_s_clock(made)
        if has_zone.any():
            zoned, more = _cast_or_null(_only(array, is_plain & has_zone), INSTANT)
            made, doubts = pc.coalesce(made, zoned), _or(doubts, more)
        return made, _or(doubts, ~is_plain)

    def _at_the_session_s_clock(self, clock: pa.Array) -> pa.Array:
        zone = zone_of(self._zone)
        if isinstance(zone, ZoneInfo):
            return instants(clock, zone.key)
        offset = zone.utcoffset(None)
        assert offset is not None
        ahead_us = offset // timedelta(microseconds=1)
        return pc.subtract(clock.cast(pa.int64()), ahead_us).cast(INSTANT)


class ColumnReader:
    """Reads texts of one schema."""

    def __init__(self, schema: pa.Schema, rules: JsonRules) -> None:
        self._schema = schema
        self._rows = RowReader(schema, rules)
        self._written = pa.schema([field.with_type(_as_written(field.type)) for field in schema])
        self._is_fast = bool(schema.names) and not any(_has_map(field.type) for field in schema)
        self._flat = FlatReader(schema) if is_flat(schema) else None
        self._times = TimeColumns(rules.zone)

    def read(self, texts: Texts) -> Parsed:
        left = texts.ends > texts.starts
        flat = self._by_line(texts, np.flatnonzero(left)) if self._flat is not None else None
        if flat is not None:
            return Parsed(flat.batch, flat.places, {})
        pieces: list[_Piece] = []
        if self._is_fast:
            for run in _sure_runs(texts, np.flatnonzero(left)):
                pieces += self._fast(texts.picked(run), run)
        for piece in pieces:
            left[piece.places] = False
        malformed: dict[int, str] = {}
        if left.any():
            slow, malformed = self._slow(texts, np.flatnonzero(left))
            pieces.append(slow)
        return _merged(pieces, malformed, self._schema)

    # --- flat records

    def _by_line(self, texts: Texts, places: _Places) -> _Piece | None:
        """All texts at these places, none of which is empty, or nothing."""
        assert self._flat is not None
        picked, octets = texts.picked(places), np.frombuffer(texts.data, dtype=np.uint8)
        if not len(picked) or not is_utf8(texts.data) or not _whole_objects(picked, octets).all():
            return None
        if any(True for _ in _too_much_for_jackson(picked, octets)):
            return None
        start, end = int(picked.starts[0]), int(picked.ends[-1])
        batch = self._flat.read(memoryview(texts.data)[start:end])
        # None of them has no line, so as many lines as texts means one line in each.
        return _Piece(batch, places) if batch and batch.num_rows == len(places) else None

    # --- by Arrow

    def _fast(self, texts: Texts, places: _Places) -> Iterator[_Piece]:
        """What Arrow reads of these texts, which are at these places; some may be left out."""
        try:
            start, end = int(texts.starts[0]), int(texts.ends[-1])
            table = self._read_json(pa.py_buffer(texts.data).slice(start, end - start))
            if table.num_rows == len(texts):
                yield self._converted(table, places)
                return
        except pa.ArrowException:
            pass
        if len(texts) <= _FEW_TEXTS:
            return
        middle = len(texts) // 2
        for half in (slice(None, middle), slice(middle, None)):
            yield from self._fast(texts.picked(half), places[half])

    def _read_json(self, block: pa.Buffer) -> pa.Table:
        return pa_json.read_json(
            pa.BufferReader(block),
            # One block, or a parallel reader would cut it again, and not at the same places.
            pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1),
            pa_json.ParseOptions(explicit_schema=self._written, unexpected_field_behavior="ignore"),
        )

    def _converted(self, table: pa.Table, places: _Places) -> _Piece:
        columns, unsure = [], np.zeros(len(places), dtype=np.bool_)
        for column, field in zip(table.columns, self._schema, strict=True):
            array, doubts = self._convert(_one_array(column), field.type)
            columns.append(array)
            if doubts is not None:
                unsure |= doubts
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        if unsure.any():
            kept = np.flatnonzero(~unsure)
            return _Piece(batch.take(pa.array(kept)), places[kept])
        return _Piece(batch, places)

    def _convert(self, array: pa.Array, type_: pa.DataType) -> tuple[pa.Array, _Mask | None]:
        """The array as this type, and where it may not be what Spark makes of it."""
        types = pa.types
        if types.is_floating(type_):
            return array, _odd_floats(array)
        if types.is_decimal(type_):
            return array, _too_large_decimals(array)
        if types.is_date(type_):
            return _cast_or_null(array, type_)
        if types.is_timestamp(type_):
            return self._times.timestamps(array, type_)
        if types.is_binary(type_):
            return _from_base64(array)
        if types.is_list(type_):
            return self._lists(array, type_)
        if types.is_struct(type_):
            return self._structs(array, type_)
        return array, None

    def _lists(self, array: pa.Array, type_: pa.DataType) -> tuple[pa.Array, _Mask | None]:
        before, offsets = array.values, array.offsets
        values, doubts = self._convert(before, type_.value_type)
        if values is not before:
            mask = array.is_null() if array.null_count else None
            array = pa.ListArray.from_arrays(offsets, values, type=type_, mask=mask)
        if doubts is None or not doubts.any():
            return array, None
        rows = np.searchsorted(offsets.to_numpy(), np.flatnonzero(doubts), side="right") - 1
        unsure = np.zeros(len(array), dtype=np.bool_)
        unsure[rows] = True
        return array, unsure

    def _structs(self, array: pa.Array, type_: pa.DataType) -> tuple[pa.Array, _Mask | None]:
        before = [array.field(at) for at in range(type_.num_fields)]
        pairs = [self._convert(old, field.type) for old, field in zip(before, type_, strict=True)]
        doubts: _Mask | None = None
        for _, more in pairs:
            doubts = _or(doubts, more) if more is not None else doubts
        if any(new is not old for (new, _), old in zip(pairs, before, strict=True)):
            mask = array.is_null() if array.null_count else None
            array = pa.StructArray.from_arrays(
                [new for new, _ in pairs], fields=list(type_), mask=mask
            )
        return array, doubts

    # --- one by one

    def _slow(self, texts: Texts, places: _Places) -> tuple[_Piece, dict[int, str]]:
        """The rows of these texts; which of all rows at these places are malformed, and why."""
        read: list[TextRows] = [self._rows.read(texts[place]) for place in places.tolist()]
        rows = [row for each in read for row in each.rows]
        columns = [
            pa.array([row[at] for row in rows], field.type) for at, field in enumerate(self._schema)
        ]
        repeats = [len(each.rows) for each in read]
        of_rows = np.repeat(places, repeats)
        malformed = {
            place: each.why_malformed
            for place, each in zip(places.tolist(), read, strict=True)
            if each.why_malformed is not None
        }
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        return _Piece(batch, of_rows), malformed


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows, and the places of the texts that they are of."""

    batch: pa.RecordBatch
    places: _Places


def _merged(pieces: Sequence[_Piece], why: Mapping[int, str], schema: pa.Schema) -> Parsed:
    if not pieces:
        return Parsed(pa.RecordBatch.from_pylist([], schema), np.empty(0, np.int64), {})
    if len(pieces) == 1:
        batch, places = pieces[0].batch, pieces[0].places
    else:
        places = np.concatenate([piece.places for piece in pieces])
        order = np.argsort(places, kind="stable")
        table = pa.Table.from_batches([piece.batch for piece in pieces], schema)
        batch = table.take(pa.array(order)).combine_chunks().to_batches()[0]
        places = places[order]
    malformed = {}
    if why:
        rows = np.flatnonzero(np.isin(places, list(why)))
        malformed = {int(row): why[int(places[row])] for row in rows}
    return Parsed(batch, places, malformed)


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _or(one: _Mask | None, other: _Mask | None) -> _Mask | None:
    if one is None or other is None:
        return other if one is None else one
    return one | other


# --- which texts Arrow may see


def _sure_runs(texts: Texts, places: _Places) -> list[_Places]:
    """The places of texts that Arrow either refuses or reads as Jackson does, where they are
    neighbours: between them is nothing but blanks. Of texts at these places, none of them empty."""
    picked = texts.picked(places)
    octets = np.frombuffer(texts.data, dtype=np.uint8)
    sure = _whole_objects(picked, octets)
    for at in _places_of_doubt(texts.data, octets):
        sure[picked.text_around(at)] = False
    for text in _too_much_for_jackson(picked, octets):
        sure[text] = False
    if sure.all():
        return [places] if len(places) else []
    cuts = np.flatnonzero(np.diff(sure.astype(np.int8))) + 1
    runs = np.split(places, cuts)
    return [run for run, first in zip(runs, np.split(sure, cuts), strict=True) if first[0]]


def _whole_objects(texts: Texts, octets: npt.NDArray[np.uint8]) -> _Mask:
    """As far as the first and the last byte tell."""
    whole: _Mask = (octets[texts.starts] == ord("{")) & (octets[texts.ends - 1] == ord("}"))
    return whole


def _too_much_for_jackson(texts: Texts, octets: npt.NDArray[np.uint8]) -> Iterator[int]:
    """Texts that may be nested too deeply, or have too long a number."""
    lengths = texts.ends - texts.starts
    if lengths.max(initial=0) <= DEPTH_MAX:
        return
    for at in _long_numbers(texts.data, octets):
        yield texts.text_around(at)
    for text in np.flatnonzero(lengths > 2 * DEPTH_MAX).tolist():
        if texts[text].count(b"{") + texts[text].count(b"[") > DEPTH_MAX:
            yield text


def _places_of_doubt(data: bytes | memoryview, octets: npt.NDArray[np.uint8]) -> Iterator[int]:
    """Bytes that are not UTF-8, and what may be a number that is none."""
    if not is_utf8(data):
        data, at = bytes(data), 0
        while at < len(data):
            try:
                data[at:].decode()
                break
            except UnicodeDecodeError as error:
                yield at + error.start
                line_end = data.find(b"\n", at + error.start)
                at = line_end if line_end >= 0 else len(data)
    is_capital = (octets[:-1] == ord("N")) | (octets[:-1] == ord("I"))
    if not is_capital.any():
        return
    # To look for the words themselves was measured to take five times as long.
    following = octets[np.flatnonzero(is_capital) + 1]
    if ((following == ord("a")) | (following == ord("n"))).any():
        for match in _NON_NUMBER.finditer(data):
            yield match.end() - 1


def is_utf8(data: bytes | memoryview) -> bool:
    """Whether all of it is valid."""
    offsets = pa.py_buffer(np.array([0, len(data)], dtype=np.int64))
    array = pa.Array.from_buffers(pa.large_string(), 1, [None, offsets, pa.py_buffer(data)])
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _long_numbers(data: bytes | memoryview, octets: npt.NDArray[np.uint8]) -> Iterator[int]:
    """Where numbers are that are too long for Jackson: every few hundred bytes there is a digit."""
    stride = NUMBER_CHARACTERS_MAX // 4
    digits = _IS_DIGIT[octets[::stride]]
    if len(digits) > 2 and (digits[:-2] & digits[1:-1] & digits[2:]).any():
        for match in _LONG_NUMBER.finditer(data):
            yield match.start()


# --- types


def _as_written(type_: pa.DataType) -> pa.DataType:
    """Dates, times and bytes are strings in JSON; Arrow's reader has ideas of its own of them."""
    types = pa.types
    if types.is_temporal(type_) or types.is_binary(type_):
        return pa.string()
    if types.is_list(type_):
        return pa.list_(type_.value_field.with_type(_as_written(type_.value_type)))
    if types.is_struct(type_):
        return pa.struct([field.with_type(_as_written(field.type)) for field in type_])
    return type_


def _has_map(type_: pa.DataType) -> bool:
    if pa.types.is_list(type_):
        return _has_map(type_.value_type)
    if pa.types.is_struct(type_):
        return any(_has_map(field.type) for field in type_)
    return bool(pa.types.is_map(type_))


# --- values


def _odd_floats(array: pa.Array) -> _Mask | None:
    """Where a number was too large for its type, or is a zero with a sign."""
    values = np.frombuffer(array.buffers()[1], dtype=array.type.to_pandas_dtype())
    values = values[array.offset : array.offset + len(array)]
    odd: _Mask = ~np.isfinite(values)
    zeros = values == 0
    if zeros.any():
        odd |= zeros & np.signbit(values)
    return odd if odd.any() else None


def _too_large_decimals(array: pa.Array) -> _Mask | None:
    """Where a number has more digits than its type, which Arrow's reader lets pass."""
    type_ = array.type
    largest = pa.scalar(Decimal((0, (9,) * type_.precision, -type_.scale)), type_)
    is_too_large = pc.greater(pc.abs(array), largest)
    if not pc.any(is_too_large, min_count=0).as_py():
        return None
    mask: _Mask = pc.fill_null(is_too_large, False).to_numpy(zero_copy_only=False)
    return mask


def _only(array: pa.Array, wanted: _Mask) -> pa.Array:
    if wanted.all():
        return array
    return pc.if_else(pa.array(wanted), array, pa.scalar(None, array.type))


def _cast_or_null(array: pa.Array, type_: pa.DataType) -> tuple[pa.Array, _Mask | None]:
    """The cast, null where there is none; and where that is."""
    try:
        return array.cast(type_), None
    except pa.ArrowInvalid:
        if len(array) == 1:
            return pa.nulls(1, type_), np.ones(1, dtype=np.bool_)
    middle = len(array) // 2
    halves = [_cast_or_null(half, type_) for half in (array[:middle], array[middle:])]
    doubts = [
        np.zeros(len(made), dtype=np.bool_) if unsure is None else unsure for made, unsure in halves
    ]
    return pa.concat_arrays([made for made, _ in halves]), np.concatenate(doubts)


def _times_of_known_form(array: pa.Array) -> tuple[_Mask, _Mask]:
    """Which are dates, or times with their seconds; and which of them say their zone.

    As far as a few bytes tell: what else may be wrong with them the cast finds. Nulls are plain.
    """
    offsets = np.frombuffer(array.buffers()[1], dtype=np.int32)
    offsets = offsets[array.offset : array.offset + len(array) + 1]
    starts, lengths = offsets[:-1], np.diff(offsets)
    is_null = array.is_null().to_numpy(zero_copy_only=False)
    text = array.buffers()[2]
    if text is None or not len(text):
        return is_null, np.zeros(len(array), dtype=np.bool_)
    octets = np.frombuffer(text, dtype=np.uint8)

    def byte(back_or_forth: npt.NDArray[np.int32] | int) -> npt.NDArray[np.uint8]:
        return octets.take(starts + back_or_forth, mode="clip")

    has_seconds = (lengths >= 19) & (byte(13) == ord(":")) & (byte(16) == ord(":"))
    is_plain = has_seconds | (lengths == 10) | is_null
    ends_in_z = has_seconds & (byte(lengths - 1) == ord("Z"))
    sign = byte(lengths - 6)
    has_offset = has_seconds & (lengths >= 25) & ((sign == ord("+")) | (sign == ord("-")))
    # Java's offsets end at 18 hours.
    is_far = (byte(lengths - 5) > ord("1")) | (
        (byte(lengths - 5) == ord("1")) & (byte(lengths - 4) > ord("7"))
    )
    return is_plain & ~(has_offset & is_far), ends_in_z | has_offset


_BASE64 = np.full(256, 255, dtype=np.uint8)
_BASE64[
    np.frombuffer(
        b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", dtype=np.uint8
    )
] = np.arange(64, dtype=np.uint8)


def _from_base64(array: pa.Array) -> tuple[pa.Array, _Mask | None]:
    """The bytes that the strings are the Base64 of, all at once."""
    padding = [
        pc.fill_null(pc.ends_with(array, pattern=tail), False).to_numpy(zero_copy_only=False)
        for tail in ("=", "==")
    ]
    tails = padding[0].astype(np.int64) + padding[1]
    _, offsets, text = array.buffers()
    starts = np.frombuffer(offsets, dtype=np.int32)[array.offset : array.offset + len(array) + 1]
    octets = np.frombuffer(text or b"", dtype=np.uint8)[starts[0] : starts[-1]]
    digits = _BASE64[octets]
    is_bad = digits == 255
    ends = starts[1:] - starts[0]
    for tail in (1, 2):
        is_bad[(ends - tail)[tails >= tail]] = False
    lengths = np.diff(starts)
    unsure = lengths % 4 != 0
    unsure[np.searchsorted(ends, np.flatnonzero(is_bad), side="right")] = True
    if unsure.any():
        made, _ = _from_base64(pc.if_else(pa.array(unsure), "", array))
        return made, unsure
    quads = np.where(digits == 255, 0, digits).reshape(-1, 4).astype(np.uint32)
    words = quads[:, 0] << 18 | quads[:, 1] << 12 | quads[:, 2] << 6 | quads[:, 3]
    octets = np.stack([words >> 16, words >> 8, words], axis=1).astype(np.uint8).reshape(-1)
    is_kept = np.ones(len(octets), dtype=np.bool_)
    ends = ends // 4 * 3
    for tail in (1, 2):
        is_kept[(ends - tail)[tails >= tail]] = False
    made_offsets = np.concatenate(([0], np.cumsum(lengths // 4 * 3 - tails))).astype(np.int32)
    validity = array.is_valid().buffers()[1] if array.null_count else None
    buffers = [validity, pa.py_buffer(made_offsets), pa.py_buffer(octets[is_kept])]
    return pa.Array.from_buffers(pa.binary(), len(array), buffers), None
