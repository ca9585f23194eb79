"""Schemas written as DDL, `"app_id string, visits array<struct<at: timestamp, page: int>>"`.

Executors have no JVM to ask, and a `StatefulProcessor` declares its states there. What is read
here, and what it means, is what Spark's own parser reads; a test compares the two.
"""

from __future__ import annotations

import re
from typing import NoReturn

import pyarrow as pa

from stillframe.errors import BuildError

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<quoted>`(?:[^`]|``)*`)
      | (?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")
      | (?P<word>\w+)
      | (?P<sign>[<>(),:])
    )""",
    re.VERBOSE,
)

_SIMPLE_TYPES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "char": pa.string(),
    "character": pa.string(),
    "varchar": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ltz": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.null(),
}
_WITH_LENGTH = ("char", "character", "varchar")
_DECIMALS = ("decimal", "dec", "numeric")
_INTERVAL_UNITS = ("day", "hour", "minute", "second")


def schema_of_ddl(text: str) -> pa.Schema:
    """The columns that the text declares."""
    reader = _Reader(text)
    fields = reader.fields(end=None)
    repeated = {field.name for field in fields if [f.name for f in fields].count(field.name) > 1}
    if repeated:
        raise BuildError(
            f"the schema {text!r} has two columns named {sorted(repeated)[0]}: rename one"
        )
    return pa.schema(fields)


class _Reader:
    """The text, token by token; words are compared without regard to case."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        place = 0
        while text[place:].strip():
            match = _TOKEN.match(text, place)
            if match is None:
                self._refuse(f"{text[place:].strip()[:20]!r} is not understood")
            assert match.lastgroup is not None
            self._tokens.append((match.lastgroup, match[match.lastgroup]))
            place = match.end()
        self._at = 0

    def fields(self, end: str | None) -> list[pa.Field]:
        """Columns, up to the sign that ends them; None: up to the end of the text."""
        made: list[pa.Field] = []
        while True:
            if end is not None and not made and self._took(end):
                return made
            made.append(self._field(may_have_colon=end is not None))
            if self._took(","):
                continue
            if end is None and self._at == len(self._tokens):
                return made
            if end is not None and self._took(end):
                return made
            self._refuse(f"a comma or the end is missing before {self._seen()}")

    def _field(self, may_have_colon: bool) -> pa.Field:
        name = self._name()
        if may_have_colon:
            self._took(":")
        type_ = self._type()
        nullable = True
        if self._took("not"):
            if not self._took("null"):
                self._refuse("NOT stands without NULL")
            nullable = False
        if self._took("comment"):
            if self._kind() != "text":
                self._refuse(f"COMMENT needs a text in quotes, not {self._seen()}")
            self._at += 1
        return pa.field(name, type_, nullable or pa.types.is_null(type_))

    def _name(self) -> str:
        kind, seen = self._kind(), self._seen()
        if kind == "quoted":
            self._at += 1
            return seen[1:-1].replace("``", "`")
        if kind != "word":
            self._refuse(f"a column name is missing before {seen}")
        self._at += 1
        return seen

    def _type(self) -> pa.DataType:
        if self._kind() != "word":
            self._refuse(f"a type is missing before {self._seen()}")
        word = self._seen().lower()
        self._at += 1
        match word:
            case "array":
                self._need("<")
                element = self._type()
                self._need(">")
                return pa.list_(pa.field("element", element))
            case "map":
                self._need("<")
                key = self._type()
                self._need(",")
                value = self._type()
                self._need(">")
                return pa.map_(key, pa.field("value", value))
            case "struct":
                self._need("<")
                return pa.struct(self.fields(end=">"))
            case "interval":
                return self._interval()
        return self._simple(word)

    def _simple(self, word: str) -> pa.DataType:
        if word in _DECIMALS:
            numbers = self._numbers()
            if len(numbers) > 2:
                self._refuse(f"{word} takes a precision and a scale, not {len(numbers)} numbers")
            precision, scale = (*numbers, *(10, 0)[len(numbers) :])
            return pa.decimal128(precision, scale)
        if word not in _SIMPLE_TYPES:
            self._refuse(f"Unsupported data type {word.upper()!r}")
        if word in _WITH_LENGTH and len(self._numbers()) != 1:
            self._refuse(f"{word} needs a length, such as {word}(10)")
        return _SIMPLE_TYPES[word]

    def _interval(self) -> pa.DataType:
        """Of days and seconds: those of months have no fixed length, and no column here."""
        if not any(self._took(unit) for unit in _INTERVAL_UNITS):
            self._refuse(f"an interval is of day, hour, minute or second, not of {self._seen()}")
        if self._took("to") and not any(self._took(unit) for unit in _INTERVAL_UNITS):
            self._refuse(f"an interval is to hour, minute or second, not to {self._seen()}")
        return pa.duration("us")

    def _numbers(self) -> list[int]:
        if not self._took("("):
            return []
        made: list[int] = []
        while True:
            if not self._seen().isdigit():
                self._refuse(f"a number is missing before {self._seen()}")
            made.append(int(self._seen()))
            self._at += 1
            if self._took(")"):
                return made
            self._need(",")

    # --- tokens

    def _kind(self) -> str | None:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else None

    def _seen(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else "the end"

    def _took(self, wanted: str) -> bool:
        is_there = self._kind() in ("word", "sign") and self._seen().lower() == wanted
        self._at += is_there
        return is_there

    def _need(self, sign: str) -> None:
        if not self._took(sign):
            self._refuse(f"{sign!r} is missing before {self._seen()}")

    def _refuse(self, why: str) -> NoReturn:
        raise BuildError(
            f"the schema {self._text!r} cannot be read ({why}): write it as"
            ' "app_id string, visits array<int>", or give a StructType'
        )
