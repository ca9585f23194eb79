"""Files of CSV as a source, one record in each line, as Spark reads them.

Lines without a quote, and lines whose quoted fields hold neither quotes nor escapes, are cut by
Arrow's reader; `csv_tokens` cuts the others, one by one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from stillframe.api.sources import BlockingReader, SourceContext, Split
from stillframe.config import parse_flag
from stillframe.connectors.csv_tokens import Field, Signs, fields_of
from stillframe.connectors.csv_values import CsvRules, ValueReader
from stillframe.connectors.files import Following
from stillframe.connectors.lines import (
    LineFileSource,
    LineReader,
    decoded,
    given_of,
    mode_of,
    utf8_of,
)
from stillframe.errors import BuildError, NotHonoured
from stillframe.json_texts.columns import Texts
from stillframe.json_texts.records import Malformed, nullable, refuse_without_zone

_SPARKS_RULES = CsvRules()
_COLUMNS_IN_PATTERN_MAX = 500
_Places = npt.NDArray[np.int64]


@dataclass(frozen=True, init=False)
class CsvSource(LineFileSource):
    """Files of CSV; columns are matched by their place, as in Spark with `enforceSchema`."""

    rules: CsvRules

    def __init__(
        self,
        paths: str | Sequence[str],
        schema: pa.Schema,
        following: Following | None = None,
        rules: CsvRules = _SPARKS_RULES,
    ) -> None:
        super().__init__(paths, nullable(schema), following)
        object.__setattr__(self, "rules", rules)

    def check(self) -> None:
        for field in self.schema:
            refuse_no_text(field, "read from CSV")
        refuse_without_zone(self.schema, self.rules.corrupt_column, self.rules.zone)
        super().check()

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return _CsvReader(self, splits)

    def describe(self) -> str:
        return self._described("csv")


def refuse_no_text(field: pa.Field, what: str) -> None:
    """Raise BuildError for a column that has no text in Spark's CSV either."""
    types, kind = pa.types, field.type
    is_fine = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
    is_fine |= types.is_decimal(kind) or types.is_date(kind) or types.is_timestamp(kind)
    if not (is_fine or types.is_string(kind)):
        raise BuildError(
            f"[UNSUPPORTED_DATA_TYPE_FOR_DATASOURCE] column {field.name} is {kind}, which is not"
            f" {what}: make it a string, or a column for each part"
        )


class _CsvReader(LineReader):
    def __init__(self, source: CsvSource, splits: Sequence[Split]) -> None:
        super().__init__(source, splits)
        rules = source.rules
        self._rules = rules
        self._corrupt_at = source.schema.get_field_index(rules.corrupt_column)
        names = {name for split in splits for name in partition_names(split)}
        self._data = pa.schema(
            [
                each
                for at, each in enumerate(source.schema)
                if at != self._corrupt_at and each.name not in names
            ]
        )
        self._values = ValueReader(rules)
        self._cutter = _Cutter(len(self._data), rules)

    def _parsed(self, path: str, offset: int, block: bytes) -> pa.RecordBatch | None:
        data = decoded(block, is_first=offset == 0)
        texts = Texts.lines(data)
        places = _with_records(texts, self._rules.comment)
        if self._rules.has_header and self._is_beginning:
            if not len(places):
                return None
            places = places[1:]
        return self._records(path, offset, texts.picked(places))

    def _records(self, path: str, offset: int, texts: Texts) -> pa.RecordBatch:
        cut = self._cutter.cut(texts)
        malformed = cut.has_other_count
        columns: dict[str, pa.Array] = {}
        for name, kind, column in zip(self._data.names, self._data.types, cut.columns, strict=True):
            values, unfit = self._values.read(column, kind)
            columns[name] = values
            if unfit is not None:
                malformed = malformed | unfit
        bad = np.flatnonzero(malformed)
        if len(bad) and self._rules.mode == "FAILFAST":
            raise self._refused(path, offset, texts, Malformed(int(bad[0]), "a field of it"))
        self._records_malformed += len(bad)
        if self._corrupt_at >= 0:
            columns[self._rules.corrupt_column] = _corrupt_records(texts, bad)
        batch = pa.RecordBatch.from_arrays(
            [
                columns[each.name] if each.name in columns else pa.nulls(len(texts), each.type)
                for each in self._schema
            ],
            schema=self._schema,
        )
        if len(bad) and self._rules.mode == "DROPMALFORMED":
            return batch.filter(pa.array(~malformed))
        return batch


def partition_names(split: Split) -> Sequence[str]:
    found = split.position.get("partitions", {})
    assert isinstance(found, Mapping)
    return list(found)


