"""`from_json` on whole columns: the fields that somebody looks at are read, the others are null."""

import json
from dataclasses import asdict

import pyarrow as pa
import pytest

from stillframe.json_texts.rules import JsonRules
from stillframe.runtime.from_json import from_json

VIEW = pa.struct(
    [
        ("app", pa.string()),
        ("user", pa.int64()),
        ("tags", pa.list_(pa.string())),
        ("site", pa.struct([("name", pa.string())])),
        ("is_new", pa.bool_()),
    ]
)
RULES = pa.scalar(json.dumps(asdict(JsonRules())))
TEXTS = [
    '{"app": "a", "user": 1, "tags": ["x"], "site": {"name": "n"}, "is_new": true}',
    '{"user": 2, "app": "漢é😀"}',
    "{}",
    None,
    "",
    "no JSON",
]


def read(texts, looked_at=None):
    places = None if looked_at is None else pa.scalar(looked_at, pa.list_(pa.int64()))
    return from_json(VIEW, pa.array(texts, pa.string()), RULES, places)


@pytest.mark.parametrize("place", range(VIEW.num_fields))
def test_a_field_that_is_looked_at_is_read_beside_nulls(place):
    whole, part = read(TEXTS), read(TEXTS, [place])

    part.validate(full=True)
    assert part.type == whole.type
    assert part.is_null().equals(whole.is_null())
    for other in range(VIEW.num_fields):
        values = part.field(other).to_pylist()
        assert values == (whole.field(other).to_pylist() if other == place else [None] * len(TEXTS))


def test_larger_batches_after_smaller_ones_have_all_their_nulls():
    for rows in (0, 1, 2, 3, 4, 1_000, 1_023, 1_024, 5):
        made = read(['{"app": "a"}'] * rows, [0])
        made.validate(full=True)
        assert made.field(0).to_pylist() == ["a"] * rows
        assert [made.field(at).null_count for at in range(1, VIEW.num_fields)] == [rows] * 4


def test_no_texts_have_no_records():
    assert read([]).equals(pa.array([], VIEW))
    assert read([], [0]).equals(pa.array([], VIEW))
