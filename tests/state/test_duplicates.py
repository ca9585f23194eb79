"""Keys that have been seen, against a model that looks at one record after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tries import tries

from stillframe.errors import BuildError
from stillframe.key_groups import hash_row, key_group_range
from stillframe.state import duplicates
from stillframe.state.duplicates import SeenKeys

GROUPS = 8
UTC = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("k", pa.string()), ("t", UTC), ("n", pa.int64())])
Record = tuple[str | None, int | None, int]


def batch_of(*records: Record) -> pa.RecordBatch:
    keys, times, numbers = (
        [list(column) for column in zip(*records, strict=True)] if records else [[]] * 3
    )
    columns = [pa.array(keys, pa.string()), pa.array(times, pa.int64()).cast(UTC)]
    return pa.RecordBatch.from_arrays([*columns, pa.array(numbers, pa.int64())], schema=SCHEMA)


def seen_of(
    keys: tuple[str, ...] = ("k",), time: str | None = None, keep_us: int | None = None
) -> SeenKeys:
    return SeenKeys(SCHEMA, keys, GROUPS, time, keep_us)


def passed(seen: SeenKeys, *records: Record) -> list[int]:
    """The numbers of the records that pass."""
    fresh: list[int] = seen.sift(batch_of(*records)).fresh.column("n").to_pylist()
    return fresh


def rows_of(seen: SeenKeys) -> dict[int, list[pa.RecordBatch]]:
    frozen = seen.freeze()
    batches: dict[int, list[pa.RecordBatch]] = {}
    for group, batch in frozen.batches_by_key_group():
        batches.setdefault(group, []).append(batch)
    frozen.release()
    return batches


# --- stories


def test_the_first_record_of_a_key_passes_within_a_batch_and_after_it() -> None:
    seen = seen_of()
    assert passed(seen, ("a", 1, 0), ("b", 1, 1), ("a", 2, 2), (None, 3, 3)) == [0, 1, 3]
    assert passed(seen, (None, 1, 4), ("c", 1, 5), ("c", 1, 6), ("b", 1, 7)) == [5]
    assert passed(seen) == []


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_minus_zero_is_zero_and_shown_as_it_and_every_nan_is_one(kind: pa.DataType) -> None:
    schema = pa.schema([("x", kind), ("y", kind), ("n", pa.int64())])
    seen = SeenKeys(schema, ("x",), GROUPS)
    numbers = pa.array([-0.0, 0.0, math.nan, -math.nan, None, 1.5, -0.0], kind)
    batch = pa.record_batch([numbers, numbers, list(range(7))], schema=schema)

    fresh = seen.sift(batch).fresh

    assert list(map(str, fresh.column("x").to_pylist())) == ["0.0", "nan", "None", "1.5"]
    assert list(map(str, fresh.column("y").to_pylist())) == ["-0.0", "nan", "None", "1.5"]
    assert seen.sift(batch).fresh.num_rows == 0
    # Also where a batch passes as a whole.
    alone = SeenKeys(schema, ("x",), GROUPS).sift(batch.slice(0, 1)).fresh
    assert list(map(str, alone.column("x").to_pylist())) == ["0.0"]


def test_without_keys_one_record_passes() -> None:
    seen = seen_of(keys=())
    assert passed(seen, ("a", 1, 0), ("b", 1, 1)) == [0]
    restored = seen_of(keys=())
    for batches in rows_of(seen).values():
        for batch in batches:
            restored.restore(batch)
    assert passed(restored, ("c", 1, 2)) == []


def test_records_that_are_not_after_the_watermark_are_late_and_are_not_remembered() -> None:
    seen = seen_of(time="t")
    seen.advance(10)
    sifted = seen.sift(batch_of(("a", 10, 0), ("a", 11, 1), ("b", None, 2)))
    assert sifted.fresh.column("n").to_pylist() == [1, 2]
    assert sifted.late.column("n").to_pylist() == [0]


def test_keys_kept_for_ever_are_there_after_the_end_of_time() -> None:
    seen = seen_of(time="t")
    passed(seen, ("a", 1, 0))
    seen.advance(2**63 - 1)
    assert sum(map(len, rows_of(seen).values())) == 1


def test_a_key_is_forgotten_when_its_time_and_the_delay_are_passed() -> None:
    seen = seen_of(time="t", keep_us=5)
    assert passed(seen, ("a", 10, 0), ("a", 12, 1)) == [0]
    seen.advance(14)
    assert passed(seen, ("a", 30, 2)) == []
    seen.advance(15)
    assert passed(seen, ("a", 30, 3), ("a", 31, 4)) == [3]
    seen.advance(34)
    assert passed(seen, ("a", 36, 5)) == [], "the second life ends by its own time"


def test_the_key_of_a_record_without_event_time_is_never_forgotten() -> None:
    seen = seen_of(time="t", keep_us=5)
    assert passed(seen, ("a", None, 0), ("a", None, 1)) == [0]
    seen.advance(1_000)
    assert passed(seen, ("a", None, 2), ("a", 2_000, 3)) == []


def test_times_at_the_end_of_time_do_not_overflow() -> None:
    seen = seen_of(time="t", keep_us=2**61)
    assert passed(seen, ("a", 2**63 - 2, 0), ("a", 2**63 - 2, 1)) == [0]
    assert passed(seen, ("a", 2**63 - 2, 2)) == []


def test_forgotten_keys_are_in_no_snapshot() -> None:
    seen = seen_of(time="t", keep_us=5)
    passed(seen, ("a", 1, 0), ("b", 20, 1))
    seen.advance(10)
    kept = [key for batches in rows_of(seen).values() for b in batches for key in b[0].to_pylist()]
    assert kept == ["b"]


def test_a_snapshot_is_not_changed_by_what_comes_after_the_barrier() -> None:
    seen = seen_of(time="t", keep_us=5)
    passed(seen, ("a", 1, 0), ("b", 20, 1))
    frozen = seen.freeze()
    seen.advance(10)
    passed(seen, ("a", 30, 2), ("c", 30, 3))
    rows = [row for _, batch in frozen.batches_by_key_group() for row in batch.to_pylist()]
    assert sorted(row["k"] for row in rows) == ["a", "b"]
    assert sorted(row[duplicates.EXPIRES] for row in rows) == [6, 25]


def test_the_version_changes_only_with_the_keys() -> None:
    seen = seen_of()
    passed(seen, ("a", 1, 0))
    before = seen.version
    passed(seen, ("a", 2, 1))
    assert seen.version == before
    passed(seen, ("b", 2, 1))
    assert seen.version != before


def test_what_cannot_be_a_key_is_refused() -> None:
    with pytest.raises(BuildError, match="cannot be a key"):
        SeenKeys(pa.schema([("k", pa.list_(pa.int64()))]), ("k",), GROUPS)


def test_memory_stays_flat_while_keys_come_and_go() -> None:
    schema = pa.schema([("k", pa.int64()), ("t", UTC)])
    seen = SeenKeys(schema, ("k",), GROUPS, "t", 50_000)
    sizes = []
    for begin in range(0, 3_000_000, 25_000):
        numbers = np.arange(begin, begin + 25_000)
        batch = pa.record_batch([pa.array(numbers), pa.array(numbers).cast(UTC)], schema=schema)
        assert seen.sift(batch).fresh.num_rows == 25_000
        assert seen.sift(batch).fresh.num_rows == 0
        seen.advance(begin)
        sizes.append(seen.state_bytes)
    assert max(sizes[len(sizes) // 2 :]) <= max(sizes[: len(sizes) // 2])
    assert len(seen) < 400_000, "of 3,000,000 keys"


def test_freeing_rows_forgets_no_key_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "_ROWS_MIN", 2)
    seen = seen_of(time="t", keep_us=5)
    passed(seen, ("a", 10, 0), ("b", 11, 1), ("c", 12, 2), ("d", 21, 3), ("e", None, 4))
    seen.advance(25)
    assert len(seen) == 2, "those of d, which is due at 26, and e"
    assert passed(seen, ("d", 30, 5), ("e", 30, 6), ("c", 30, 7), ("c", 30, 8)) == [7]
    seen.advance(26)
    assert passed(seen, ("d", 30, 9)) == [9]


def test_a_burst_is_freed_also_when_no_new_keys_come() -> None:
    schema = pa.schema([("k", pa.int64()), ("t", UTC)])
    seen = SeenKeys(schema, ("k",), GROUPS, "t", 10)
    numbers = np.arange(200_000)
    seen.sift(pa.record_batch([pa.array(numbers), pa.array(numbers).cast(UTC)], schema=schema))
    seen.advance(10_000_000)
    assert len(seen) == 0


# --- against a model


@dataclass
class Model:
    """One record after the other; every key has its own watermark, that of its key group."""

    keys: tuple[str, ...]
    time: str | None
    keep_us: int | None
    until: dict[tuple[object, ...], int | None] = field(default_factory=dict)

    def passes(self, record: Record, now_us: int | None) -> bool:
        values = dict(zip(SCHEMA.names, record, strict=True))
        time_us = values["t"]
        if self.time and time_us is not None and now_us is not None and time_us <= now_us:
            return False
        key = tuple(values[name] for name in self.keys)
        if key in self.until:
            until = self.until[key]
            if until is None or now_us is None or until > now_us:
                return False
        is_kept = self.keep_us is None or time_us is None
        self.until[key] = None if is_kept else time_us + self.keep_us
        return True


RECORDS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "d", "e", "f", None]),
        st.one_of(st.none(), st.integers(0, 60)),
        st.integers(0, 1000),
    ),
    max_size=12,
)
STEPS = st.lists(st.one_of(RECORDS, st.integers(0, 60), st.sampled_from(["rescale"])), max_size=14)
KINDS = st.sampled_from(
    [
        (("k",), None, None),
        (("k",), "t", None),
        (("k", "t"), "t", 0),
        (("k",), "t", 7),
        (("k",), "t", 0),
    ]
)


class Subtasks:
    """As many tables as subtasks, each with the watermark that it was told."""

    def __init__(self, kind: tuple, parallelism: int) -> None:
        self.kind = kind
        self.tables = [seen_of(*kind) for _ in range(parallelism)]
        self.now_us: list[int | None] = [None] * parallelism

    def owner(self, record: Record) -> int:
        group = self.group(record)
        return next(
            at
            for at in range(len(self.tables))
            if group in key_group_range(at, len(self.tables), GROUPS)
        )

    def group(self, record: Record) -> int:
        values = dict(zip(SCHEMA.names, record, strict=True))
        keys = self.kind[0]
        types = [SCHEMA.field(name).type for name in keys]
        return hash_row([values[name] for name in keys], types) % GROUPS

    def rescaled(self, parallelism: int) -> Subtasks:
        """As a restore does it: the slowest's time for all, further ones by key group."""
        new = Subtasks(self.kind, parallelism)
        frozen = [rows_of(table) for table in self.tables]
        known = [-(2**63) if now is None else now for now in self.now_us]
        slowest = min(known)
        for at, table in enumerate(new.tables):
            owned = key_group_range(at, parallelism, GROUPS)
            for groups in frozen:
                for batch in (b for g, batches in groups.items() if g in owned for b in batches):
                    table.restore(batch)
            further = []
            for former, now in enumerate(known):
                theirs = key_group_range(former, len(known), GROUPS)
                spans = [(theirs.start, theirs.stop, now)]
                if self.tables[former].reached is not None:
                    spans += self.tables[former].reached.spans()
                for first, stop, time_us in spans:
                    first, stop = max(first, owned.start), min(stop, owned.stop)
                    if first < stop and time_us != slowest:
                        further.append((first, stop, time_us))
            table.resume(slowest, further)
            new.now_us[at] = slowest
        return new


