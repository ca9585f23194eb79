"""Epochs handed to a function on the driver, each with its own number and files."""

import os
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared_parts import parts

from stillframe.api.sinks import CommitterContext, SinkContext
from stillframe.connectors import staged
from stillframe.connectors.staged import StagedSink
from stillframe.errors import StorageError
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SubtaskIndex

SCHEMA = pa.schema([("n", pa.int64())])
UID = OperatorUid("sink")


class Collected:
    """A handler that keeps what it was given, and can be told to fail."""

    def __init__(self):
        self.epochs = []
        self.failing = False

    def __call__(self, epoch, mark, files):
        if self.failing:
            raise RuntimeError("the handler failed")
        assert all(os.path.isabs(file) for file in files)
        rows = [n for file in files for n in pq.read_table(file)["n"].to_pylist()]
        self.epochs.append((epoch, sorted(rows)))


@pytest.fixture
def collected():
    return Collected()


@pytest.fixture
def sink(tmp_path, collected):
    return StagedSink(str(tmp_path), collected, SCHEMA)


def stage(sink, *values, attempt=1, subtask=0):
    who = SinkContext("job", Attempt(attempt), UID, SubtaskIndex(subtask))
    writer = pickle.loads(pickle.dumps(sink)).open_writer(who)
    writer.write(pa.record_batch([pa.array(values, pa.int64())], SCHEMA))
    prepared = list(writer.rotate(CheckpointId(1))())
    writer.close()
    return prepared


def files_in(tmp_path):
    return list((tmp_path / "_stillframe" / "staging").iterdir())


def test_an_epoch_is_handed_over_whole_and_its_files_then_removed(sink, collected, tmp_path):
    committer = sink.open_committer(CommitterContext())

    committer.commit(Epoch(0), parts(stage(sink, 1, 2) + stage(sink, 3, subtask=1)))
    committer.commit(Epoch(1), parts([]))

    assert collected.epochs == [(0, [1, 2, 3]), (1, [])]
    assert files_in(tmp_path) == []


def test_a_repeated_commit_of_a_handled_epoch_calls_nobody(sink, collected):
    committables = stage(sink, 1)
    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))
    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))
    assert collected.epochs == [(0, [1])]


def test_a_crash_while_removing_the_files_does_not_hand_the_epoch_over_again(
    sink, collected, tmp_path, monkeypatch
):
    committables = [one for n in range(3) for one in stage(sink, n, subtask=n)]
    unlink, removed = os.unlink, []

    def crashing(path):
        if removed:
            raise KeyboardInterrupt
        unlink(path)
        removed.append(path)

    with monkeypatch.context() as patch:
        patch.setattr(staged.os, "unlink", crashing)
        with pytest.raises(KeyboardInterrupt):
            sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))
    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))

    assert collected.epochs == [(0, [0, 1, 2])]
    assert files_in(tmp_path) == []


def test_a_lost_file_is_named(sink, collected, tmp_path):
    committables = [one for n in range(3) for one in stage(sink, n, subtask=n)]
    os.unlink(tmp_path / committables[1]["staged"])
    with pytest.raises(StorageError, match="epoch 4 was staged in 3 files, of which"):
        sink.open_committer(CommitterContext()).commit(Epoch(4), parts(committables))
    assert collected.epochs == []


def test_a_handler_that_fails_gets_the_epoch_again(sink, collected):
    committables = stage(sink, 1)
    collected.failing = True
    with pytest.raises(RuntimeError, match="the handler failed"):
        sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))
    collected.failing = False
    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))
    assert collected.epochs == [(0, [1])]


def test_older_attempts_are_swept_but_not_what_is_still_to_be_handed_over(sink, tmp_path):
    stage(sink, 1)
    kept = stage(sink, 2)
    sink.open_committer(CommitterContext()).sweep("job", UID, Attempt(2), kept)
    assert [file.name for file in files_in(tmp_path)] == [os.path.basename(kept[0]["staged"])]


def test_the_handler_stays_on_the_driver(sink):
    travelled = pickle.loads(pickle.dumps(sink))
    assert travelled.handler is None
    assert travelled == sink
    with pytest.raises(AssertionError, match="stayed on the driver"):
        travelled.open_committer(CommitterContext())


def test_what_was_staged_under_another_uid_is_handed_over_from_its_own_directory(
    collected, tmp_path
):
    before = StagedSink(str(tmp_path / "write-1"), collected, SCHEMA)
    now = StagedSink(str(tmp_path / "write-2"), collected, SCHEMA)
    committables = stage(before, 1, 2) + stage(before, 3, subtask=1)

    now.open_committer(CommitterContext()).commit(Epoch(4), parts(committables))
    now.open_committer(CommitterContext()).commit(Epoch(4), parts(committables))

    assert collected.epochs == [(4, [1, 2, 3])]
    assert files_in(tmp_path / "write-1") == []


def test_committables_that_do_not_tell_their_directory_are_in_the_sinks_own(collected, tmp_path):
    sink = StagedSink(str(tmp_path / "write-1"), collected, SCHEMA)
    older = [{k: v for k, v in each.items() if k != "directory"} for each in stage(sink, 5)]

    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(older))

    assert collected.epochs == [(0, [5])]


def test_what_an_older_attempt_staged_under_another_uid_is_swept_and_nothing_of_other_sinks(
    collected, tmp_path
):
    before = StagedSink(str(tmp_path / "write-1"), collected, SCHEMA)
    kept = stage(before, 1)
    stage(before, 2)
    now = StagedSink(str(tmp_path / "write-2"), collected, SCHEMA)

    now.open_committer(CommitterContext()).sweep("job", OperatorUid("other"), Attempt(9), [])
    assert len(files_in(tmp_path / "write-1")) == 2
    now.open_committer(CommitterContext()).sweep("job", UID, Attempt(9), kept)
    assert len(files_in(tmp_path / "write-1")) == 1
