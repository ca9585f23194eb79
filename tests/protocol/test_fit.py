"""Whether a job fits a snapshot: every reason why not, at once, one line each."""

from __future__ import annotations

from dataclasses import replace

from stillframe.protocol.fit import Evolves, JobShape, Mismatch, fitted, in_words, mismatches
from stillframe.protocol.manifests import (
    ChannelState,
    FileHandle,
    KeyedState,
    Manifest,
    OperatorDescription,
    OperatorSnapshot,
    PendingCommit,
    Place,
)
from stillframe.protocol.restore import EdgeDescription


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


def told(job, manifest=SNAPSHOT, of_states=(), **allowed):
    return [str(each) for each in mismatches(job, fitted(job, manifest), of_states, **allowed)]


def test_a_job_with_the_same_operators_and_new_ones_fits_with_any_parallelism():
    assert told(FITTING) == []


def test_every_mismatch_is_told_at_once_one_line_each():
    job = JobShape((operator("read", "read"), operator("count", "transform")), (), 128, set())
    unfit = Mismatch("state x is a list in it and a value in the job", "give it another name")

    found = mismatches(job, fitted(job, SNAPSHOT), [unfit])

    assert [each.what for each in found] == [
        "it has 16 key groups and the job 128",
        "it holds state of 'sums' (sums), which the job does not have",
        "operator count is an aggregate in it and a transform in the job",
        "state x is a list in it and a value in the job",
        "it was looking for more splits of source read, which now has none to look for",
        "it holds records under way from one operator to another (read>count) that the job does"
        " not connect",
    ]
    words = in_words(SNAPSHOT, found).splitlines()
    assert words[0] == "checkpoint 6 of job 'views' does not fit this job, for 6 reasons:"
    assert [line[:2] for line in words[1:]] == ["- "] * 6


def test_a_state_with_other_columns_is_no_mismatch_unless_records_are_under_way():
    grown = Evolves("count", "sum is new and begins empty for what was kept before")

    assert told(FITTING, replace(SNAPSHOT, channels=()), [grown]) == []
    [line] = told(FITTING, SNAPSHOT, [grown])
    assert "records under way, and operator count has other columns in the job" in line


def test_one_mismatch_is_one_sentence():
    found = mismatches(replace(FITTING, max_parallelism=128), fitted(FITTING, SNAPSHOT))

    assert in_words(SNAPSHOT, found) == (
        "checkpoint 6 of job 'views' does not fit this job: it has 16 key groups and the job 128:"
        " set maxParallelism to 16, it cannot change"
    )


def test_state_that_no_operator_takes_is_named_and_may_be_left_out():
    job = replace(FITTING, operators=FITTING.operators[:2], edges=FITTING.edges[:1])

    [line] = told(job)
    assert "'sums' (sums), which the job does not have: add .uid(\"sums\")" in line
    assert told(job, allows_state_lost=True) == []


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
    [found] = mismatches(replace(FITTING, enumerated=set()), fitted(FITTING, SNAPSHOT))

    assert found.to_json() == {
        "operator": "read",
        "what": "it was looking for more splits of source read, which now has none to look for",
        "remedy": "let it follow its path as before, or begin again (fresh)",
    }


# --- operators whose uids nobody has given -----------------------------------------------------


def derived(uid, traits="by k", fed_by="read", kind="aggregate"):
    return replace(operator(uid, kind), place=Place(traits, ((fed_by,),)))


def of_sink(uid, target="json /out"):
    return replace(operator(uid, "write"), place=Place(target, ()))


def prepared(uid, *rows):
    commits = tuple(PendingCommit(6, {"rows": each, "staged": f"f{each}"}) for each in rows)
    return OperatorSnapshot(uid, 0, commits=commits)


DERIVED = replace(
    SNAPSHOT,
    operators=(operator("read", "read"), derived("count-1"), of_sink("write-1")),
    snapshots=(
        OperatorSnapshot("read", 0, items=({"id": "a", "position": {}, "times": {"count-1": 7}},)),
        holding("count-1"),
        prepared("write-1", 7, 5),
    ),
    channels=(under_way("read>count-1"), under_way("read>count-1/1#2")),
)
CHANGED = JobShape(
    operators=(operator("read", "read"), derived("count-2"), of_sink("write-2")),
    edges=(
        EdgeDescription("read>count-2", "hash", "count-2", 1),
        EdgeDescription("read>count-2/1#2", "hash", "count-2", 1),
    ),
    max_parallelism=16,
    enumerated={"read"},
)


