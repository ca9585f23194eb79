"""Avro's binary records as columns: what each type is, and what becomes of records that are not."""

from __future__ import annotations

import datetime as dt
import json
import struct
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stillframe.connectors.avro_values import AvroFormat, AvroReader
from stillframe.errors import BuildError


def schema_of(*fields, name="view"):
    named = [{"name": each, "type": kind} for each, kind in fields]
    return {"type": "record", "name": name, "fields": named}


def reader(*fields, **more):
    return AvroReader(AvroFormat(json.dumps(schema_of(*fields)), **more))


def number(value):
    zigzag, out = (value << 1) ^ (value >> 63), b""
    while zigzag > 0x7F:
        out += bytes([zigzag & 0x7F | 0x80])
        zigzag >>= 7
    return out + bytes([zigzag])


def text(value):
    raw = value if isinstance(value, bytes) else value.encode()
    return number(len(raw)) + raw


def optional(value, encode):
    return number(0) if value is None else number(1) + encode(value)


def in_blocks(items, encode, sized=False):
    """All items but the last in one block, the last one in another."""
    out = b""
    for block in (items[:-1], items[-1:]):
        if block:
            body = b"".join(map(encode, block))
            out += number(-len(block)) + number(len(body)) if sized else number(len(block))
            out += body
    return out + number(0)


def test_the_example_of_the_specification():
    test = reader(("a", "long"), ("b", "string"))

    decoded = test.read([bytes.fromhex("3606666f6f")])

    assert decoded.batch.to_pylist() == [{"a": 27, "b": "foo"}]


LONGS = st.integers(-(2**63), 2**63 - 1)
ROWS = st.fixed_dictionaries(
    {
        "n": LONGS,
        "i": st.integers(-(2**31), 2**31 - 1),
        "s": st.text(),
        "maybe": st.none() | st.text(),
        "x": st.floats(allow_nan=False),
        "yes": st.booleans(),
        "tags": st.lists(st.none() | st.text(), max_size=5),
        "inner": st.fixed_dictionaries({"k": st.binary(), "color": st.sampled_from(["RED", "B"])}),
        "counts": st.dictionaries(st.text(), LONGS, max_size=4),
    }
)
RICH = (
    ("n", "long"),
    ("i", "int"),
    ("s", "string"),
    ("maybe", ["null", "string"]),
    ("x", "double"),
    ("yes", "boolean"),
    ("tags", {"type": "array", "items": ["null", "string"]}),
    (
        "inner",
        schema_of(
            ("k", "bytes"),
            ("color", {"type": "enum", "name": "c", "symbols": ["RED", "B"]}),
            name="inner",
        ),
    ),
    ("counts", {"type": "map", "values": "long"}),
)


def encoded(row, sized):
    return b"".join(
        [
            number(row["n"]),
            number(row["i"]),
            text(row["s"]),
            optional(row["maybe"], text),
            struct.pack("<d", row["x"]),
            bytes([row["yes"]]),
            in_blocks(row["tags"], lambda tag: optional(tag, text), sized),
            text(row["inner"]["k"]),
            number(["RED", "B"].index(row["inner"]["color"])),
            in_blocks(list(row["counts"].items()), lambda kv: text(kv[0]) + number(kv[1]), sized),
        ]
    )


def plain(row):
    return {**row, "counts": list(row["counts"].items())}


@settings(max_examples=40)
@given(st.lists(ROWS, max_size=6), st.booleans())
def test_records_are_read_as_they_were_written(rows, sized):
    decoded = reader(*RICH).read([encoded(row, sized) for row in rows])

    assert decoded.malformed == []
    assert decoded.batch.to_pylist() == [plain(row) for row in rows]
    decoded.batch.validate(full=True)


@settings(max_examples=40)
@given(ROWS, st.binary(max_size=40), st.data())
def test_a_record_that_is_cut_or_garbage_harms_no_other(row, garbage, data):
    whole = encoded(row, sized=False)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]

    decoded = reader(*RICH).read([whole, cut, None, garbage, whole])

    assert 1 in decoded.malformed
    assert set(decoded.malformed) <= {1, 3}
    rows = decoded.batch.to_pylist()
    assert rows[0] == rows[4] == plain(row)
    assert set(rows[1].values()) == set(rows[2].values()) == {None}


def logical(kind, meaning, **more):
    return {"type": kind, "logicalType": meaning, **more}


@pytest.mark.parametrize(
    ("kind", "value", "arrow", "seen"),
    [
        (logical("int", "date"), number(19_723), pa.date32(), dt.date(2024, 1, 1)),
        (
            logical("long", "timestamp-millis"),
            number(1_500),
            pa.timestamp("us", "UTC"),
            dt.datetime(1970, 1, 1, 0, 0, 1, 500_000, dt.UTC),
        ),
        (
            logical("long", "timestamp-micros"),
            number(-1),
            pa.timestamp("us", "UTC"),
            dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, dt.UTC),
        ),
        (
            logical("long", "local-timestamp-millis"),
            number(7),
            pa.timestamp("us"),
            dt.datetime(1970, 1, 1, 0, 0, 0, 7_000),
        ),
        (
            logical("bytes", "decimal", precision=9, scale=2),
            text((-12_345).to_bytes(3, "big", signed=True)),
            pa.decimal128(9, 2),
            Decimal("-123.45"),
        ),
        (
            logical("fixed", "decimal", precision=9, scale=2, name="d", size=4),
            (12_345).to_bytes(4, "big", signed=True),
            pa.decimal128(9, 2),
            Decimal("123.45"),
        ),
        ({"type": "fixed", "name": "f", "size": 3}, b"abc", pa.binary(), b"abc"),
        (logical("string", "uuid"), text("u"), pa.string(), "u"),
        (logical("long", "time-micros"), number(5), pa.int64(), 5),
        ("float", struct.pack("<f", 0.5), pa.float32(), 0.5),
        (["string", "null"], number(1), pa.string(), None),
        (["int", "long"], number(0) + number(3), pa.int64(), 3),
        (["null", "float", "double"], number(2) + struct.pack("<d", 1.5), pa.float64(), 1.5),
    ],
)
def test_each_type_is_what_spark_makes_of_it(kind, value, arrow, seen):
    test = reader(("v", kind))

    decoded = test.read([value])

    assert decoded.malformed == []
    assert decoded.batch.schema.field("v").type == arrow
    assert decoded.batch.column("v").to_pylist() == [seen]


def test_a_named_type_can_be_used_again_and_a_header_be_passed_over():
    point = schema_of(("x", "int"), name="p.point")
    test = reader(("a", point), ("b", ["null", "p.point"]), has_confluent_header=True)
    value = b"\0\0\0\0\7" + number(1) + number(1) + number(2)

    decoded = test.read([value, value[5:], b"\0\0"])

    assert decoded.batch.to_pylist()[0] == {"a": {"x": 1}, "b": {"x": 2}}
    assert decoded.malformed == [1, 2]


@pytest.mark.parametrize(
    ("given_schema", "sentence"),
    [
        ("{", "option avroSchema is no JSON"),
        ('"string"', "only a record becomes columns"),
        (json.dumps(schema_of(("v", ["int", "string"]))), "only one beside null is read"),
        (json.dumps(schema_of(("v", "nobody"))), '"nobody" is not known, or contains itself'),
        (json.dumps(schema_of(("v", "view"))), '"view" is not known, or contains itself'),
        (json.dumps(schema_of()), "has no fields"),
    ],
)
def test_a_schema_that_cannot_be_read_is_refused(given_schema, sentence):
    with pytest.raises(BuildError, match=sentence):
        AvroFormat(given_schema).columns()
