"""What COPY's binary form looks like, byte by byte, as PostgreSQL's manual has it."""

from __future__ import annotations

import datetime
import struct

import pyarrow as pa
import pytest

from stillframe.connectors.postgres_binary import as_binary, takes_binary


def values_in(made, columns):
    """The bytes of each value, None for a null; of a whole COPY."""
    data = b"".join(made)
    assert data.startswith(b"PGCOPY\n\xff\r\n\0" + bytes(8))
    assert data.endswith(b"\xff\xff")
    at, rows = 19, []
    while struct.unpack_from(">h", data, at) != (-1,):
        assert struct.unpack_from(">h", data, at) == (columns,)
        at, row = at + 2, []
        for _ in range(columns):
            [length] = struct.unpack_from(">i", data, at)
            at += 4
            row.append(None if length == -1 else data[at : at + length])
            at += max(length, 0)
        rows.append(tuple(row))
    assert at == len(data) - 2
    return rows


def test_each_value_has_its_length_and_a_null_has_none():
    rows = pa.record_batch({"n": [7, -1, None], "text": ["é", None, ""], "t": [True, False, None]})

    made = values_in(as_binary(rows, ["int4", "text", "bool"]), 3)

    assert made == [
        (b"\0\0\0\x07", "é".encode(), b"\1"),
        (b"\xff\xff\xff\xff", None, b"\0"),
        (None, b"", None),
    ]
    assert values_in(as_binary(rows.slice(1, 1), ["int8", "text", "bool"]), 3) == [
        (b"\xff" * 8, None, b"\0")
    ], "of a slice only its own"


def test_times_are_counted_from_the_year_2000():
    moment = datetime.datetime(2000, 1, 1, 0, 0, 1)
    rows = pa.record_batch(
        {"day": pa.array([datetime.date(1999, 12, 31)]), "at": pa.array([moment])}
    )

    [(day, at)] = values_in(as_binary(rows, ["date", "timestamptz"]), 2)

    assert (day, at) == (struct.pack(">i", -1), struct.pack(">q", 1_000_000))


@pytest.mark.parametrize(
    ("value", "type_"),
    [
        (pa.array([2**15]), "int2"),
        (pa.array([2**53 + 1]), "float8"),
        (pa.array([-(2**63)], pa.timestamp("us")), "timestamp"),
    ],
)
def test_a_value_that_its_column_cannot_have_is_not_made(value, type_):
    with pytest.raises(pa.ArrowInvalid):
        as_binary(pa.record_batch({"a": value}), [type_])


def test_types_that_read_their_texts_are_left_to_texts():
    assert takes_binary(["varchar", "int8", "timestamptz"])
    assert not takes_binary(["varchar", "numeric"])
    assert not takes_binary([""])
