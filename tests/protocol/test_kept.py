"""A job's past: records as bytes and back, and what they tell together."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stillframe.errors import Blame, SnapshotDamaged, StorageError
from stillframe.ids import Attempt, SlotIndex
from stillframe.protocol.documents import encode_document
from stillframe.protocol.failures import (
    AttemptBegun,
    AttemptEnded,
    AttemptPhases,
    Failure,
    Restored,
    SlotRead,
)
from stillframe.protocol.figures import Figures, Moment, Triggered, driver_lost
from stillframe.protocol.joblog import JobRecord
from stillframe.protocol.kept import (
    RECORD_VERSION,
    KeptHistory,
    Totals,
    decode_kept,
    encode_kept,
    within_bounds,
)
from stillframe.protocol.manifests import SubtaskTimings
from stillframe.protocol.statistics import SubtaskStatistics, TaskShape

TASKS = (TaskShape("v1", "read", 1), TaskShape("v2", "count", 1))
TIMINGS = SubtaskTimings(1.5, 2.0, 3.0, 4.0, 5, 6, 7, task="read", subtask=0)
TOTALS = {"completed": 0, "failed": 0, "restored": 0}
FAILURE = Failure(2, 1, 4_711, "slot 1 was lost", "lost slot", 1.5, "count", 0, 1)


def at(seconds):
    return Moment(1_000_000 + round(seconds * 1000), seconds)


def triggered(number, attempt=1, seconds=0.0, kind="CHECKPOINT"):
    return Triggered(number, attempt, kind, TASKS, at(seconds))


def begun(attempt, restored=None):
    source = None if restored is None else Restored(restored, 1, False, f"chk-{restored}")
    return AttemptBegun(attempt, attempt * 100, source)


def completed(number, figures=None):
    figures = figures or Figures()
    figures.on_triggered(triggered(number))
    return figures.on_completed(number, f"/chk/{number}", 100, at(1.0))


RECORDS = [
    completed(7),
    begun(3),
    begun(3, restored=7),
    AttemptPhases(3, 1, 2, 3, 4, 5, None, 700),
    AttemptEnded(3, 5_000, "stopped"),
    FAILURE,
    replace(FAILURE, restart_delay_seconds=None, task=None, subtask=None, slot=None),
    replace(FAILURE, blame=Blame("sink s", "OSError", True, "a.py:1 in f", "…", "w0", "epoch 3")),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_is_read_back_as_it_was_written(record):
    data = encode_kept(record, Totals(1, 2, 3))

    assert decode_kept(data, "here") == ((record,), Totals(1, 2, 3))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_torn_or_altered_record_is_not_believed(record):
    data = encode_kept(record, Totals())

    for broken in (data[:-20], data[: len(data) // 2], data.replace(b'"attempt":', b'"attemps":')):
        with pytest.raises(SnapshotDamaged, match="here is damaged"):
            decode_kept(broken, "here")


@given(
    st.sampled_from(RECORDS), st.sampled_from(["7", "null", '"x"', "[]", "{}", "-1.5"]), st.data()
)
def test_a_record_with_a_field_of_another_type_is_damage_or_still_a_record(record, value, data):
    """Whatever somebody writes there, who reads a history meets nothing but one sentence."""
    written = json.loads(encode_kept(record, Totals()))
    field = data.draw(st.sampled_from(sorted(written["body"])))
    body = {**written["body"], field: json.loads(value)}
    altered = encode_document(body, RECORD_VERSION, "here")

    try:
        (again,), _ = decode_kept(altered, "here")
    except SnapshotDamaged:
        return
    assert type(again) is type(record)


def test_a_record_of_the_version_before_is_read():
    kept = {"record": "failure", "attempt": 2, "number": 1, "at_ms": 4_711, "kind": "bystander"}
    more = {"reason": "slot 1 was lost", "task": "count", "subtask": 0, "slot": 1}
    body = {**kept, **more, "restart_delay_ms": 1_500, "totals": TOTALS}

    assert decode_kept(encode_document(body, 1, "it"), "it") == ((FAILURE,), Totals())
    restored = {"id": 7, "restore_timestamp": 1, "is_savepoint": False, "external_path": "chk-7"}
    body = {"record": "begun", "attempt": 3, "at_ms": 300, "restored": restored, "totals": TOTALS}
    assert decode_kept(encode_document(body, 2, "it"), "it")[0] == (begun(3, restored=7),)


def test_a_record_of_a_newer_stillframe_is_refused_by_name():
    data = encode_kept(FAILURE, Totals()).replace(b'"format_version":4', b'"format_version":5')

    with pytest.raises(StorageError, match="newer Stillframe"):
        decode_kept(data, "here")


# --- one driver ---


def test_a_checkpoint_is_under_way_until_it_is_complete():
    figures = Figures()
    figures.on_triggered(triggered(1))
    figures.on_acknowledged(1, "v2", TIMINGS, at(0.5))

    [under_way] = figures.kept(at(2.0)).under_way
    assert (under_way.status, under_way.end_to_end_ms) == ("IN_PROGRESS", 2_000)
    figures.on_acknowledged(1, "v1", TIMINGS, at(0.75))
    over = figures.on_completed(1, "/chk/1", 100, at(1.0))

    assert [part.vertex for part in over.subtasks] == ["v1", "v2"], "in the order of the plan"
    assert [part.end_to_end_ms for part in over.subtasks] == [750, 500]
    assert (over.end_to_end_ms, over.acknowledged_at_ms) == (1_000, 1_000_750)
    assert figures.kept(at(2.0)).under_way == ()


def test_told_a_second_time_or_too_late_nothing_changes():
    figures = Figures()
    figures.on_triggered(triggered(1))
    figures.on_acknowledged(1, "v1", TIMINGS, at(0.5))
    figures.on_acknowledged(1, "v1", TIMINGS, at(0.9))
    over = figures.on_completed(1, None, 0, at(1.0))

    assert [part.end_to_end_ms for part in over.subtasks] == [500]
    assert figures.on_completed(1, None, 0, at(1.1)) is None
    assert figures.on_aborted(1, "too late", at(1.1)) is None
    figures.on_acknowledged(1, "v2", TIMINGS, at(1.2))
    assert figures.kept(at(2.0)).checkpoints == (over,)
    assert figures.totals == Totals(completed=1)


def test_what_is_under_way_when_an_attempt_is_over_has_failed():
    figures = Figures()
    figures.on_triggered(triggered(1))
    figures.on_triggered(triggered(2, kind="SAVEPOINT"))

    over = figures.on_attempt_over("slot 1 was lost", at(3.0))

    assert [(each.checkpoint_id, each.failure) for each in over] == [
        (1, "slot 1 was lost"),
        (2, "slot 1 was lost"),
    ]
    assert figures.totals == Totals(failed=2)


def test_no_more_than_the_bound_is_remembered_but_all_are_counted():
    figures = Figures(kept_max=3)
    for number in range(1, 11):
        completed(number, figures)
        figures.on_failed(FAILURE)

    kept = figures.kept(at(0.0))
    assert [each.checkpoint_id for each in kept.checkpoints] == [8, 9, 10]
    assert [each.number for each in kept.failures] == [8, 9, 10]
    assert kept.statistics().counts.completed == 10


def test_a_driver_ends_once_and_only_if_it_has_begun():
    figures = Figures()
    assert figures.on_ended("failed", at(1.0)) is None

    figures.on_begun(begun(3))

    assert figures.on_ended("stopped", at(1.0)) == AttemptEnded(3, 1_001_000, "stopped")
    assert figures.on_ended("failed", at(2.0)) is None


@pytest.mark.parametrize("reason", ["no such file: \udce4", "x" * 1_000_000])
def test_whatever_the_reason_is_it_can_be_kept(reason):
    figures = Figures()
    figures.on_triggered(triggered(1))

    for record in (
        figures.on_failed(replace(FAILURE, reason=reason)),
        figures.on_aborted(1, reason, at(1.0)),
    ):
        data = encode_kept(record, Totals())
        assert decode_kept(data, "here")[0] == (record,)
        assert len(data) < 20_000


# --- several drivers ---


def test_records_found_in_any_order_are_one_history():
    first, second = completed(1), completed(2)
    kept = KeptHistory.of(
        [(second, Totals(2, 1, 0)), (begun(2), Totals(0, 1, 0)), (first, Totals(1, 1, 0))]
    )

    assert kept.checkpoints == (first, second)
    assert kept.totals == Totals(2, 1, 0)
    assert [each.checkpoint_id for each in kept.statistics().history] == [2, 1]


def test_a_failure_names_what_the_next_attempt_started_from():
    kept = KeptHistory.of([(each, Totals()) for each in (FAILURE, begun(2), begun(3, restored=9))])

    [failure] = kept.failures

    assert failure.recovered_from.checkpoint_id == 9
    told = failure.to_json()
    assert (told["recovered-by-attempt"], told["recovered-from"]["id"]) == (3, 9)
    assert (told["taskName"], told["restart-delay-ms"]) == ("count (0)", 1_500)
    assert KeptHistory.of([(FAILURE, Totals())]).failures[0].recovered_by is None


def test_counts_go_on_where_the_driver_before_ended():
    earlier = KeptHistory.of([(completed(1), Totals(40, 2, 1))])
    figures = Figures()
    figures.on_begun(begun(4, restored=1))
    completed(2, figures)
    figures.on_triggered(triggered(3, attempt=4))

    counts = earlier.followed_by(figures.kept(at(9.0))).statistics().counts

    assert (counts.completed, counts.failed, counts.restored) == (41, 2, 2)
    assert (counts.in_progress, counts.total) == (1, 44)


def test_completed_checkpoints_that_are_not_retained_are_discarded():
    kept = replace(
        KeptHistory.of([(completed(number), Totals()) for number in (1, 2, 3)]),
        retained=frozenset({2, 3}),
    )

    assert [each.is_discarded for each in kept.statistics().history] == [False, False, True]


def test_a_savepoint_is_never_discarded():
    """It belongs to somebody else."""
    figures = Figures()
    figures.on_triggered(triggered(1, kind="SAVEPOINT"))
    savepoint = figures.on_completed(1, "/elsewhere", 0, at(1.0))
    kept = replace(KeptHistory.of([(savepoint, Totals())]), retained=frozenset())

    assert not kept.statistics().history[0].is_discarded


# --- a driver that did not say goodbye ---

RUNNING = JobRecord(5, "checkpoint-completed", 3, written_by="host:4711:ab")
SEEN = KeptHistory(begun=(begun(3),))
GIVEN_UP = replace(FAILURE, attempt=3, restart_delay_seconds=None)


def test_an_attempt_that_nobody_has_ended_tells_of_a_lost_driver():
    lost = driver_lost(RUNNING, SEEN, at(10.0))

    assert (lost.attempt, lost.kind, lost.at_ms) == (3, "driver lost", 1_010_000)
    assert "host:4711:ab" in lost.reason
    assert not lost.is_given_up


def test_a_driver_may_be_lost_while_it_waits_to_start_again():
    waiting = replace(GIVEN_UP, restart_delay_seconds=60.0)

    lost = driver_lost(RUNNING, replace(SEEN, kept_failures=(waiting,)), at(10.0))

    assert (lost.attempt, lost.number) == (3, 2)
    assert Figures().on_failed(lost).number == 2, "its place is taken already"


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        (None, SEEN),
        (replace(RUNNING, outcome="finished"), SEEN),
        (RUNNING, KeptHistory()),
        (RUNNING, replace(SEEN, ended=(AttemptEnded(3, 1, "stopped"),))),
        (RUNNING, replace(SEEN, kept_failures=(GIVEN_UP,))),
    ],
    ids=["never ran", "finished", "an older version", "stopped", "failed"],
)
def test_where_the_end_is_known_no_driver_was_lost(before, kept):
    assert driver_lost(before, kept, at(10.0)) is None


# --- how attempts come up ---


def complete_at(figures, number, records_read, seconds, attempt=1):
    figures.on_triggered(triggered(number, attempt, seconds))
    figures.on_acknowledged(number, "v1", replace(TIMINGS, records_read=records_read), at(seconds))
    figures.on_completed(number, None, 0, at(seconds))


def test_an_attempt_tells_how_it_came_up_and_how_much_it_has_read_once_more():
    figures = Figures()
    figures.on_begun(begun(1))
    figures.on_read(500, at(1.0))
    complete_at(figures, 1, 400, 2.0)
    figures.on_read(900, at(3.0))
    figures.on_noticed(1_003_000, at(3.5))
    figures.on_noticed(None, at(3.6))
    figures.on_attempt_over("slot 1 was lost", at(3.6))
    figures.on_begun(begun(2, restored=1))
    figures.on_slots(at(5.0))
    figures.on_running(at(5.5))
    assert figures.on_read(499, at(6.0)) is None, "it had read 900 before, 400 of them for good"
    kept = figures.on_read(500, at(7.0))
    assert figures.on_read(501, at(8.0)) is None, "told once"

    second, first = figures.kept(at(9.0)).attempts_json()

    assert second["phases"] == {
        "heard": 1_003_000,
        "noticed": 1_003_500,
        "begun": 200,
        "slots": 1_005_000,
        "running": 1_005_500,
        "first_record": 1_006_000,
        "caught_up": 1_007_000,
    }
    assert (second["replayed"], second["restored"]["id"], kept.replayed) == (500, 1, 500)
    assert (first["replayed"], first["phases"]["noticed"]) == (0, None)


def test_one_that_has_nothing_to_read_again_has_caught_up_as_soon_as_it_runs():
    figures = Figures()
    figures.on_begun(begun(1))
    figures.on_read(100, at(1.0))
    complete_at(figures, 1, 100, 2.0)
    figures.on_begun(begun(2, restored=1))
    assert figures.on_read(0, at(3.0)) is None, "it does not run yet"
    figures.on_running(at(4.0))

    phases = figures.on_read(0, at(5.0))

    assert (phases.replayed, phases.caught_up, phases.first_record) == (0, 1_005_000, None)
    assert figures.on_read(0, at(6.0)) is None, "told once"


def test_one_that_fails_before_it_has_caught_up_leaves_the_goal_to_the_next():
    figures = Figures()
    figures.on_begun(begun(1))
    complete_at(figures, 1, 100, 1.0)
    figures.on_read(900, at(2.0))
    figures.on_begun(begun(2, restored=1))
    figures.on_read(300, at(3.0))
    [phases] = figures.on_attempt_over("slot 0 was lost", at(4.0))
    figures.on_begun(begun(3, restored=1))

    assert (phases.replayed, phases.caught_up) == (800, None)
    assert figures.kept(at(5.0)).attempts_json()[0]["replayed"] == 800


def test_of_an_attempt_that_follows_a_lost_driver_it_is_told_when_that_was_found_out():
    lost = replace(FAILURE, attempt=1, kind="driver lost", at_ms=2_000_000)
    kept = KeptHistory.of([(each, Totals()) for each in (begun(1), completed(1), lost, begun(2))])

    second, first = kept.attempts_json()

    assert second["phases"]["heard"] == 1_001_000, "when its last checkpoint was complete"
    assert second["phases"]["noticed"] == 2_000_000
    assert (first["ended"]["outcome"], first["ended"]["kind"]) == ("failed", "driver lost")
    assert (second["ended"], second["replayed"]) == (None, None)


def read(slot, records, slots=2, attempt=1):
    return SlotRead(Attempt(attempt), SlotIndex(slot), slots, records)


@pytest.mark.parametrize(
    ("restored", "replayed"),
    [(None, 1_000), (1, 600)],
    ids=["from the beginning again", "from a checkpoint of that attempt"],
)
def test_what_the_slots_of_a_driver_that_is_gone_have_left_says_what_is_replayed(
    restored, replayed
):
    left = [begun(1), replace(completed(1), records_read=400), read(0, 700), read(1, 300)]
    earlier = KeptHistory.of([(each, Totals()) for each in left])
    again = begun(2, restored=restored)
    figures = Figures()
    figures.on_begun(again)
    assert figures.kept(at(1.0)).attempts_json()[0]["replayed"] is None

    figures.on_earlier(again, earlier)
    assert figures.on_read(replayed - 1, at(2.0)) is None
    phases = figures.on_read(replayed, at(3.0))

    assert (phases.replayed, phases.caught_up) == (replayed, 1_003_000)


def test_one_slot_that_was_lost_with_its_driver_leaves_it_unknown():
    again = begun(2, restored=1)
    left = [begun(1), replace(completed(1), records_read=400), read(0, 700)]

    assert KeptHistory.of([(each, Totals()) for each in left]).read_behind(again) is None
    others = [begun(1), completed(1), read(0, 700, attempt=0), read(1, 300, attempt=0)]
    assert KeptHistory.of([(each, Totals()) for each in others]).read_behind(again) is None


def test_behind_an_end_in_order_nothing_was_read():
    ended = AttemptEnded(Attempt(1), 1_000_000, "stopped")
    kept = KeptHistory.of([(each, Totals()) for each in (begun(1), completed(1), ended)])

    assert kept.read_behind(begun(2, restored=1)) == 0
    assert KeptHistory().read_behind(begun(1)) == 0
    assert KeptHistory().read_behind(begun(1, restored=7)) is None


def test_all_subtasks_are_remembered_of_the_newest_the_failed_and_the_slowest():
    part = SubtaskStatistics.of("v1", TIMINGS, 1, 1.0)
    parts = tuple(replace(part, index=index, arrivals=(("read", 0, 1.0),)) for index in range(5))
    one = replace(completed(1), subtasks=parts)
    many = [replace(one, checkpoint_id=number) for number in range(1, 301)]
    many[4] = replace(many[4], status="FAILED")
    many[5] = replace(many[5], end_to_end_ms=9_999.0)

    kept = within_bounds(many, 250)
    assert len(kept) == 250
    kept = within_bounds(many, 1_000)

    whole = [each.checkpoint_id for each in kept if len(each.subtasks) == 5]
    assert {5, 6} <= set(whole) >= set(range(201, 301))
    assert len(whole) <= 100 + 1 + 10
    replayed = [each.checkpoint_id for each in kept if each.subtasks[0].arrivals]
    assert replayed == list(range(291, 301))
