"""A sink in a chain: what it prepares is looked at, and a system that is away is waited for."""

from __future__ import annotations

import pytest

from stillframe.api.sinks import Committer, Sink, SinkContext, SinkWriter
from stillframe.errors import Unavailable, UserCodeError
from stillframe.ids import Mark, Writer
from stillframe.protocol.commits import Commit
from stillframe.protocol.manifests import PendingCommit
from stillframe.runtime.writing import Writing, parts_of

CONTEXT = SinkContext("job", 1, "write", 0, "i1")


class OutsideSink(Sink, SinkWriter, Committer):
    """Prepares what it is told to; is away for the first tries."""

    def __init__(self, committables=(), away=0):
        self.committables = committables
        self.away = away
        self.committed = []

    def open_writer(self, context):
        return self

    def open_committer(self, context):
        return self

    def describe(self):
        return "outside"

    def write(self, batch):
        pass

    def rotate(self, checkpoint_id):
        return lambda: self.committables

    def commit(self, epoch, prepared):
        if self.away:
            self.away -= 1
            raise Unavailable("outside cannot be reached")
        self.committed += prepared

    def sweep(self, job, uid, older_than, keep):
        pass

    def close(self):
        pass


def writing(sink):
    return Writing(CONTEXT, sink, sink, ())


def test_a_committable_that_is_not_json_is_told_with_the_sink():
    prepare = writing(OutsideSink([{"rows": {1, 2}}])).snapshot(7)

    with pytest.raises(UserCodeError, match="sink outside has prepared a committable that is not"):
        prepare()


def test_nan_is_not_json_either():
    prepare = writing(OutsideSink([{"rows": float("nan")}])).snapshot(7)

    with pytest.raises(UserCodeError, match="not JSON"):
        prepare()


def test_committables_that_hold_the_rows_themselves_are_told_with_their_size_and_what_to_do():
    prepare = writing(OutsideSink([{"rows": "x" * 10_000_000}])).snapshot(7)

    with pytest.raises(UserCodeError, match=r"10,000,\d+ bytes .* keep rows in files"):
        prepare()


def test_a_system_that_is_away_is_tried_again_later_each_time_and_what_is_waited_for_is_said():
    sink = OutsideSink(away=3)
    operator, waits, said = writing(sink), [], []

    def wait(seconds):
        waits.append(seconds)
        said.append(operator.awaits)
        return False

    commit = Commit(7, (PendingCommit(7, {"f": "a"}, CONTEXT.writer),))
    assert operator.commit_patiently(0, commit, wait)

    assert waits == [0.2, 0.4, 0.8]
    assert said[-1] == "outside cannot be reached; tried 3 times to commit epoch 0"
    assert operator.awaits is None
    assert [part.mark for part in sink.committed] == [Mark(CONTEXT.writer, 7)]


def test_a_slot_that_ends_does_not_wait_any_more():
    sink = OutsideSink(away=9)

    commit = Commit(7, (PendingCommit(7, {"f": "a"}, CONTEXT.writer),))
    assert not writing(sink).commit_patiently(0, commit, lambda seconds: True)
    assert sink.away == 8


def test_parts_are_by_who_prepared_them_and_for_which_checkpoint():
    former, own = Writer("i1", "write", 1), Writer("i1", "write", 0)
    pending = [
        PendingCommit(7, {"f": "a"}, former),
        PendingCommit(7, {"f": "b"}, own),
        PendingCommit(8, {"f": "c"}, own),
        PendingCommit(7, {"f": "d"}, own),
    ]

    parts = [(part.mark, [each["f"] for each in part.committables]) for part in parts_of(pending)]
    assert parts == [(Mark(former, 7), ["a"]), (Mark(own, 7), ["b", "d"]), (Mark(own, 8), ["c"])]
