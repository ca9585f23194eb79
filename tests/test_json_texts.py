"""JSON as columns: the quick way and the exact way agree, whatever the texts are."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stillframe.api.ddl import schema_of_ddl
from stillframe.json_texts import columns
from stillframe.json_texts.columns import ColumnReader, Parsed, Texts
from stillframe.json_texts.flat import FlatReader
from stillframe.json_texts.rows import RowReader
from stillframe.json_texts.rules import JsonRules

NUMBERS = [
    *(b"7", b"0", b"-0", b"-0.0", b"1e400", b"-1e400", b"1e-400", b"1.50", b"12.3455", b"-12.3455"),
    *(b"99999999999.5", b"1e2", b"1E+2", b'"1.5"', b'"1,5"', b'" 1"', b'"x"', b'""', b"null"),
    *(b"true", b"false", b"3.4028235677973366e38", b"1.00000017881393432617187499", b"16777217"),
    *(b"0.1", b"200", b"-129", b"32768", b"2147483648", b"9223372036854775808", b"NaN", b"Inf"),
    *(b"-9223372036854775808", b"-NaN", b"Infinity", b"-Infinity", b'"NaN"', b'"-INF"', b"[1]"),
    *(b"1" * 1001, b"{}", b"1.0", b"12345678.1234567890123", b"5e-324", b"1.7976931348623159e308"),
    *(b"123456789012345678901234567890",),
]
TIMES = [
    b'"%s"' % text
    for text in (
        *(b"2024-01-01T00:00:00", b"2024-01-01 00:00:00.123456", b"2024-01-01T00:00:00.1234567"),
        *(b"2024-01-01", b"2024-1-1", b"2024", b"2024-01-01T00:00:00Z", b"2024-01-01T00+02:00"),
        *(b"2024-01-01T00:00:00.5+02:00", b"2024-01-01T00:00:00+18:00", b"2024-01-01T00:00:60"),
        *(b"2024-01-01T00:00:00+18:01", b"2024-01-01T00:00:00+17:59", b"2024-01-01T00:00:00-23:00"),
        *(b"2024-01-01T00:00:00+02", b"2024-01-01T00:00:00.123+02", b"2024-01-01T00:00:00+0200"),
        *(
            b"2024-01-01T00:00+02:00",
            b"2024-01-01T00:00Z",
            b"2024-01-01T00:00",
            b"2024-03-10T02:30",
        ),
        *(b"2024-01-01T24:00:00", b"2024-02-30T00:00:00", b"2024-03-10T02:30:00", b"0000-01-01"),
        *(b"2024-11-03T01:30:00", b"1500-01-01T00:00:00", b"9999-12-31T23:59:59", b"2024-01-0a"),
        *(b"2024-01-01T00:00:00 ", b" 2024-01-01", b"2024-01-01T00:00:00z", b"2024/01/01", b""),
        *(b"2024-01-01T00:00:00.", b"2024-01-01T00:00:00.Z", b"1883-11-18T12:00:00", b"19000"),
        *(b"\xc3\xa9024-01-01", b"2024-01-01X00:00:00", b"2024-01-01T00:00:00,5", b"99999999"),
    )
] + [b"1700000000", b"null", b"1.5", b"true"]
BYTES = [
    *(b'"aGk="', b'"aGk"', b'"aGVsbG8="', b'""', b'"aA=="', b'"a==="', b'"===="', b'"aGk=aGk="'),
    *(b'"aG k"', b'"a\\u0047k="', b'"+/+/"', b'"-_-_"', b"null", b"1", b'"aGVsbG9v"'),
    b'"\xc3\xa9\xc3\xa9"',
]
STRINGS = [
    *(
        b'"x"',
        b"1",
        b"1.0",
        b'{"a": 1}',
        b"[1, 2]",
        b"true",
        b"null",
        b'"\\ud83d\\ude00"',
        b'"Inf"',
    ),
    *(b'"\\ud800"', b'"\xc3\xa9"', b'"\xe9"', b'"NaN, Inf"', b'": Inf"', b'"\\u0000"', b'"\\q"'),
    *(b"'x'", b'"\x7f"', b'"\t"', b'"/\\/"', b'""', b'"\xff"', b"NaN", b"-Infinity"),
]
VALUES = {
    **dict.fromkeys(("byte", "short", "int", "long", "float", "double", "boolean"), NUMBERS),
    **dict.fromkeys(("decimal(10,2)", "decimal(38,10)"), NUMBERS),
    **dict.fromkeys(("timestamp", "timestamp_ntz", "date"), TIMES),
    "binary": BYTES,
    "string": STRINGS,
}
SPLICES = [
    *(
        b'"',
        b"'",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"\\",
        b"1",
        b"0",
        b"-",
        b".",
        b"e",
        b"n",
        b"t",
    ),
    *(b" ", b"\t", b"\xe9", b"\xc3", b"\x01", b"null", b"true", b'"x"', b"\\u", b"\\ud83d", b"NaN"),
    *(b'{"a":1}', b"[]", b"{}", b"/"),
]
WHOLE = [
    *(b"null", b"", b" ", b"[]", b"{}", b"1", b"}", b'{"c0":', b"[{},{}]", b"[{},1]", b'"x"'),
    *(
        b"{}{}",
        b"{}x",
        b" {}",
        b"{} ",
        b"\xef\xbb\xbf{}",
        b'{"z":' + b"[" * 1001 + b"]" * 1001 + b"}",
    ),
    b'{"z":"' + b"x" * 3000 + b'"}',
]


def mutated(text: bytes, random: Random) -> bytes:
    """The text with a few bytes changed, as a torn or misguided writer would."""
    made = bytearray(text)
    for _ in range(random.choice([1, 1, 2, 3])):
        at = random.randrange(len(made) + 1)
        match random.randrange(4):
            case 0:
                made[at : at + 1] = random.choice(SPLICES)
            case 1:
                made[at:at] = random.choice(SPLICES)
            case 2:
                del made[at : at + random.choice([1, 1, 5])]
            case 3:
                del made[at:]
    return bytes(made).replace(b"\n", b"").replace(b"\r", b"")


def column(random: Random, odd: float, depth: int = 0) -> tuple[str, Callable[[], bytes]]:
    """A type, and values that may be of it."""
    kind = random.random() if depth < 2 else 1.0
    if kind < 0.15:
        inner, value = column(random, odd, depth + 1)
        return (
            f"array<{inner}>",
            lambda: (
                random.choice([b"null", b"[]", b"{}"])
                if random.random() < 0.1
                else b"[%s]" % b", ".join(value() for _ in range(random.randrange(4)))
            ),
        )
    if kind < 0.3:
        parts = [column(random, odd, depth + 1) for _ in range(random.randrange(1, 4))]
        declared = ", ".join(f"f{at}: {inner}" for at, (inner, _) in enumerate(parts))
        return (
            f"struct<{declared}>",
            lambda: (
                random.choice([b"null", b"[]", b"1"])
                if random.random() < 0.1
                else b"{%s}"
                % b",".join(b'"f%d":%s' % (at, each()) for at, (_, each) in enumerate(parts))
            ),
        )
    name = random.choice(list(VALUES))
    return name, lambda: random.choice(VALUES[name]) if random.random() < odd else VALUES[name][0]


def block_of(random: Random) -> tuple[str, bytes]:
    """A schema, and lines that are more or less of it."""
    odd = random.choice([0.02, 0.1, 0.5])
    parts = [column(random, odd) for _ in range(random.randrange(1, 6))]
    lines = []
    for _ in range(random.choice([1, 3, 20, 200])):
        members = [
            b'"c%d":%s' % (at, value())
            for at, (_, value) in enumerate(parts)
            if random.random() < 0.95
        ]
        if random.random() < 0.1:
            members.append(b'"z":' + random.choice(STRINGS + NUMBERS))
        if random.random() < 0.02 and members:
            members.append(random.choice(members))
        random.shuffle(members)
        line = b"{%s}" % random.choice([b",", b", "]).join(members)
        chance = random.random()
        if chance < 0.03:
            line = mutated(line, random)
        lines.append(random.choice(WHOLE) if 0.03 < chance < 0.05 else line)
    ends = random.choice([b"\n", b"\r\n", b"\n\n"])
    declared = ", ".join(f"c{at} {name}" for at, (name, _) in enumerate(parts))
    return declared, ends.join(lines) + random.choice([b"", ends])


def comparable(parsed: Parsed) -> Any:
    """Values as Python compares them: NaN equals itself, zeros have signs, no time is too late."""

    def plain(value: Any) -> Any:
        if isinstance(value, float):
            return repr(value)
        if isinstance(value, list):
            return [plain(each) for each in value]
        return (
            {name: plain(each) for name, each in value.items()}
            if isinstance(value, dict)
            else value
        )

    def numbers(type_: pa.DataType) -> pa.DataType:
        if pa.types.is_temporal(type_):
            return pa.int32() if pa.types.is_date(type_) else pa.int64()
        if pa.types.is_list(type_):
            return pa.list_(numbers(type_.value_type))
        if pa.types.is_struct(type_):
            return pa.struct([(field.name, numbers(field.type)) for field in type_])
        return type_

    shown = [plain(each.cast(numbers(each.type)).to_pylist()) for each in parsed.batch.columns]
    return shown, parsed.text_of_row.tolist(), dict(parsed.malformed)


@pytest.mark.parametrize("seed", range(60))
def test_the_quick_way_reads_what_the_exact_way_reads(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    for _ in range(5):
        declared, block = block_of(random)
        rules = JsonRules(zone=random.choice(["UTC", "America/New_York", "+05:30", "EST"]))
        schema, texts = schema_of_ddl(declared), Texts.lines(block)
        quick = ColumnReader(schema, rules).read(texts)
        monkeypatch.setattr(columns, "_sure_runs", lambda texts, places: [])
        monkeypatch.setattr(columns, "is_flat", lambda schema: False)
        exact = ColumnReader(schema, rules).read(texts)
        monkeypatch.undo()

        quick.batch.validate(full=True)
        assert quick.batch.schema == exact.batch.schema == schema
        assert comparable(quick) == comparable(exact), f"seed {seed}, {declared}"


FLAT = "c0 string, c1 long, c2 int, c3 double, c4 boolean"


@pytest.mark.parametrize("seed", range(10))
def test_flat_records_are_read_as_the_exact_way_reads_them(seed: int) -> None:
    """One by one, so that what is refused hides nothing else."""
    random = Random(seed)
    schema = schema_of_ddl(FLAT)
    flat, exact, taken = FlatReader(schema), RowReader(schema, JsonRules()), 0
    values = [*STRINGS, *NUMBERS, b"[1,{}]", b'{"c1":"\\q"}', b"01", b"1.", b".5", b"tru", b"1_0"]
    fitting = [b'"x"', b"7", b"-8", b"1.5", b"true"]
    for _ in range(2000):
        members = [
            b'"%s":%s' % (name, random.choice(values) if random.random() < 0.3 else fits)
            for name, fits in zip((b"c0", b"\\u00631", b"c2", b"c3", b"c4"), fitting, strict=True)
        ]
        members += [
            b'"%s":%s' % (random.choice([b"c1", b"z"]), random.choice(values))
            for _ in range(random.randrange(3))
        ]
        random.shuffle(members)
        text = b"{%s}" % b", ".join(members)
        text = mutated(text, random) if random.random() < 0.3 else text
        found = flat.read(memoryview(text)) if columns.is_utf8(text) and len(text) < 1000 else None
        if found is None:
            continue
        taken += 1
        read = exact.read(text)
        assert read.why_malformed is None, text
        assert [[repr(each) for each in row] for row in read.rows] == [
            [repr(column[at].as_py()) for column in found.columns]
            for at in range(found.num_rows)
        ], text  # fmt: skip
    assert taken > 100


def test_what_is_not_flat_or_not_utf8_or_two_objects_in_a_text_is_read_the_other_way() -> None:
    texts = [b'{"c0":"\xff"}', b'{"c0":"a"}\n{"c0":"b"}', b'{"c0":1}', b'{"c0":"c"}']
    parsed = ColumnReader(schema_of_ddl("c0 string"), JsonRules()).read(Texts.of(texts))
    assert parsed.batch.column("c0").to_pylist() == [None, "a", "1", "c"]
    assert list(parsed.malformed) == [0]


def test_of_two_objects_in_one_text_the_first_is_its_record() -> None:
    texts = [b'{"c0":"a"}\n{"c0":"b"}', b'{"c0":"c"}']
    parsed = ColumnReader(schema_of_ddl("c0 string"), JsonRules()).read(Texts.of(texts))
    assert parsed.batch.column("c0").to_pylist() == ["a", "c"]
    assert parsed.text_of_row.tolist() == [0, 1]


def test_most_lines_take_the_quick_way(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    reads_one = RowReader.read

    def noted(self: RowReader, text: bytes) -> Any:
        read.append(text)
        return reads_one(self, text)

    monkeypatch.setattr(RowReader, "read", noted)
    lines = [
        b'{"n":%d,"at":"2024-01-01T00:00:00","raw":"aGk=","x":[1.5],"d":"2024-02-09"}' % n
        for n in range(1000)
    ]
    lines[17], lines[500] = b'{"n":"17"}', b'{"n":1,"d":"2024-2-9"}'
    schema = schema_of_ddl("n long, at timestamp, raw binary, x array<double>, d date")
    parsed = ColumnReader(schema, JsonRules(zone="America/New_York")).read(Texts.of(lines))

    assert parsed.batch.num_rows == 1000
    assert list(parsed.malformed) == [17]
    assert lines[500] in read
    assert len(read) < 10


def test_rows_stay_in_the_order_of_their_texts() -> None:
    texts = [b'{"n":0}', b'[{"n":1},{"n":2}]', b"", b'{"n":3}', b"[]", b"nothing", b'{"n":4}']
    parsed = ColumnReader(schema_of_ddl("n long"), JsonRules()).read(Texts.of(texts))

    assert parsed.batch.column("n").to_pylist() == [0, 1, 2, 3, None, 4]
    assert parsed.text_of_row.tolist() == [0, 1, 1, 3, 5, 6]
    assert list(parsed.malformed) == [4]


def test_a_text_may_be_any_bytes_at_all() -> None:
    random = np.random.default_rng(0)
    schema = schema_of_ddl("a long, b string, c map<string,array<double>>, d timestamp, e binary")
    reader = RowReader(schema, JsonRules())
    alphabet = np.frombuffer(b"{}[]\":,\\'0-9.eEInfNatruls/+ \t\xff\xe9\xc3\xa9\x00abcde", np.uint8)
    for _ in range(3000):
        text = bytes(random.choice(alphabet, random.integers(1, 40)))
        assert all(len(row) == len(schema) for row in reader.read(text).rows)


def test_a_text_may_be_nested_as_deeply_as_its_author_likes() -> None:
    reader = RowReader(schema_of_ddl("a long"), JsonRules())
    deep = b'{"a":1,"z":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert "nested more than 1000 deep" in str(reader.read(deep).why_malformed)
    assert reader.read(b'{"a":1,"z":' + b"[" * 900 + b"]" * 900 + b"}").rows == [[1]]


def test_half_a_surrogate_pair_is_a_question_mark_and_a_whole_one_is_its_character() -> None:
    reader = RowReader(schema_of_ddl("a string"), JsonRules())
    assert reader.read(b'{"a":"\\ud83d\\ude00 \\ud83d."}').rows == [["\U0001f600 ?."]]


def test_a_float_is_rounded_once() -> None:
    text = b'{"a":1.00000017881393432617187499}'
    (row,) = RowReader(schema_of_ddl("a float"), JsonRules()).read(text).rows
    assert row[0] == math.ldexp(1 + 2**-23, 0)


def test_lines_that_are_all_blank_have_no_records():
    schema = pa.schema([("a", pa.string()), ("b", pa.list_(pa.int64()))])
    for kept in (schema, schema.remove(1)):
        parsed = ColumnReader(kept, JsonRules()).read(Texts.lines(b"\n\n\n"))
        assert (parsed.batch.num_rows, parsed.batch.schema) == (0, kept)
