"""Whether a job fits a snapshot: every reason why not, at once, one line each."""

from __future__ import annotations

from dataclasses import replace

from stillframe.protocol.fit import JobShape, Mismatch, in_words, mismatches
from stillframe.protocol.manifests import (
    ChannelState,
    FileHandle,
    KeyedState,
    Manifest,
    OperatorDescription,
    OperatorSnapshot,
)
from stillframe.protocol.restore import EdgeDescription
from stillframe.protocol.savepoints import without_operators


def operator(uid, kind="aggregate", parallelism=1):
    return OperatorDescription(uid, kind, uid, parallelism)


def holding(uid):
    state = KeyedState("aggregates", FileHandle(f"{uid}.arrow", 1, 1), (0,), 1, "")
    return OperatorSnapshot(uid, 0, keyed=(state,))


def under_way(edge):
    return ChannelState(edge, 0, 0, "input", FileHandle("f", 9, 1), 0, 9, 1)


SNAPSHOT = Manifest(
    job="views",
    attempt=1,
    checkpoint_id=6,
    epoch=5,
    kind="checkpoint",
    triggered_at_ms=0,
    completed_at_ms=0,
    max_parallelism=16,
    operators=(operator("read", "read"), operator("count"), operator("sums")),
    snapshots=(
        OperatorSnapshot("read", 0, items=({"id": "a", "position": {}},)),
        holding("count"),
        holding("sums"),
    ),
    channels=(under_way("read>count"), under_way("read>sums")),
    enumerators={"read": {"state": {}, "is_last": False}},
)
FITTING = JobShape(
    operators=(operator("read", "read", 3), operator("count"), operator("sums"), operator("new")),
    edges=(
        EdgeDescription("read>count", "hash", "count", 1),
        EdgeDescription("read>sums", "hash", "sums", 1),
    ),
    max_parallelism=16,
    enumerated={"read"},
)


def told(job, manifest=SNAPSHOT, of_states=()):
    return [str(each) for each in mismatches(job, manifest, of_states)]


def test_a_job_with_the_same_operators_and_new_ones_fits_with_any_parallelism():
    assert told(FITTING) == []


def test_every_mismatch_is_told_at_once_one_line_each():
    job = JobShape((operator("read", "read"), operator("count", "transform")), (), 128, set())
    unfit = Mismatch("state x is a list in it and a value in the job", "give it another name")

    found = mismatches(job, SNAPSHOT, [unfit])

    assert [each.what for each in found] == [
        "it has 16 key groups and the job 128",
        "it holds state of 'sums' (sums), which the job does not have",
        "operator count is an aggregate in it and a transform in the job",
        "state x is a list in it and a value in the job",
        "it was looking for more splits of source read, which now has none to look for",
        "it holds records under way from one operator to another (read>count) that the job does"
        " not connect",
        "it holds records under way from one operator to another (read>sums) that the job does"
        " not connect",
    ]
    words = in_words(SNAPSHOT, found).splitlines()
    assert words[0] == "checkpoint 6 of job 'views' does not fit this job, for 7 reasons:"
    assert [line[:2] for line in words[1:]] == ["- "] * 7


def test_one_mismatch_is_one_sentence():
    found = mismatches(replace(FITTING, max_parallelism=128), SNAPSHOT)

    assert in_words(SNAPSHOT, found) == (
        "checkpoint 6 of job 'views' does not fit this job: it has 16 key groups and the job 128:"
        " set maxParallelism to 16, it cannot change"
    )


def test_state_that_no_operator_takes_is_named_and_may_be_left_out():
    job = replace(FITTING, operators=FITTING.operators[:2], edges=FITTING.edges[:1])

    assert any("'sums' (sums), which the job does not have" in line for line in told(job))
    assert told(job, without_operators(SNAPSHOT, {"sums"})) == []


def test_an_operator_that_held_nothing_may_go_and_may_become_another_kind():
    empty = replace(SNAPSHOT, snapshots=(OperatorSnapshot("count", 0),), channels=())
    gone = replace(FITTING, operators=(operator("read", "read"),), edges=())
    other = replace(FITTING, operators=(operator("read", "read"), operator("count", "join")))

    assert told(gone, empty) == []
    assert told(other, empty) == []


def test_state_made_by_hand_fits_an_operator_of_any_kind():
    by_hand = replace(
        SNAPSHOT,
        operators=(
            operator("read", "read"),
            *(operator(u, "savepoint") for u in ("count", "sums")),
        ),
    )

    assert told(FITTING, by_hand) == []


def test_a_mismatch_is_there_for_machines_too():
    [found] = mismatches(replace(FITTING, enumerated=set()), SNAPSHOT)

    assert found.to_json() == {
        "operator": "read",
        "what": "it was looking for more splits of source read, which now has none to look for",
        "remedy": "let it follow its path (followInterval) as before, or begin anew (fresh)",
    }
