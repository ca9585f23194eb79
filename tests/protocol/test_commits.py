"""What a sink subtask keeps, snapshots and commits."""

from stillframe.ids import Writer
from stillframe.protocol.commits import Commit, PendingCommits
from stillframe.protocol.manifests import PendingCommit

A, B, C = {"file": "a"}, {"file": "b"}, {"file": "c"}


def held(checkpoint_id, *committables):
    return tuple(PendingCommit(checkpoint_id, each) for each in committables)


def test_what_was_prepared_is_committed_when_its_checkpoint_is_complete():
    pending = PendingCommits()

    assert pending.on_prepared(1, [A, B]) == (PendingCommit(1, A), PendingCommit(1, B))
    assert pending.on_complete(1) == Commit(1, held(1, A, B))


def test_what_is_not_yet_committed_is_in_the_next_snapshot_too():
    pending = PendingCommits()
    pending.on_prepared(1, [A])
    pending.on_complete(1)

    assert pending.on_prepared(2, [B]) == (PendingCommit(1, A), PendingCommit(2, B))


def test_what_was_committed_is_forgotten():
    pending = PendingCommits()
    pending.on_prepared(1, [A])
    pending.on_complete(1)
    pending.on_committed(1)

    assert pending.on_prepared(2, [B]) == (PendingCommit(2, B),)
    assert pending.on_complete(2).prepared == (PendingCommit(2, B),)


def test_an_aborted_checkpoints_records_come_out_with_the_next_that_completes():
    pending = PendingCommits()
    pending.on_prepared(1, [A])
    pending.on_prepared(2, [B])

    assert pending.on_complete(2) == Commit(2, (*held(1, A), *held(2, B)))


def test_where_every_epoch_brings_everything_the_last_one_is_enough():
    pending = PendingCommits(is_whole=True)
    pending.on_prepared(1, [A])

    assert pending.on_prepared(2, [B]) == (PendingCommit(2, B),)
    assert pending.on_complete(1) == Commit(1, held(1, A)), "the checkpoints may overlap"
    assert pending.on_complete(2) == Commit(2, held(2, B))
    assert pending.on_prepared(3, []) == (), "nothing is everything then"


def test_a_later_epoch_prepared_early_is_neither_in_the_snapshot_nor_in_the_commit():
    pending = PendingCommits()
    pending.on_prepared(2, [B])

    assert pending.on_prepared(1, [A]) == (PendingCommit(1, A),)
    assert pending.on_complete(1) == Commit(1, held(1, A))
    pending.on_committed(1)
    assert pending.on_complete(2) == Commit(2, held(2, B))


def test_told_twice_that_a_checkpoint_is_complete_it_commits_the_rest():
    pending = PendingCommits()
    pending.on_prepared(1, [A])

    assert pending.on_complete(1) == pending.on_complete(1)
    pending.on_committed(1)
    assert pending.on_complete(1) == Commit(1, ())


def test_a_restored_sink_commits_what_its_checkpoint_held():
    pending = PendingCommits([PendingCommit(3, A), PendingCommit(4, B)])

    assert pending.on_complete(4) == Commit(4, (*held(3, A), *held(4, B)))
    assert pending.on_prepared(5, [C])[-1] == PendingCommit(5, C)


def test_what_was_committed_is_settled_when_a_checkpoint_completes_that_no_longer_holds_it():
    pending = PendingCommits()
    pending.on_prepared(1, [A])
    assert pending.on_complete(1).settled == ()
    pending.on_committed(1)
    pending.on_prepared(2, [B])

    assert pending.on_complete(2) == Commit(2, held(2, B), settled=(A,))
    pending.on_committed(2)
    assert pending.on_complete(3).settled == (B,), "once each"


def test_what_a_snapshot_took_along_before_its_commit_was_done_is_settled_one_later():
    pending = PendingCommits()
    pending.on_prepared(1, [A])
    pending.on_complete(1)
    pending.on_prepared(2, [B])
    pending.on_committed(1)

    assert pending.on_complete(2).settled == (), "a restart from 2 commits A once more"
    pending.on_committed(2)
    pending.on_prepared(3, [])
    assert pending.on_complete(3).settled == (A, B)


def test_what_was_restored_is_settled_when_a_checkpoint_of_the_new_attempt_is_complete():
    pending = PendingCommits([PendingCommit(3, A), PendingCommit(4, B)])
    assert pending.on_complete(4).settled == ()
    pending.on_committed(4)
    pending.on_prepared(5, [C])

    assert pending.on_complete(5) == Commit(5, held(5, C), settled=(A, B))


def test_what_a_former_subtask_prepared_stays_its_work():
    former, now = Writer("i", "w", 1), Writer("i", "w", 0)
    pending = PendingCommits([PendingCommit(3, A, former), PendingCommit(3, B)], writer=now)

    assert pending.on_prepared(4, [C]) == (
        PendingCommit(3, A, former),
        PendingCommit(3, B, now),
        PendingCommit(4, C, now),
    )


def test_what_was_prepared_out_of_order_is_committed_in_the_order_of_checkpoints():
    pending = PendingCommits([PendingCommit(4, B), PendingCommit(3, A)])
    pending.on_prepared(6, [C])
    pending.on_prepared(5, [A])

    assert [each.checkpoint_id for each in pending.on_complete(6).prepared] == [3, 4, 5, 6]
