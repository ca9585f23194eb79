"""Staged epochs in a system with transactions, with an SQLite file as that system."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlite_sink import SqliteSink, SqliteSinkOnDriver, SqliteTarget, rows_in

from stillframe.api.sinks import CommitterContext, Prepared, SinkContext
from stillframe.connectors import transactional
from stillframe.errors import OutputRefused, StorageError, Unavailable
from stillframe.ids import Mark, Writer
from stillframe.storage.local import LocalStore
from stillframe.storage.staging import StagedFiles

SCHEMA = pa.schema([("id", pa.int64()), ("key", pa.int64())])


class House:
    """A job's store, and an SQLite file outside of it."""

    def __init__(self, directory, sink=SqliteSink):
        self.outside = str(directory / "outside.db")
        self.staging = StagedFiles(LocalStore(directory / "job"))
        self.sink = sink(self.outside)
        self.prepared_directory = directory / "job" / "prepared"

    def writer(self, attempt=1, subtask=0):
        context = SinkContext("job", attempt, "rows", subtask, "i1", self.staging)
        return self.sink.open_writer(context)

    def stage(self, checkpoint_id, *ids, attempt=1, subtask=0):
        """One part, as the committer is given it."""
        writer = self.writer(attempt, subtask)
        writer.write(batch(*ids))
        committables = writer.rotate(checkpoint_id)()
        writer.close()
        return Prepared(Mark(Writer("i1", "rows", subtask), checkpoint_id), tuple(committables))

    def commit(self, *parts, sink=None, accepts_missing=frozenset()):
        """By another process each time, as far as the committer can tell."""
        context = CommitterContext("job", self.staging, accepts_missing)
        committer = (sink or self.sink).open_committer(context)
        try:
            committer.commit(0, parts)
        finally:
            committer.close()

    def files(self):
        return sorted(path.name for path in self.prepared_directory.rglob("*") if path.is_file())

    def visible(self):
        return [id for id, _ in rows_in(self.outside)]


def batch(*ids):
    return pa.record_batch([pa.array(ids, pa.int64()), pa.array(ids, pa.int64())], SCHEMA)


@pytest.fixture
def house(tmp_path):
    return House(tmp_path)


def test_what_is_staged_is_seen_when_it_is_committed_and_not_before(house):
    part = house.stage(1, 10, 11)
    assert house.visible() == []

    house.commit(part)

    assert house.visible() == [10, 11]
    assert [name.rpartition(".")[2] for name in house.files()] == ["done"], "staged rows are gone"


def test_a_commit_that_is_repeated_finds_it_done(house):
    part = house.stage(1, 10)

    for _ in range(3):
        house.commit(part)

    assert house.visible() == [10]


def test_a_committer_that_died_before_it_noted_the_receipt_is_followed_by_one_that_finds_the_mark(
    house, monkeypatch
):
    part = house.stage(1, 10)
    with monkeypatch.context() as dying:
        dying.setattr(house.staging, "note", _die)
        with pytest.raises(KeyboardInterrupt):
            house.commit(part)
    assert house.visible() == [10]

    house.commit(part)

    assert house.visible() == [10]


def test_marks_that_somebody_has_deleted_are_not_missed_while_there_is_a_receipt(house):
    part = house.stage(1, 10)
    house.commit(part)
    with sqlite3.connect(house.outside) as emptied:
        emptied.execute("delete from marks")
        emptied.execute("delete from rows")

    house.commit(part)

    assert house.visible() == [], "what its consumer took away does not come back"


def test_a_mark_of_a_later_checkpoint_speaks_for_the_earlier_ones(house):
    first, second = house.stage(1, 10), house.stage(2, 20)
    house.commit(first, second)
    for name in house.files():
        house.staging.delete(f"rows/{name}")

    house.commit(first)  # an older checkpoint was restored by hand

    assert house.visible() == [10, 20]