def _with_records(texts: Texts, comment: str | None) -> _Places:
    """Where lines are that are neither blank nor comments."""
    places = np.flatnonzero(texts.ends > texts.starts)
    octets = np.frombuffer(texts.data, dtype=np.uint8)
    first = octets[texts.starts[places]]
    odd = first <= ord(" ")
    if comment is not None:
        odd |= first == comment.encode()[0]
    keep = np.ones(len(places), dtype=np.bool_)
    for at in np.flatnonzero(odd):
        line = texts[places[at]]
        is_comment = comment is not None and line.startswith(comment.encode())
        keep[at] = not is_comment and bool(line.strip(bytes(range(33))))
    return places[keep]


def _corrupt_records(texts: Texts, bad: _Places) -> pa.Array:
    if not len(bad):
        return pa.nulls(len(texts), pa.string())
    shown = {int(at): texts[at].decode("utf-8", "replace") for at in bad}
    return pa.array([shown.get(at) for at in range(len(texts))], pa.string())


# --- cutting ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cut:
    columns: Sequence[pa.Array]
    """As strings; null where there is no value."""
    has_other_count: npt.NDArray[np.bool_]
    """Which lines have more or fewer fields than were declared."""


class _Cutter:
    def __init__(self, width: int, rules: CsvRules) -> None:
        self._width = width
        self._rules = rules
        self._names = [str(at) for at in range(width)]
        separator, quote, escape = (
            re.escape(each)
            for each in (rules.signs.separator, rules.signs.quote, rules.signs.escape)
        )
        self._has_quotes = rules.signs.quote != "\0"
        field = f"(?:{quote}[^{quote}{escape}]*{quote}|[^{quote}{separator}][^{separator}]*|)"
        self._plain = f"^{field}(?:{separator}{field}){{{width - 1}}}$"

    def cut(self, texts: Texts) -> _Cut:
        sure = self._sure(texts)
        if len(texts) and sure.all():
            return _Cut(self._by_arrow(texts), np.zeros(len(texts), dtype=np.bool_))
        rows: list[pa.Array] = []
        by_arrow, others = np.flatnonzero(sure), np.flatnonzero(~sure)
        other_count = np.zeros(len(texts), dtype=np.bool_)
        slow: list[list[str | None]] = [[] for _ in range(self._width)]
        for place in map(int, others):
            fields = self._fields(texts[place].decode())
            other_count[place] = len(fields) != self._width
            for at, column in enumerate(slow):
                column.append(fields[at] if at < len(fields) else None)
        order = pa.array(np.argsort(np.concatenate((by_arrow, others)), kind="stable"))
        fast = self._by_arrow(texts.picked(by_arrow)) if len(by_arrow) else None
        for at in range(self._width):
            parts = [pa.array(slow[at], pa.string())]
            if fast is not None:
                parts.insert(0, fast[at])
            rows.append(pa.concat_arrays(parts).take(order))
        return _Cut(rows, other_count)

    def _sure(self, texts: Texts) -> npt.NDArray[np.bool_]:
        """Which lines Arrow's reader cuts as Spark's does."""
        octets = np.frombuffer(texts.data, dtype=np.uint8)
        separators = _count(texts, octets, self._rules.signs.separator)
        sure: npt.NDArray[np.bool_] = separators == self._width - 1
        sure &= _count(texts, octets, "\0") == 0
        if not self._has_quotes:
            return sure
        has_quote = _count(texts, octets, self._rules.signs.quote) > 0
        if has_quote.any():
            trims = self._rules.trims_left or self._rules.trims_right
            sure[has_quote] = False
            if not trims and self._width <= _COLUMNS_IN_PATTERN_MAX:
                found = [texts[int(at)] for at in np.flatnonzero(has_quote)]
                lines = pa.array(found, pa.binary()).cast(pa.string())
                matched = pc.match_substring_regex(lines, self._plain)
                sure[has_quote] = matched.to_numpy(zero_copy_only=False)
        return sure

    def _by_arrow(self, texts: Texts) -> list[pa.Array]:
        rules = self._rules
        data = _joined(texts)
        table = pa_csv.read_csv(
            pa.BufferReader(data),
            pa_csv.ReadOptions(
                column_names=self._names, use_threads=False, block_size=len(data) + 1
            ),
            pa_csv.ParseOptions(
                delimiter=rules.signs.separator,
                quote_char=rules.signs.quote if self._has_quotes else False,
                double_quote=False,
            ),
            pa_csv.ConvertOptions(
                column_types=dict.fromkeys(self._names, pa.string()),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                check_utf8=False,
            ),
        )
        return [self._valued(_one_array(column)) for column in table.columns]

    def _valued(self, column: pa.Array) -> pa.Array:
        rules = self._rules
        if rules.trims_left or rules.trims_right:
            # Of lines without quotes: an empty field is a missing one.
            trim = (
                pc.utf8_trim
                if rules.trims_left and rules.trims_right
                else (pc.utf8_ltrim if rules.trims_left else pc.utf8_rtrim)
            )
            column = trim(column, characters="".join(map(chr, range(1, 33))))
            column = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
        elif rules.empty_value:
            column = pc.if_else(pc.equal(column, ""), rules.empty_value, column)
        return pc.if_else(pc.equal(column, rules.null_value), pa.scalar(None, pa.string()), column)

    def _fields(self, line: str) -> list[str | None]:
        rules = self._rules
        cut = fields_of(
            line, rules.signs, trims_left=rules.trims_left, trims_right=rules.trims_right
        )
        found = [
            (each or rules.empty_value) if isinstance(each, Field) else each or None for each in cut
        ]
        return [None if each == rules.null_value else each for each in found]


