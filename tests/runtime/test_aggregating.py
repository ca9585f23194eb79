"""An operator whose state has not changed does not write it again."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import KeyedState
from stillframe.runtime.operators import Aggregating
from stillframe.state.aggregates import AggregateTable
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.store import open_store

SCHEMA = pa.schema([("key", pa.string())])
CALL = AggregateCall("count", None, "count", pa.int64())


class Counting:
    """A counting operator and the checkpoints it is asked for."""

    def __init__(self, home: Path) -> None:
        self.store = open_store(str(home))
        table = AggregateTable(SCHEMA, ["key"], [CALL], 8)
        self.operator = Aggregating(
            OperatorUid("count"), SubtaskIndex(0), Attempt(1), table, self.store
        )

    def count(self, *keys: str) -> None:
        list(self.operator.process(pa.record_batch([list(keys)], schema=SCHEMA)))

    def snapshot(self, checkpoint_id: int) -> tuple[KeyedState, ...]:
        number = CheckpointId(checkpoint_id)
        written = self.operator.snapshot(number)()
        return self.operator.described(number, written).keyed

    def completed(self, checkpoint_id: int) -> tuple[KeyedState, ...]:
        keyed = self.snapshot(checkpoint_id)
        self.operator.completed(CheckpointId(checkpoint_id))
        return keyed

    def files(self) -> list[str]:
        return self.store.list("shared/1")


@pytest.fixture
def counting(tmp_path: Path) -> Counting:
    return Counting(tmp_path)


def test_unchanged_state_is_referred_to_and_not_written(counting: Counting) -> None:
    counting.count("a", "b", "a")
    first = counting.completed(1)

    counting.count()
    assert counting.completed(2) == first
    assert counting.completed(3) == first
    assert counting.files() == ["count-0-aggregates-1.arrow"]


def test_changed_state_is_written(counting: Counting) -> None:
    counting.count("a")
    first = counting.completed(1)
    counting.count("a")
    second = counting.completed(2)

    assert counting.files() == ["count-0-aggregates-1.arrow", "count-0-aggregates-2.arrow"]
    assert [_counts(counting, keyed) for keyed in (first, second)] == [{"a": 1}, {"a": 2}]


def test_what_an_aborted_checkpoint_wrote_is_not_referred_to(counting: Counting) -> None:
    counting.count("a")
    counting.snapshot(1)
    counting.operator.aborted(CheckpointId(1))

    [state] = counting.completed(2)
    assert state.file.path == "shared/1/count-0-aggregates-2.arrow"


def test_a_change_while_the_snapshot_is_written_belongs_to_the_next(counting: Counting) -> None:
    counting.count("a")
    write = counting.operator.snapshot(CheckpointId(1))
    counting.count("a")
    counting.operator.described(CheckpointId(1), write())
    counting.operator.completed(CheckpointId(1))

    assert _counts(counting, counting.completed(2)) == {"a": 2}


def test_empty_state_has_no_file_however_often_it_is_asked_for(counting: Counting) -> None:
    assert counting.completed(1) == ()
    assert counting.completed(2) == ()
    assert counting.files() == []


def _counts(counting: Counting, keyed: tuple[KeyedState, ...]) -> dict[str, int]:
    [state] = keyed
    file = state.file
    data = counting.store.read_verified(file.path, file.length_bytes, file.crc32)
    batches = read_keyed_snapshot(data, state.key_groups, range(8))
    return {row["key"]: row["count"] for batch in batches for row in batch.to_pylist()}