def test_what_former_subtasks_prepared_has_marks_of_its_own(house):
    of_both = [house.stage(3, 10, subtask=0), house.stage(3, 11, subtask=1)]

    house.commit(*of_both)
    house.commit(house.stage(4, 12, subtask=0))
    house.commit(*of_both)

    assert house.visible() == [10, 11, 12]
    with sqlite3.connect(house.outside) as outside:
        marks = outside.execute("select * from marks order by writer").fetchall()
    assert marks == [("i1/rows/0", 4), ("i1/rows/1", 3)]


def test_a_mark_of_another_incarnation_says_nothing(house):
    other = house.stage(50, 10)
    house.commit(replace(other, mark=Mark(Writer("i2", "rows", 0), 50)))

    house.commit(house.stage(7, 70))

    assert house.visible() == [10, 70]


def test_all_subtasks_of_an_epoch_are_one_transaction_on_the_driver(tmp_path):
    house = House(tmp_path, SqliteSinkOnDriver)
    parts = [house.stage(1, 10, subtask=0), house.stage(1, 11, subtask=1)]
    epoch = Prepared(
        Mark(Writer("i1", "rows", None), 1), (*parts[0].committables, *parts[1].committables)
    )

    house.commit(epoch)
    house.commit(epoch)

    assert house.visible() == [10, 11]


def test_on_the_driver_only_the_last_receipt_is_kept(tmp_path):
    house = House(tmp_path, SqliteSinkOnDriver)
    committer = house.sink.open_committer(CommitterContext("job", house.staging))
    for checkpoint_id in (1, 2, 3):
        part = house.stage(checkpoint_id, checkpoint_id)
        committer.commit(0, [replace(part, mark=Mark(Writer("i1", "rows", None), checkpoint_id))])
    committer.close()

    assert len(house.files()) == 1
    assert house.visible() == [1, 2, 3]


def test_on_the_driver_an_epoch_that_is_committed_again_keeps_its_receipt(tmp_path):
    """The entry in the log that says so may not have been written."""
    house = House(tmp_path, SqliteSinkOnDriver)
    part = house.stage(1, 10)
    committer = house.sink.open_committer(CommitterContext("job", house.staging))
    for _ in range(2):
        committer.commit(0, [part])
    committer.close()

    assert [name.rpartition(".")[2] for name in house.files()] == ["done"]
    assert house.visible() == [10]


def test_an_epoch_without_rows_leaves_nothing(house):
    writer = house.writer()
    writer.write(batch())
    assert writer.rotate(1)() == []
    writer.close()
    assert house.files() == []


def test_a_large_epoch_is_staged_in_parts_while_records_flow(house, monkeypatch):
    monkeypatch.setattr(transactional.StagingWriter, "part_bytes", 100)
    part = house.stage(1, *range(100))
    writer = house.writer(subtask=1)
    for first in range(0, 100, 10):
        writer.write(batch(*range(first + 1_000, first + 1_010)))
    (committable,) = writer.rotate(1)()
    writer.close()
    assert len(committable["parts"]) == 10

    house.commit(part, Prepared(Mark(Writer("i1", "rows", 1), 1), (committable,)))

    assert house.visible() == [*range(100), *range(1_000, 1_100)]
    assert not [name for name in house.files() if name.endswith(".arrow")]


class FarStore(LocalStore):
    """As far away as a bucket."""

    has_network = True


def test_what_is_staged_across_a_network_is_compressed(house):
    near = house.stage(1, *[7] * 10_000)
    house.staging = StagedFiles(FarStore(house.prepared_directory.parent))
    far = house.stage(2, *[8] * 10_000)

    house.commit(near)
    house.commit(far)

    assert house.visible() == [7] * 10_000 + [8] * 10_000
    [near_bytes], [far_bytes] = ([each["bytes"] for each in p.committables] for p in (near, far))
    assert far_bytes < near_bytes / 10


