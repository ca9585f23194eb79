"""The operator that drops duplicates: what it remembers, and who gets which key after a rescale."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from stillframe.graph.logical import DropDuplicates
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.key_groups import hash_row, key_group_range
from stillframe.protocol.manifests import Manifest, OperatorDescription, OperatorSnapshot
from stillframe.protocol.restore import SubtaskState, starting_state
from stillframe.runtime.deduplicating import Deduplicating, seen_keys
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.store import open_store

UTC = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("key", pa.string()), ("at", UTC)])
UID = OperatorUid("seen")
GROUPS = 8
WITHIN = DropDuplicates(("key",), "at", 10)
KEYS = [chr(ord("a") + place) for place in range(12)]


def records(*rows: tuple[str, int]) -> pa.RecordBatch:
    at = pa.array([row[1] for row in rows], pa.int64()).cast(UTC)
    return pa.record_batch([pa.array([row[0] for row in rows], pa.string()), at], schema=SCHEMA)


class Subtask:
    """One subtask of the operator, and the checkpoints it is asked for."""

    def __init__(
        self,
        home: Path,
        state: SubtaskState | None = None,
        index: int = 0,
        parallelism: int = 1,
        operator: DropDuplicates = WITHIN,
    ) -> None:
        self.store = open_store(str(home))
        state = state or SubtaskState()
        self.owned = key_group_range(index, parallelism, GROUPS)
        seen = seen_keys(SCHEMA, operator, GROUPS, state, self._rows(state))
        self.operator = Deduplicating(
            UID, SubtaskIndex(index), Attempt(1), seen, self.store, state.watermark_us
        )

    def passed(self, *rows: tuple[str, int]) -> list[str]:
        """Those of the rows that are its own and pass."""
        mine = [row for row in rows if hash_row([row[0]], [pa.string()]) % GROUPS in self.owned]
        batches = list(self.operator.process(records(*mine)))
        return [key for batch in batches for key in batch.column("key").to_pylist()]

    def snapshot(self, number: int = 1) -> OperatorSnapshot:
        checkpoint_id = CheckpointId(number)
        taken = self.operator.described(checkpoint_id, self.operator.snapshot(checkpoint_id)())
        self.operator.completed(checkpoint_id)
        return taken

    def _rows(self, state: SubtaskState) -> Iterator[pa.RecordBatch]:
        for keyed in state.keyed:
            file = keyed.file
            data = self.store.read_verified(file.path, file.length_bytes, file.crc32)
            yield from read_keyed_snapshot(data, keyed.key_groups, self.owned)


def restored(snapshots: list[OperatorSnapshot], parallelism: int) -> list[SubtaskState]:
    """What subtasks start from, as it comes over the wire."""
    snapshots = [OperatorSnapshot.from_json(json.loads(json.dumps(s.to_json()))) for s in snapshots]
    operator = OperatorDescription(UID, "dropduplicates", "seen", parallelism)
    manifest = Manifest(
        "job", Attempt(1), CheckpointId(1), 1, "checkpoint", 0, 0, GROUPS, (), snapshots
    )
    states = starting_state([operator], GROUPS, manifest, {})
    each = [states[UID, SubtaskIndex(index)] for index in range(parallelism)]
    return [SubtaskState.from_json(json.loads(json.dumps(state.to_json()))) for state in each]


def test_late_records_are_kept_for_who_takes_them_and_then_do_not_count_as_dropped(
    tmp_path: Path,
) -> None:
    subtask = Subtask(tmp_path)
    subtask.operator.keeps_late = True
    subtask.operator.on_watermark(5)
    assert subtask.passed(("a", 5), ("b", 6)) == ["b"]
    assert subtask.operator.late_rows == 0
    (late,) = subtask.operator.take_late()
    assert late.column("key").to_pylist() == ["a"]
    assert list(subtask.operator.take_late()) == []


def test_late_records_that_nobody_takes_are_not_kept(tmp_path: Path) -> None:
    subtask = Subtask(tmp_path)
    subtask.operator.on_watermark(5)
    subtask.passed(("a", 5))
    assert list(subtask.operator.take_late()) == []


def test_time_does_not_go_back(tmp_path: Path) -> None:
    subtask = Subtask(tmp_path)
    subtask.operator.on_watermark(20)
    subtask.operator.on_watermark(10)
    assert subtask.operator.watermark_us == 20
    assert subtask.passed(("a", 15)) == []


def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    subtask = Subtask(tmp_path)
    subtask.passed(("a", 1), ("b", 2))
    first = subtask.snapshot(1)
    subtask.passed(("a", 3))
    subtask.operator.on_watermark(3)
    second = subtask.snapshot(2)
    assert second.keyed == first.keyed
    assert (first.watermark_us, second.watermark_us) == (-(2**63), 3)


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_keys_and_time_are_there_again_at_any_parallelism(tmp_path: Path, parallelism: int) -> None:
    before = [Subtask(tmp_path, index=index, parallelism=2) for index in range(2)]
    for subtask in before:
        subtask.passed(*((key, 100 + place) for place, key in enumerate(KEYS)))
        subtask.operator.on_watermark(115)
    states = restored([subtask.snapshot() for subtask in before], parallelism)
    after = [Subtask(tmp_path, state, i, parallelism) for i, state in enumerate(states)]

    passed = [key for each in after for key in each.passed(*((key, 120) for key in KEYS))]
    forgotten = KEYS[:6]  # those of 100 to 105, ten microseconds later
    assert sorted(passed) == forgotten
    assert [each.passed(*((key, 115) for key in KEYS)) for each in after] == [[]] * parallelism


def test_a_key_group_whose_time_had_come_further_stays_there(tmp_path: Path) -> None:
    before = [Subtask(tmp_path, index=index, parallelism=2) for index in range(2)]
    for subtask, time_us in zip(before, (50, 100), strict=True):
        subtask.passed(*((key, 60) for key in KEYS))
        subtask.operator.on_watermark(time_us)
    (state,) = restored([subtask.snapshot() for subtask in before], 1)
    after = Subtask(tmp_path, state)

    assert after.passed(*((key, 60) for key in KEYS)) == [], "seen, or late where it was forgotten"
    again = after.passed(*((key, 101) for key in KEYS))
    assert again == [key for key in KEYS if hash_row([key], [pa.string()]) % GROUPS >= 4]


def test_a_key_group_stays_where_it_was_also_through_a_second_restore(tmp_path: Path) -> None:
    before = [Subtask(tmp_path, index=index, parallelism=2) for index in range(2)]
    for subtask, time_us in zip(before, (50, 100), strict=True):
        subtask.operator.on_watermark(time_us)
    (state,) = restored([subtask.snapshot() for subtask in before], 1)
    between = Subtask(tmp_path, state)
    between.operator.on_watermark(70)
    again = restored([between.snapshot()], 2)
    after = [Subtask(tmp_path, state, index, 2) for index, state in enumerate(again)]

    assert after[0].passed(*((key, 80) for key in KEYS)) != []
    assert after[1].passed(*((key, 80) for key in KEYS)) == [], "late, there, since the first time"
    assert after[1].passed(*((key, 101) for key in KEYS)) != []


def test_the_end_of_time_leaves_nothing_of_keys_that_are_forgotten(tmp_path: Path) -> None:
    subtask = Subtask(tmp_path)
    subtask.passed(("a", 1))
    subtask.operator.on_watermark(2**63 - 1)
    assert sum(state.rows for state in subtask.snapshot().keyed) == 0