def test_a_snapshot_is_put_into_the_uids_of_the_job_all_of_it():
    fit = fitted(CHANGED, DERIVED)

    assert mismatches(CHANGED, fit) == ()
    assert dict(fit.former) == {"count-2": "count-1", "write-2": "write-1"}
    assert [each.uid for each in fit.manifest.operators] == ["read", "count-2", "write-2"]
    assert [each.uid for each in fit.manifest.snapshots] == ["read", "count-2", "write-2"]
    assert fit.manifest.snapshots[0].items[0]["times"] == {"count-2": 7}
    assert [each.edge for each in fit.manifest.channels] == ["read>count-2", "read>count-2/1#2"]


def test_state_that_may_belong_to_two_operators_is_refused_with_both_and_the_line_to_add():
    two = (derived("count-2"), derived("count-3"))
    job = replace(CHANGED, operators=(CHANGED.operators[0], *two, of_sink("write-2")))

    assert told(job, DERIVED) == [
        "it holds state of 'count-1' (count-1), which could belong to 'count-2' (count-2),"
        " 'count-3' (count-3): add .uid(\"count-1\") to the one it belongs to, or set"
        " allowNonRestoredState to leave its state out"
    ]


def test_state_that_is_left_out_is_not_given_to_an_operator_that_has_its_uid_by_chance():
    job = replace(
        CHANGED, operators=(operator("read", "read"), derived("count-1"), derived("count-3"))
    )
    alike = replace(
        DERIVED,
        operators=(operator("read", "read"), derived("count-1"), derived("count-2")),
        snapshots=(holding("count-1"), holding("count-2")),
        channels=(),
    )

    fit = fitted(job, alike)

    assert [each.operator.uid for each in fit.lost] == ["count-1", "count-2"]
    assert fit.manifest.snapshots == ()
    assert mismatches(job, fit, allows_state_lost=True) == ()


def test_what_a_sink_has_prepared_is_refused_with_its_rows_whatever_is_allowed_for_state():
    job = replace(CHANGED, operators=(*CHANGED.operators[:2], of_sink("write-2", "json /new")))
    sentence = (
        "it holds 12 rows of epoch 5 that the sink 'write-1' (write-1) has prepared and not"
        " committed, and the job has no such sink, but 'write-2' (write-2): add"
        ' .uid("write-1") to the writeStream that is to write them'
    )

    assert told(job, DERIVED) == [sentence]
    assert told(job, DERIVED, allows_state_lost=True) == [sentence]


def test_nothing_that_drops_what_was_prepared_is_offered():
    job = replace(CHANGED, operators=CHANGED.operators[:2])

    [sentence] = told(job, DERIVED)

    for option in ("allowNonRestoredState", "fresh", "discard"):
        assert option not in sentence


def test_a_sink_that_has_committed_what_it_prepared_may_go():
    job = replace(CHANGED, operators=CHANGED.operators[:2])

    assert mismatches(job, fitted(job, DERIVED, {"write-1": 5})) == ()
    assert mismatches(job, fitted(job, DERIVED, {"write-1": 4})) != (), "an older epoch"


def test_how_far_event_time_had_come_is_not_lost_between_two_operators_of_it():
    of_time = derived("watermark-1", "of t", kind="withwatermark")
    snapshot = replace(
        DERIVED,
        operators=(operator("read", "read"), of_time),
        snapshots=(OperatorSnapshot("watermark-1", 0, watermark_us=7),),
        channels=(),
    )
    two = [replace(of_time, uid=uid, name=uid) for uid in ("watermark-2", "watermark-3")]

    [sentence] = told(replace(CHANGED, operators=(operator("read", "read"), *two)), snapshot)
    assert "which could belong to 'watermark-2' (watermark-2), 'watermark-3'" in sentence
    assert told(replace(CHANGED, operators=(operator("read", "read"),)), snapshot) == []