def test_rows_that_are_gone_are_told_with_the_option_that_goes_on_without_them(house):
    part = house.stage(1, 10, 11)
    for name in house.files():
        house.staging.delete(f"rows/{name}")

    with pytest.raises(StorageError, match=r"2 rows .* checkpoint 1 are gone") as told:
        house.commit(part)
    assert house.visible() == []

    option = str(told.value).rpartition("acceptMissingOutput=")[2]
    house.commit(part, accepts_missing=frozenset([option]))
    house.commit(house.stage(2, 20))
    assert house.visible() == [20]


def test_rows_that_are_refused_are_kept_aside_and_the_job_ends_once(house):
    part = house.stage(1, 10, -1, 11, -2)

    with pytest.raises(OutputRefused, match=r"refused 2 rows of epoch 0, .* kept in prepared/rows"):
        house.commit(part)

    assert house.visible() == [10, 11], "the good rows are committed"
    (kept,) = (path for path in house.prepared_directory.rglob("*.parquet"))
    refused = pq.read_table(kept).to_pylist()
    assert [row["id"] for row in refused] == [-1, -2]
    assert {row["_refused_because"] for row in refused} == {"a negative id"}
    house.commit(part)  # the job was started again: the epoch is not stuck


def test_refused_rows_are_told_again_by_who_follows_one_that_died_before_it_told(
    house, monkeypatch
):
    part = house.stage(1, 10, -1)
    with monkeypatch.context() as dying:
        dying.setattr(house.staging, "note", _die)
        with pytest.raises(KeyboardInterrupt):
            house.commit(part)

    with pytest.raises(OutputRefused, match="refused 1 rows"):
        house.commit(part)


def test_a_sink_may_go_on_when_rows_are_refused(house, caplog):
    sink = replace(house.sink, on_refused="go on")

    house.commit(house.stage(1, 10, -1), sink=sink)

    assert house.visible() == [10]
    assert "refused 1 rows of epoch 0" in caplog.text


def test_refused_rows_are_never_swept(house):
    part = house.stage(1, -1)
    with pytest.raises(OutputRefused):
        house.commit(part)
    committer = house.sink.open_committer(CommitterContext("job", house.staging))

    committer.sweep("job", "rows", 9, [])

    assert [name.partition("-")[0] for name in house.files()] == ["refused"]


def test_a_system_that_cannot_be_reached_is_unavailable_and_the_next_try_connects_again(
    house, monkeypatch
):
    part = house.stage(1, 10)
    with monkeypatch.context() as cut:
        cut.setattr(SqliteTarget, "begin", _cut_off)
        with pytest.raises(Unavailable, match=r"sqlite .* cannot be reached \(cable\)"):
            house.commit(part)

    house.commit(part)

    assert house.visible() == [10]


def test_a_transaction_that_fails_leaves_neither_rows_nor_mark(house, monkeypatch):
    part = house.stage(1, 10)
    with monkeypatch.context() as failing:
        failing.setattr(house.staging, "read", _die)
        with pytest.raises(KeyboardInterrupt):
            house.commit(part)
    assert house.visible() == []

    house.commit(part)

    assert house.visible() == [10]


def test_a_sweep_removes_what_older_attempts_left_and_keeps_what_is_still_to_be_committed(house):
    kept = house.stage(1, 10, attempt=1)
    house.stage(2, 20, attempt=1)
    house.stage(3, 30, attempt=2)
    committer = house.sink.open_committer(CommitterContext("job", house.staging))

    committer.sweep("job", "rows", 2, kept.committables)

    assert sorted(name.partition("-")[0] for name in house.files()) == ["1", "2"]
    house.commit(kept)
    assert house.visible() == [10]


def test_a_receipt_is_forgotten_when_nobody_asks_again(house):
    part = house.stage(1, 10)
    house.commit(part)

    house.sink.open_committer(CommitterContext("job", house.staging)).forget(part.committables)

    assert house.files() == []


def _die(*args, **kwargs):
    raise KeyboardInterrupt


def _cut_off(*args, **kwargs):
    raise ConnectionError("cable")
