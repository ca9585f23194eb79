"""Texts as records of a schema, with Spark's three modes for those that are malformed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stillframe.errors import BuildError
from stillframe.json_texts.columns import ColumnReader, Parsed, Texts
from stillframe.json_texts.rules import JsonRules
from stillframe.zones import NoZone, zone_of


class Malformed(Exception):
    """A text is malformed, and the mode is FAILFAST."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place = place
        """Which of the texts it is."""
        self.why = why


@dataclass(frozen=True, slots=True)
class Records:
    batch: pa.RecordBatch
    malformed: int
    """How many are malformed, or were and are dropped."""
    text_of_row: npt.NDArray[np.int64]
    """Which of the texts each row is of."""


class RecordReader:
    """Reads texts as records of one schema."""

    def __init__(self, schema: pa.Schema, rules: JsonRules) -> None:
        self._schema = schema
        self._rules = rules
        self._corrupt_at = schema.get_field_index(rules.corrupt_column)
        data = schema if self._corrupt_at < 0 else schema.remove(self._corrupt_at)
        self._columns = ColumnReader(data, rules)

    def read(self, texts: Texts) -> Records:
        parsed = self._columns.read(texts)
        bad = parsed.malformed
        if bad and self._rules.mode == "FAILFAST":
            row = min(bad)
            raise Malformed(int(parsed.text_of_row[row]), bad[row])
        batch, text_of_row = self._with_corrupt_column(texts, parsed), parsed.text_of_row
        if bad and self._rules.mode == "DROPMALFORMED":
            kept = np.setdiff1d(np.arange(batch.num_rows), list(bad))
            batch, text_of_row = batch.take(pa.array(kept)), text_of_row[kept]
        return Records(batch, len(bad), text_of_row)

    def _with_corrupt_column(self, texts: Texts, parsed: Parsed) -> pa.RecordBatch:
        if self._corrupt_at < 0:
            return parsed.batch
        corrupt = pa.nulls(parsed.batch.num_rows, pa.string())
        if parsed.malformed:
            # A column of strings has nothing in it that is not UTF-8; Spark's has the bytes.
            seen = {row: texts[parsed.text_of_row[row]] for row in parsed.malformed}
            shown = {row: text.decode("utf-8", "replace") for row, text in seen.items()}
            corrupt = pa.array([shown.get(row) for row in range(len(corrupt))], pa.string())
        columns = parsed.batch.columns
        columns.insert(self._corrupt_at, corrupt)
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def columns_to_read(schema: pa.Schema, rules: JsonRules, wanted: Collection[str]) -> pa.Schema:
    """What has to be read of the texts by somebody who looks at these columns only. Where a
    malformed value is null and nothing else it is those, and one for how many rows there are."""
    if rules.mode != "PERMISSIVE" or rules.corrupt_column in schema.names:
        return schema
    return pa.schema([each for each in schema if each.name in wanted] or [schema.field(0)])


def refuse_unreadable(schema: pa.Schema, rules: JsonRules) -> None:
    """Raise BuildError for columns and rules that no text could be read with."""
    for field in schema:
        _refuse_unreadable_type(field.name, field.type)
    refuse_without_zone(schema, rules.corrupt_column, rules.zone)


def refuse_without_zone(schema: pa.Schema, corrupt_column: str, zone: str) -> None:
    """Raise BuildError for a zone that is none, and for corrupt records that are no strings."""
    corrupt_at = schema.get_field_index(corrupt_column)
    if corrupt_at >= 0 and not pa.types.is_string(schema.field(corrupt_at).type):
        raise BuildError(
            f"column {corrupt_column} is {schema.field(corrupt_at).type}, but it gets the"
            " text of malformed records: declare it as a string, or name another column with"
            " columnNameOfCorruptRecord"
        )
    try:
        zone_of(zone)
    except NoZone:
        raise BuildError(
            f"{zone!r} is no time zone: set timeZone, or spark.sql.session.timeZone, to one"
            " such as 'Europe/Berlin' or '+02:00'"
        ) from None


def _refuse_unreadable_type(name: str, type_: pa.DataType) -> None:
    if pa.types.is_duration(type_):
        raise BuildError(
            f"column {name} is an interval, which is not read from JSON: declare it as a string"
            " and cast it"
        )
    if pa.types.is_map(type_):
        if not pa.types.is_string(type_.key_type):
            raise BuildError(
                f"column {name} is a map with keys of {type_.key_type}, and JSON has only strings"
                " there: declare the keys as strings"
            )
        _refuse_unreadable_type(name, type_.item_type)
    elif pa.types.is_list(type_):
        _refuse_unreadable_type(name, type_.value_type)
    elif pa.types.is_struct(type_):
        for field in type_:
            _refuse_unreadable_type(f"{name}.{field.name}", field.type)


def nullable(schema: pa.Schema) -> pa.Schema:
    """The same columns, each of which may be null: what a file has nobody can declare."""
    return pa.schema([_nullable(field) for field in schema])


def _nullable(field: pa.Field) -> pa.Field:
    type_ = field.type
    if pa.types.is_struct(type_):
        type_ = pa.struct([_nullable(inner) for inner in type_])
    elif pa.types.is_list(type_):
        type_ = pa.list_(_nullable(type_.value_field))
    elif pa.types.is_map(type_):
        type_ = pa.map_(type_.key_type, _nullable(type_.item_field))
    return pa.field(field.name, type_, True, field.metadata)