@settings(max_examples=tries(300), deadline=None)
@given(KINDS, STEPS, st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_what_passes_is_what_passes_record_by_record(
    kind: tuple, steps: list, sizes: list[int], data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(duplicates, "_ROWS_MIN", 2)
        subtasks = Subtasks(kind, sizes[0])
        model = Model(*kind)
        by_group: dict[int, int] = {}
        for number, step in enumerate(steps):
            if step == "rescale":
                subtasks = subtasks.rescaled(sizes[number % len(sizes)])
            elif isinstance(step, int):
                at = data.draw(st.integers(0, len(subtasks.tables) - 1))
                now = subtasks.now_us[at]
                subtasks.now_us[at] = step if now is None else max(now, step)
                subtasks.tables[at].advance(step)
                for group in key_group_range(at, len(subtasks.tables), GROUPS):
                    by_group[group] = max(step, by_group.get(group, step))
            else:
                check_records(subtasks, model, by_group, step)


def check_records(
    subtasks: Subtasks, model: Model, by_group: dict[int, int], records: list[Record]
) -> None:
    numbered = [(key, time, place) for place, (key, time, _) in enumerate(records)]
    expected = [
        record[2]
        for record in numbered
        if model.passes(record, by_group.get(subtasks.group(record)))
    ]
    found = []
    for at, table in enumerate(subtasks.tables):
        mine = [record for record in numbered if subtasks.owner(record) == at]
        sifted = table.sift(batch_of(*mine))
        found += sifted.fresh.column("n").to_pylist()
    assert sorted(found) == expected
