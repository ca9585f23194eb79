"""What all subtasks do with snapshots and sinks, told with one that is stepped by hand."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from stillframe.api.sinks import Committer, Sink, SinkWriter
from stillframe.errors import StorageError
from stillframe.ids import Writer
from stillframe.protocol.inline import INLINE_BYTES_MAX
from stillframe.protocol.manifests import FileHandle, PendingCommit
from stillframe.runtime.operators import RunningOperator

SCHEMA = pa.schema([("id", pa.int64())])
OLDER_FILE = FileHandle("shared/1/sum-0-sums-7.arrow", 100, 1)
WRITER = Writer("", "write", 0)
NEWER_FILE = FileHandle("shared/1/sum-0-sums-8.arrow", 40, 2)


def batch(*ids):
    return pa.record_batch([list(ids)], schema=SCHEMA)


class ListSink(Sink, SinkWriter):
    """Each epoch is one committable: the ids in it."""

    def __init__(self, fails=False):
        self.epoch = []
        self.fails = fails

    def open_writer(self, context):
        return self

    def open_committer(self, context):
        return NoCommitter()

    def describe(self):
        return "list"

    def write(self, records):
        self.epoch += records["id"].to_pylist()

    def rotate(self, checkpoint_id):
        ended, self.epoch = self.epoch, []

        def prepare():
            if self.fails:
                raise StorageError("the sink's disk is full")
            return [{"ids": ended}] if ended else []

        return prepare

    def close(self):
        pass


class NoCommitter(Committer):
    def commit(self, epoch, prepared):
        raise AssertionError("the slot commits")

    def sweep(self, job, uid, older_than, keep):
        raise AssertionError("the driver sweeps")


class CoordinatorSink(ListSink):
    commits_at_coordinator = True


# --- snapshots -------------------------------------------------------------------------------


def test_a_state_that_cannot_be_written_declines_this_checkpoint_only(new_inner):
    inner = new_inner()
    inner.summing.broken = StorageError("no space left")
    inner.barriers(1)
    inner.events.write(inner.subtask, 1)
    assert inner.events.take()[1:] == [("declined", 1, "no space left")]

    inner.summing.broken = None
    inner.barriers(2)
    inner.events.write(inner.subtask, 2)
    assert inner.events.take()[-1][:2] == ("acknowledged", 2)


def test_what_is_written_for_an_aborted_checkpoint_is_given_back_and_not_acknowledged(new_inner):
    inner = new_inner()
    inner.summing.files = (OLDER_FILE, NEWER_FILE)
    inner.barriers(8)
    inner.subtask.on_abort(8)
    inner.events.write(inner.subtask, 8)

    assert inner.events.take()[1:] == [("unwanted", (NEWER_FILE.path,))]


def test_a_file_of_an_older_checkpoint_counts_as_state_but_not_as_written(new_inner):
    inner = new_inner()
    inner.summing.files = (OLDER_FILE, NEWER_FILE)
    inner.barriers(8)
    inner.events.write(inner.subtask, 8)

    timings = inner.events.take()[-1][3]
    assert (timings.bytes_written, timings.state_bytes) == (40, 140)


def test_state_that_is_kept_in_the_metadata_counts_as_written_every_time(
    new_inner,
):
    inner = new_inner()
    inner.summing.files = (replace(OLDER_FILE, data=bytes(100)), NEWER_FILE)
    inner.barriers(8)
    inner.events.write(inner.subtask, 8)

    timings = inner.events.take()[-1][3]
    assert (timings.bytes_written, timings.state_bytes) == (140, 140)


def test_more_state_than_an_acknowledgement_can_hold_declines_this_checkpoint_only(new_inner):
    inner = new_inner(sink=ListSink())
    inner.inputs[0].send(batch(1, 2))
    inner.summing.files = (FileHandle(NEWER_FILE.path, INLINE_BYTES_MAX + 1, 2, b"too long"),)
    inner.barriers(8)
    inner.events.write(inner.subtask, 8)
    [declined] = [said for said in inner.events.take() if said[0] == "declined"]
    assert "take 41943041 bytes together, more than the 41943040 that" in declined[2]

    inner.summing.files = (FileHandle(NEWER_FILE.path, 5, 2, b"small"),)
    inner.barriers(9)
    inner.events.write(inner.subtask, 9)
    assert acknowledged_commits(inner.events) == [PendingCommit(8, {"ids": [1, 2]}, WRITER)]


# --- sinks -----------------------------------------------------------------------------------


def acknowledged_commits(events):
    """What the last acknowledgement says is still to be committed."""
    said = [each for each in events.take() if each[0] == "acknowledged"]
    return [commit for operator in said[-1][2] for commit in operator.commits]


def test_a_sink_commits_when_its_checkpoint_is_complete_and_reports_it_when_done(new_inner):
    inner = new_inner(sink=ListSink())
    inner.inputs[0].send(batch(1, 2))
    inner.barriers(1)
    inner.events.write(inner.subtask, 1)
    assert acknowledged_commits(inner.events) == [PendingCommit(1, {"ids": [1, 2]}, WRITER)]

    inner.subtask.on_complete(1, 0)
    assert inner.events.take() == [("commit", 0, ({"ids": [1, 2]},))]
    inner.subtask.on_committed(*inner.events.commits[0])
    assert inner.events.take() == [("committed", 1)]
    assert inner.subtask.records_written == 2


def test_a_completion_that_comes_twice_or_late_is_committed_once(new_inner):
    inner = new_inner(sink=ListSink())
    for checkpoint_id in (1, 2):
        inner.inputs[0].send(batch(checkpoint_id))
        inner.barriers(checkpoint_id)
        inner.events.write(inner.subtask, checkpoint_id)
        inner.events.take()
        inner.subtask.on_complete(checkpoint_id, checkpoint_id - 1)
        inner.subtask.on_complete(checkpoint_id, checkpoint_id - 1)
    inner.subtask.on_complete(1, 0)

    for sink, checkpoint_id in inner.events.commits:
        inner.subtask.on_committed(sink, checkpoint_id)
    assert [checkpoint_id for _, checkpoint_id in inner.events.commits] == [1, 2]
    assert [said for said in inner.events.take() if said[0] == "committed"] == [
        ("committed", 1),
        ("committed", 2),
    ]


def test_an_aborted_checkpoints_records_are_in_the_next_one(new_inner):
    inner = new_inner(sink=ListSink())
    inner.inputs[0].send(batch(1))
    inner.barriers(1)
    inner.subtask.on_abort(1)
    inner.events.write(inner.subtask, 1)
    inner.inputs[0].send(batch(2))
    inner.barriers(2)
    inner.events.write(inner.subtask, 2)

    assert acknowledged_commits(inner.events) == [
        PendingCommit(1, {"ids": [1]}, WRITER),
        PendingCommit(2, {"ids": [2]}, WRITER),
    ]
    inner.subtask.on_complete(2, 0)
    assert inner.events.take() == [("commit", 0, ({"ids": [1]}, {"ids": [2]}))]


class Whole(RunningOperator):
    """Says all it has got at each barrier, and nothing else."""

    def __init__(self):
        self.ids = []

    def process(self, records):
        self.ids += records["id"].to_pylist()
        return ()

    def on_barrier(self):
        return (batch(*self.ids),)


def test_what_is_said_at_a_barrier_belongs_to_the_epoch_it_ends(new_inner):
    inner = new_inner(head=Whole(), sink=ListSink())
    inner.inputs[0].send(batch(1))
    inner.barriers(1)
    inner.events.write(inner.subtask, 1)
    assert acknowledged_commits(inner.events) == [PendingCommit(1, {"ids": [1]}, WRITER)]
    assert inner.sent() == [[1], inner.barrier(1)]


def test_of_epochs_that_bring_everything_an_aborted_one_is_left_out(new_inner):
    sink = ListSink()
    sink.is_whole = True
    inner = new_inner(head=Whole(), sink=sink)
    inner.inputs[0].send(batch(1))
    inner.barriers(1)
    inner.subtask.on_abort(1)
    inner.events.write(inner.subtask, 1)
    inner.inputs[0].send(batch(2))
    inner.barriers(2)
    inner.events.write(inner.subtask, 2)

    assert acknowledged_commits(inner.events) == [PendingCommit(2, {"ids": [1, 2]}, WRITER)]


def test_an_epoch_still_being_prepared_is_waited_for_by_the_checkpoint_after_an_aborted_one(
    new_inner,
):
    """Found by the simulator: the later snapshot was written first, and the earlier epoch lost."""
    inner = new_inner(sink=ListSink())
    inner.inputs[0].send(batch(1))
    inner.barriers(1)
    inner.subtask.on_abort(1)
    inner.inputs[0].send(batch(2))
    inner.barriers(2)
    inner.events.take()

    inner.events.write(inner.subtask, 2)
    assert inner.events.take() == [], "the epoch of checkpoint 1 is not prepared yet"
    inner.events.write(inner.subtask, 1)

    assert acknowledged_commits(inner.events) == [
        PendingCommit(1, {"ids": [1]}, WRITER),
        PendingCommit(2, {"ids": [2]}, WRITER),
    ]


def test_records_of_a_checkpoint_declined_for_its_state_are_in_the_next_one(new_inner):
    inner = new_inner(sink=ListSink())
    inner.summing.broken = StorageError("no space left")
    inner.inputs[0].send(batch(1))
    inner.barriers(1)
    inner.events.write(inner.subtask, 1)
    inner.summing.broken = None
    inner.barriers(2)
    inner.events.write(inner.subtask, 2)

    assert acknowledged_commits(inner.events) == [PendingCommit(1, {"ids": [1]}, WRITER)]


def test_a_sink_that_cannot_prepare_ends_the_attempt(new_inner):
    inner = new_inner(sink=ListSink(fails=True))
    inner.inputs[0].send(batch(1))
    inner.barriers(1)

    with pytest.raises(StorageError, match="the sink's disk is full"):
        inner.events.write(inner.subtask, 1)


def test_a_restored_sink_commits_what_its_checkpoint_held(new_inner):
    inner = new_inner(sink=ListSink(), restored=[PendingCommit(4, {"ids": [9]}, WRITER)])

    inner.subtask.on_complete(4, 3)

    assert inner.events.take() == [("commit", 3, ({"ids": [9]},))]


def test_what_commits_at_the_coordinator_is_forgotten_here_when_the_checkpoint_is_complete(
    new_inner,
):
    inner = new_inner(sink=CoordinatorSink())
    inner.inputs[0].send(batch(1))
    inner.barriers(1)
    inner.events.write(inner.subtask, 1)
    inner.events.take()

    inner.subtask.on_complete(1, 0)
    assert inner.events.take() == []
    inner.inputs[0].send(batch(2))
    inner.barriers(2)
    inner.events.write(inner.subtask, 2)
    assert acknowledged_commits(inner.events) == [PendingCommit(2, {"ids": [2]}, WRITER)]
