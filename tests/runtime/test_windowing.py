"""The operator of windowed aggregates: what it answers, what it remembers, who gets which row."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.graph.logical import Aggregate, SessionWindow, Window
from stillframe.graph.plan import Edge, HashBy
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.key_groups import hash_row, key_group_range
from stillframe.protocol.event_time import END_OF_TIME_US
from stillframe.protocol.manifests import (
    Manifest,
    OperatorDescription,
    OperatorSnapshot,
)
from stillframe.protocol.restore import SubtaskState, starting_state
from stillframe.runtime.channels import LocalChannel
from stillframe.runtime.elements import Watermark
from stillframe.runtime.outputs import EdgeOutput
from stillframe.runtime.windowing import (
    Windowing,
    output_schema,
    window_tables,
    windowed_partials,
)
from stillframe.state.partials import is_partial
from stillframe.state.reached import BEGINNING_US
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.store import open_store

UTC = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("key", pa.string()), ("at", UTC)])
UID = OperatorUid("count")
GROUPS = 8
COUNT = (AggregateCall("count", None, "count", pa.int64()),)
CLOSED = Aggregate(("key",), COUNT, Window("at", 10, 10), emits_closed=True)
UPDATED = Aggregate(("key",), COUNT, Window("at", 10, 10))
SLIDING = Aggregate(("key",), COUNT, Window("at", 10, 5), emits_closed=True)
SESSIONS = Aggregate(("key",), COUNT, SessionWindow("at", 10), emits_closed=True)


def records(*rows: tuple[str, int | None]) -> pa.RecordBatch:
    keys, times = [row[0] for row in rows], [row[1] for row in rows]
    at = pa.array(times, pa.int64()).cast(UTC)
    return pa.record_batch([pa.array(keys, pa.string()), at], schema=SCHEMA)


@pytest.mark.parametrize("aggregate", [CLOSED, UPDATED, SESSIONS])
def test_behind_windows_event_time_is_before_the_last_moment_of_those_that_are_open(
    tmp_path: Path, aggregate: Aggregate
) -> None:
    operator = Counting(tmp_path, aggregate).operator
    assert operator.time_after(9) == 8  # so that 9, of a row for the window until 10, is not late
    assert operator.time_after(END_OF_TIME_US) == END_OF_TIME_US
    assert operator.time_after(BEGINNING_US + 1) == BEGINNING_US + 1


class Counting:
    """A windowed count, the sender in front of it, and the checkpoints it is asked for."""

    def __init__(
        self,
        home: Path,
        aggregate: Aggregate = CLOSED,
        state: SubtaskState | None = None,
        subtask: int = 0,
        parallelism: int = 1,
    ) -> None:
        self.store = open_store(str(home))
        self.subtask = subtask
        state = state or SubtaskState()
        owned = key_group_range(subtask, parallelism, GROUPS)
        tables = window_tables(SCHEMA, aggregate, GROUPS, state, self._rows(state, owned))
        self._sender = windowed_partials(SCHEMA, aggregate)
        self.operator = Windowing(
            UID, SubtaskIndex(subtask), Attempt(1), tables, self.store, state.watermark_us
        )

    def count(self, *rows: tuple[str, int | None]) -> list[tuple]:
        return rows_of(self.operator.process(self._sender.combine(records(*rows))))

    def advance(self, time_us: int) -> list[tuple]:
        return rows_of(self.operator.on_watermark(time_us))

    def snapshot(self, checkpoint_id: int) -> OperatorSnapshot:
        number = CheckpointId(checkpoint_id)
        return self.operator.described(number, self.operator.snapshot(number)())

    def completed(self, checkpoint_id: int) -> OperatorSnapshot:
        taken = self.snapshot(checkpoint_id)
        self.operator.completed(CheckpointId(checkpoint_id))
        return taken

    def _rows(self, state: SubtaskState, owned: range):
        for keyed in state.keyed:
            file = keyed.file
            data = self.store.read_verified(file.path, file.length_bytes, file.crc32)
            yield from read_keyed_snapshot(data, keyed.key_groups, owned)


def rows_of(batches) -> list[tuple]:
    return sorted(
        (row["start"], row["end"], key, count)
        for batch in batches
        for row, key, count in zip(
            pa.array(
                batch.column(0).cast(pa.struct([("start", pa.int64()), ("end", pa.int64())]))
            ).to_pylist(),
            batch.column(1).to_pylist(),
            batch.column(2).to_pylist(),
            strict=True,
        )
    )


def restored(snapshots: list[OperatorSnapshot], parallelism: int) -> list[SubtaskState]:
    """What subtasks start from, as it comes over the wire."""
    snapshots = [OperatorSnapshot.from_json(json.loads(json.dumps(s.to_json()))) for s in snapshots]
    operator = OperatorDescription(UID, "aggregate", "count", parallelism)
    manifest = Manifest(
        "job", Attempt(1), CheckpointId(1), 1, "checkpoint", 0, 0, GROUPS, (), snapshots
    )
    states = starting_state([operator], GROUPS, manifest, {})
    each = [states[UID, SubtaskIndex(subtask)] for subtask in range(parallelism)]
    return [SubtaskState.from_json(json.loads(json.dumps(state.to_json()))) for state in each]


def test_a_watermark_closes_windows_and_is_remembered(tmp_path: Path) -> None:
    counting = Counting(tmp_path)
    assert counting.operator.watermark_us is None
    assert counting.count(("a", 1), ("a", 2), ("b", 12), ("c", None)) == []
    assert counting.advance(10) == [(0, 10, "a", 2)]
    assert counting.operator.watermark_us == 10


def test_what_it_emits_is_what_its_schema_says(tmp_path: Path) -> None:
    counting = Counting(tmp_path)
    counting.count(("a", 1))
    [made] = counting.operator.on_watermark(10)
    assert made.schema == output_schema(SCHEMA, CLOSED)


def test_time_does_not_go_back(tmp_path: Path) -> None:
    counting = Counting(tmp_path)
    counting.advance(10)
    counting.count(("a", 11))
    assert counting.advance(5) == []
    assert counting.operator.watermark_us == 10
    assert counting.count(("a", 9)) == []
    assert counting.operator.late_rows == 1


def test_updates_come_with_the_batch_and_late_ones_not_at_all(tmp_path: Path) -> None:
    counting = Counting(tmp_path, UPDATED)
    assert counting.count(("a", 1), ("a", 11)) == [(0, 10, "a", 1), (10, 20, "a", 1)]
    assert counting.advance(10) == []
    assert counting.count(("a", 2), ("a", 12)) == [(10, 20, "a", 2)]
    assert counting.operator.late_rows == 1


def test_unchanged_windows_are_referred_to_and_time_is_told_anew(tmp_path: Path) -> None:
    counting = Counting(tmp_path)
    counting.count(("a", 1))
    first = counting.completed(1)
    counting.advance(9)
    second = counting.completed(2)
    assert second.keyed == first.keyed
    assert second.watermark_us == 9

    counting.advance(10)
    assert counting.completed(3).keyed == ()


def test_a_change_while_the_snapshot_is_written_belongs_to_the_next(tmp_path: Path) -> None:
    counting = Counting(tmp_path)
    counting.count(("a", 1))
    write = counting.operator.snapshot(CheckpointId(1))
    counting.count(("a", 1), ("b", 2))
    counting.advance(100)
    taken = counting.operator.described(CheckpointId(1), write())

    [state] = restored([taken], 1)
    again = Counting(tmp_path, state=state)
    assert again.operator.watermark_us is None
    assert again.advance(10) == [(0, 10, "a", 1)]


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_windows_go_on_where_they_were_at_any_parallelism(tmp_path: Path, parallelism: int) -> None:
    rows = [(f"key-{number}", time) for number in range(20) for time in (1, 7, 13)]
    counting = Counting(tmp_path, SLIDING)
    counting.count(*rows)
    emitted = counting.advance(6)
    states = restored([counting.completed(1)], parallelism)
    for subtask, state in enumerate(states):
        again = Counting(tmp_path, SLIDING, state, subtask, parallelism)
        assert again.operator.watermark_us == 6
        emitted += again.advance(6)
        emitted += again.advance(1_000)
    expected = [(-5, 5, 1), (0, 10, 2), (5, 15, 2), (10, 20, 1)]
    assert sorted(emitted) == sorted(
        (start, end, f"key-{number}", count)
        for start, end, count in expected
        for number in range(20)
    )


def test_a_subtask_that_was_ahead_emits_no_window_twice(tmp_path: Path) -> None:
    """A barrier that overtakes records may find its subtasks at different times."""
    keys = [f"key-{number}" for number in range(20)]
    whole = Counting(tmp_path, SLIDING)
    whole.count(*((key, time) for key in keys for time in (1, 7)))
    two = [
        Counting(tmp_path, SLIDING, state, subtask, 2)
        for subtask, state in enumerate(restored([whole.completed(1)], 2))
    ]
    emitted = two[0].advance(10) + two[1].advance(5)
    [state] = restored([each.completed(2) for each in two], 1)
    assert state.watermark_us == 5
    one = Counting(tmp_path, SLIDING, state)
    emitted += one.count(*((key, 3) for key in keys))  # under way at the barrier
    emitted += one.advance(1_000)
    assert 0 < one.operator.late_rows < len(keys)
    assert len({row[:3] for row in emitted}) == len(emitted) == 3 * len(keys)


def test_a_subtask_that_knows_no_time_yet_is_not_given_that_of_others(tmp_path: Path) -> None:
    knows, knows_not = Counting(tmp_path, subtask=0), Counting(tmp_path, subtask=1)
    knows.advance(50)
    [state] = restored([knows.completed(1), knows_not.completed(1)], 1)
    again = Counting(tmp_path, state=state)
    assert again.operator.watermark_us is None
    again.count(*((f"key-{number}", 1) for number in range(40)))
    late = again.operator.late_rows
    assert 0 < late < 40
    assert len(again.advance(10)) == 40 - late


@pytest.mark.parametrize("count", [10, 4_000])
def test_rows_of_one_key_go_to_one_subtask_whatever_their_pane(count: int) -> None:
    channels = [LocalChannel(1 << 20) for _ in range(3)]
    edge = Edge(0, "in>out", 0, 1, HashBy(("key",)), SCHEMA, 1, 3, 0, combines=CLOSED)
    output = EdgeOutput(edge, SubtaskIndex(0), channels, 128, windowed_partials(SCHEMA, CLOSED))
    output.send(records(*((f"key-{i % 7}", i % 50) for i in range(count))))

    received = [None if channel.is_empty() else channel.take() for channel in channels]
    keys = [set(batch["key"].to_pylist()) for batch in received if batch is not None]
    assert sum(map(len, keys)) == 7
    assert all(is_partial(batch) == (count > 10) for batch in received if batch is not None)


# --- sessions


def test_a_watermark_closes_sessions_and_what_comes_for_them_later_is_late(tmp_path: Path) -> None:
    counting = Counting(tmp_path, SESSIONS)
    assert counting.count(("a", 1), ("a", 9), ("b", 12), ("c", None)) == []
    assert counting.advance(18) == []
    assert counting.advance(19) == [(1, 19, "a", 2)]
    assert counting.count(("a", 9), ("b", 22)) == []
    assert counting.operator.late_rows == 1
    assert counting.advance(1_000) == [(12, 32, "b", 2)]


def test_unchanged_sessions_are_referred_to(tmp_path: Path) -> None:
    counting = Counting(tmp_path, SESSIONS)
    counting.count(("a", 1))
    first = counting.completed(1)
    counting.advance(10)
    assert counting.completed(2).keyed == first.keyed
    counting.advance(11)
    assert counting.completed(3).keyed == ()


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_sessions_go_on_where_they_were_at_any_parallelism(
    tmp_path: Path, parallelism: int
) -> None:
    keys = [f"key-{number}" for number in range(20)]
    counting = Counting(tmp_path, SESSIONS)
    counting.count(*((key, time) for key in keys for time in (1, 7, 40)))
    assert counting.advance(16) == []
    for subtask, state in enumerate(restored([counting.completed(1)], parallelism)):
        again = Counting(tmp_path, SESSIONS, state, subtask, parallelism)
        owned = key_group_range(subtask, parallelism, GROUPS)
        mine = [key for key in keys if hash_row([key], [pa.string()]) % GROUPS in owned]
        again.count(*((key, 17) for key in mine))
        assert again.advance(1_000) == sorted(
            (start, end, key, count)
            for key in mine
            for start, end, count in ((1, 27, 3), (40, 50, 1))
        )


def test_a_subtask_that_was_ahead_takes_no_record_that_was_late_for_it(tmp_path: Path) -> None:
    keys = [f"key-{number}" for number in range(20)]
    whole = Counting(tmp_path, SESSIONS)
    whole.count(*((key, 1) for key in keys))
    two = [
        Counting(tmp_path, SESSIONS, state, subtask, 2)
        for subtask, state in enumerate(restored([whole.completed(1)], 2))
    ]
    emitted = two[0].advance(15) + two[1].advance(5)
    [state] = restored([each.completed(2) for each in two], 1)
    one = Counting(tmp_path, SESSIONS, state)
    emitted += one.count(*((key, 3) for key in keys))  # under way at the barrier
    emitted += one.advance(1_000)
    assert one.operator.late_rows == len([row for row in emitted if row[3] == 1])
    assert 0 < one.operator.late_rows < len(keys)
    assert sorted(row[2] for row in emitted) == sorted(keys)


def test_a_sender_combines_sessions_when_it_knows_how_far_time_has_come() -> None:
    channel = LocalChannel(1 << 20)
    edge = Edge(0, "in>out", 0, 1, HashBy(("key",)), SCHEMA, 1, 1, 0, combines=SESSIONS)
    output = EdgeOutput(edge, SubtaskIndex(0), [channel], 128, windowed_partials(SCHEMA, SESSIONS))
    batch = records(*((f"key-{i % 7}", i % 50) for i in range(4_000)))
    output.send(batch)
    output.broadcast(Watermark(5))
    output.send(batch)

    received = [channel.take() for _ in range(3)]
    assert [is_partial(each) for each in received if isinstance(each, pa.RecordBatch)] == [
        False,
        True,
    ]
    assert received[2].num_rows == 7