def _count(texts: Texts, octets: npt.NDArray[np.uint8], sign: str) -> _Places:
    at = np.flatnonzero(octets == sign.encode()[0])
    return np.searchsorted(at, texts.ends) - np.searchsorted(at, texts.starts)


def _joined(texts: Texts) -> pa.Buffer:
    """The lines one behind the other; as they stand, if nothing but their ends is between them."""
    if (texts.starts[1:] - texts.ends[:-1] <= 2).all():
        first, last = int(texts.starts[0]), int(texts.ends[-1])
        return pa.py_buffer(texts.data).slice(first, last - first)
    return pa.py_buffer(b"\n".join([texts[at] for at in range(len(texts))]))


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


# --- options ---------------------------------------------------------------------------------

_PATTERN = "read the column as a string and convert it with an expression"
_INFERENCE = "it is about schemas that Spark infers, and yours is given: leave it out"
_LIMIT = "there is no such limit here: leave it out"
_REFUSED: Mapping[str, str] = {
    "dateFormat": _PATTERN,
    "timestampFormat": _PATTERN,
    "timestampNTZFormat": _PATTERN,
    "enableDateTimeParsingFallback": _PATTERN,
    "locale": _PATTERN,
    "inferSchema": _INFERENCE,
    "preferDate": _INFERENCE,
    "samplingRatio": _INFERENCE,
    "enforceSchema": "columns are matched by their place: leave it out",
    "multiLine": "a record is a line: write records without line breaks, or read it with Spark",
    "charToEscapeQuoteEscaping": "the escape character escapes itself: leave it out",
    "unescapedQuoteHandling": "it is STOP_AT_DELIMITER, as usual in Spark: leave it out",
    "maxColumns": _LIMIT,
    "maxCharsPerColumn": _LIMIT,
    "inputBufferSize": _LIMIT,
    "compression": "compressed files are not read here: decompress them",
}
CSV_OPTIONS = (
    *_REFUSED,
    *("header", "sep", "delimiter", "quote", "escape", "comment", "nullValue", "emptyValue"),
    *("nanValue", "positiveInf", "negativeInf", "mode", "columnNameOfCorruptRecord", "timeZone"),
    *("ignoreLeadingWhiteSpace", "ignoreTrailingWhiteSpace", "encoding", "charset", "lineSep"),
)


def csv_from_options(
    path: str, schema: pa.Schema, following: Following | None, options: Mapping[str, str]
) -> CsvSource:
    """What `readStream.format("csv").option(…)` asks for."""
    given = given_of(options, CSV_OPTIONS)
    for name in given:
        if name in _REFUSED:
            raise NotHonoured(f"the source csv does not take the option {name}: {_REFUSED[name]}")
    utf8_of(given)
    usual = CsvRules()
    not_finite = {
        given.get("nanValue", "NaN"): float("nan"),
        given.get("positiveInf", "Inf"): float("inf"),
        given.get("negativeInf", "-Inf"): float("-inf"),
    }
    rules = CsvRules(
        signs=signs_of(given),
        has_header=_flag(given, "header"),
        comment=_sign(given, "comment", None),
        null_value=given.get("nullValue", usual.null_value),
        empty_value=given.get("emptyValue", usual.empty_value),
        trims_left=_flag(given, "ignoreLeadingWhiteSpace"),
        trims_right=_flag(given, "ignoreTrailingWhiteSpace"),
        not_finite=not_finite,
        zone=given.get("timeZone", usual.zone),
        mode=mode_of(given.get("mode", "PERMISSIVE")),
        corrupt_column=given.get("columnNameOfCorruptRecord", usual.corrupt_column),
    )
    return CsvSource(path, schema, following, rules)


def signs_of(given: Mapping[str, str]) -> Signs:
    separator = given.get("sep", given.get("delimiter", ","))
    separator = {"\\t": "\t"}.get(separator, separator)
    if len(separator.encode()) != 1:
        raise NotHonoured(
            f"option sep is {separator!r}, but one ASCII character is known here: choose one"
        )
    return Signs(
        separator, _sign(given, "quote", '"') or "\0", _sign(given, "escape", "\\") or "\0"
    )


def _sign(given: Mapping[str, str], name: str, usual: str | None) -> str | None:
    text = given.get(name, usual)
    if text is not None and len(text.encode()) > 1:
        raise BuildError(f"option {name} is {text!r}, but it is one ASCII character: give one")
    return text or None


def _flag(given: Mapping[str, str], name: str) -> bool:
    return parse_flag(name, given.get(name, "false"))
