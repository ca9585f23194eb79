"""The newest row of each key, against a dictionary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tries import tries

from stillframe.key_groups import hash_row, key_group_range
from stillframe.state import newest as newest_module
from stillframe.state.newest import NewestRows

GROUPS = 8
UTC = pa.timestamp("us", "UTC")
SCHEMA = pa.schema(
    [("k", pa.string()), ("t", UTC), ("v", pa.int64()), ("tags", pa.list_(pa.string()))]
)
Row = tuple[str | None, int | None, int]


def batch_of(*rows: Row) -> pa.RecordBatch:
    keys, times, values = [list(c) for c in zip(*rows, strict=True)] if rows else [[]] * 3
    columns = [
        pa.array(keys, pa.string()),
        pa.array(times, pa.int64()).cast(UTC),
        pa.array(values, pa.int64()),
        pa.array([[str(value)] for value in values], pa.list_(pa.string())),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def newest_of(time: str | None = None) -> NewestRows:
    return NewestRows(SCHEMA, ("k",), time, GROUPS)


def found(newest: NewestRows, *keys: str | None) -> list[int | None]:
    places = newest.find([pa.array(keys, pa.string())])
    rows = newest.take(places)
    values: list[int | None] = rows.column("v").to_pylist()
    tags = rows.column("tags").to_pylist()
    assert tags == [None if value is None else [str(value)] for value in values]
    return values


def test_a_key_has_the_row_that_came_last() -> None:
    newest = newest_of()
    newest.update(batch_of(("a", 9, 1), ("b", 1, 2), ("a", 1, 3)))
    assert found(newest, "b", "a", "c", "a") == [2, 3, None, 3]
    newest.update(batch_of(("a", 0, 4)))
    assert found(newest, "a", "b") == [4, 2]


def test_by_event_time_a_row_that_comes_late_is_not_the_newest() -> None:
    newest = newest_of("t")
    newest.update(batch_of(("a", 9, 1), ("a", 5, 2), ("b", None, 3)))
    newest.update(batch_of(("a", 8, 4), ("b", 1, 5), ("b", None, 6)))
    assert found(newest, "a", "b") == [1, 5]
    newest.update(batch_of(("a", 9, 7)))
    assert found(newest, "a") == [7], "of the same time what came later"


def test_null_is_no_key() -> None:
    newest = newest_of()
    newest.update(batch_of((None, 1, 1), ("a", 1, 2)))
    assert found(newest, None, "a") == [None, 2]
    assert len(newest) == 1


def test_nothing_is_found_where_nothing_is() -> None:
    assert found(newest_of(), "a", None) == [None, None]
    assert found(newest_of()) == []


def test_replaced_rows_are_freed() -> None:
    newest = newest_of()
    keys = [str(key) for key in range(100)]
    for value in range(3_000):
        newest.update(batch_of(*((key, value, value) for key in keys)))
    assert newest.kept_rows < 100_000
    assert found(newest, "7", "99") == [2_999, 2_999]


def test_a_snapshot_is_not_changed_by_what_comes_after_the_barrier() -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(newest_module, "_SPARE_ROWS_MIN", 0)
        newest = newest_of()
        newest.update(batch_of(("a", 1, 1), ("b", 1, 2)))
        frozen = newest.freeze()
        for value in range(20):
            newest.update(batch_of(("a", 1, value), ("c", 1, value)))
    rows = [row for _, batch in frozen.batches_by_key_group() for row in batch.to_pylist()]
    assert sorted((row["k"], row["v"]) for row in rows) == [("a", 1), ("b", 2)]


def test_looking_up_in_many_batches_gives_rows_in_the_order_asked_for() -> None:
    newest = newest_of()
    for size in (64, 16, 4, 1):
        newest.update(batch_of(*((f"{size}-{n}", 1, size * 100 + n) for n in range(size))))
    random = np.random.default_rng(3)
    asked = [(size, int(n)) for size in (64, 16, 4, 1) for n in random.integers(0, size, 5)]
    asked = [asked[place] for place in random.permutation(len(asked))]
    keys = [f"{size}-{n}" for size, n in asked]
    assert found(newest, *keys, "no") == [*(size * 100 + n for size, n in asked), None]


ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "d", "e", None]),
        st.one_of(st.none(), st.integers(0, 9)),
        st.integers(0, 1000),
    ),
    max_size=10,
)


def is_newer(row: Row, known: Row | None, time: str | None) -> bool:
    if known is None or time is None or known[1] is None:
        return True
    return row[1] is not None and row[1] >= known[1]


@settings(max_examples=tries(200), deadline=None)
@given(
    st.sampled_from([None, "t"]),
    st.lists(st.one_of(ROWS, st.integers(1, 4)), max_size=12),
)
def test_what_is_found_is_the_newest_also_after_rescaling(
    time: str | None, steps: list[Any]
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(newest_module, "_SPARE_ROWS_MIN", 3)
        tables = [newest_of(time)]
        model: dict[str | None, Row] = {}
        for step in steps:
            if isinstance(step, int):
                tables = rescaled(tables, step, time)
                continue
            for row in step:
                if is_newer(row, model.get(row[0]), time):
                    model[row[0]] = row
            for at, table in enumerate(tables):
                table.update(batch_of(*(row for row in step if owner(row[0], len(tables)) == at)))
            for key in ("a", "b", "c", "d", "e"):
                expected = model[key][2] if key in model else None
                assert found(tables[owner(key, len(tables))], key) == [expected]


def owner(key: str | None, parallelism: int) -> int:
    group = hash_row([key], [pa.string()]) % GROUPS
    return next(
        at for at in range(parallelism) if group in key_group_range(at, parallelism, GROUPS)
    )


def rescaled(tables: list[NewestRows], parallelism: int, time: str | None) -> list[NewestRows]:
    new = [newest_of(time) for _ in range(parallelism)]
    for table in tables:
        frozen = table.freeze()
        for group, batch in frozen.batches_by_key_group():
            for at in range(parallelism):
                if group in key_group_range(at, parallelism, GROUPS):
                    new[at].restore(batch)
        frozen.release()
    return new
