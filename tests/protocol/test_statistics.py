"""Checkpoints in figures: their sums, their quantiles, and the JSON that Flink's users know."""

from dataclasses import replace

import pytest

from stillframe.protocol.checkpointing import CheckpointingStatistics, Counts
from stillframe.protocol.failures import Restored
from stillframe.protocol.manifests import SubtaskTimings
from stillframe.protocol.statistics import (
    CheckpointStatistics,
    StatsSummary,
    SubtaskStatistics,
    TaskShape,
    vertex_id,
)

READ, COUNT = vertex_id("read"), vertex_id("count")
TASKS = (TaskShape(READ, "read", 1), TaskShape(COUNT, "count", 2))


def subtask(vertex, index, in_flight=0, acknowledged_at_ms=1_100, processed=0):
    spent = (1.0, 2.4, 3.0, 40.6, 100, 1_000, in_flight, processed)
    timings = SubtaskTimings(*spent, task="task", subtask=index)
    return SubtaskStatistics.of(vertex, timings, acknowledged_at_ms, 100.0)


ALL = (subtask(READ, 0), subtask(COUNT, 0), subtask(COUNT, 1, acknowledged_at_ms=1_200))


def checkpoint(number=7, status="COMPLETED", subtasks=ALL, **more):
    fields = {"triggered_as": "CHECKPOINT", "metadata_bytes": 50, **more}
    return CheckpointStatistics(
        checkpoint_id=number,
        attempt=1,
        status=status,
        triggered_at_ms=1_000,
        end_to_end_ms=210.0,
        tasks=TASKS,
        subtasks=tuple(subtasks),
        **fields,
    )


def statistics(*newest_first):
    return CheckpointingStatistics(Counts(0, 0, 0, 0, 0), newest_first, None)


def test_a_checkpoint_is_the_sum_of_its_subtasks_and_its_metadata():
    told = checkpoint(path="/chk/chk-7-1").to_json()

    assert told["checkpointed_size"] == 3 * 100 + 50
    assert told["state_size"] == 3 * 1_000 + 50
    assert told["latest_ack_timestamp"] == 1_200
    assert (told["num_subtasks"], told["num_acknowledged_subtasks"]) == (3, 3)
    assert (told["className"], told["external_path"]) == ("completed", "/chk/chk-7-1")
    assert told["tasks"] == {}, "only in the details"


def test_one_in_which_a_barrier_overtook_records_is_unaligned():
    overtaken = checkpoint(subtasks=(subtask(READ, 0, in_flight=30),))

    assert overtaken.to_json()["checkpoint_type"] == "UNALIGNED_CHECKPOINT"
    assert overtaken.to_json()["persisted_data"] == 30
    assert checkpoint().to_json()["checkpoint_type"] == "CHECKPOINT"


def test_what_was_processed_between_barriers_is_told_of_subtask_task_checkpoint_and_all():
    parts = (subtask(COUNT, 0, processed=70), subtask(COUNT, 1, in_flight=1, processed=30))
    one = checkpoint(subtasks=parts)

    assert one.to_json()["processed_data"] == 100
    assert one.to_json(with_tasks=True)["tasks"][COUNT]["processed_data"] == 100
    told = one.task_to_json(COUNT)
    assert [each["alignment"]["processed"] for each in told["subtasks"]] == [70, 30]
    assert told["summary"]["alignment"]["processed"]["max"] == 70
    assert statistics(one).to_json()["summary"]["processed_data"]["max"] == 100


@pytest.mark.parametrize("kind", ["SAVEPOINT", "SYNC_SAVEPOINT"])
def test_a_savepoint_says_so(kind):
    told = checkpoint(triggered_as=kind).to_json()

    assert (told["checkpoint_type"], told["is_savepoint"]) == (kind, True)
    assert told["savepointFormat"] == "canonical"


def test_a_failed_one_says_why_and_when():
    told = checkpoint(
        status="FAILED", subtasks=(), metadata_bytes=0, failed_at_ms=1_300, failure="disk full"
    ).to_json()

    assert (told["failure_timestamp"], told["failure_message"]) == (1_300, "disk full")
    assert told["latest_ack_timestamp"] == -1, "nobody has acknowledged it"


def test_the_details_tell_each_task_and_how_far_it_came():
    tasks = checkpoint(status="FAILED", subtasks=ALL[:2]).to_json(with_tasks=True)["tasks"]

    assert [each["status"] for each in tasks.values()] == ["FAILED"] * 2, "as in Flink"
    assert (tasks[READ]["num_subtasks"], tasks[READ]["num_acknowledged_subtasks"]) == (1, 1)
    assert (tasks[COUNT]["num_subtasks"], tasks[COUNT]["num_acknowledged_subtasks"]) == (2, 1)


def test_the_subtasks_of_a_task_are_all_there_also_those_that_did_not_answer():
    told = checkpoint(status="FAILED", subtasks=ALL[:2]).task_to_json(COUNT)

    first, second = told["subtasks"]
    assert first["checkpoint"] == {"sync": 3, "async": 41}
    assert first["alignment"]["duration"] == 2
    assert first["aborted"]
    assert (second["index"], second["status"]) == (1, "pending_or_failed")
    assert told["summary"]["checkpoint_duration"]["async"]["max"] == 41
    assert checkpoint().task_to_json(vertex_id("nobody")) is None


def test_quantiles_lie_between_neighbours_in_proportion():
    summary = StatsSummary.of(range(1, 10))

    assert (summary.min, summary.avg, summary.max) == (1, 5, 9)
    assert summary.quantile(0.5) == 5
    assert summary.quantile(0.25) == 2.5
    assert (summary.quantile(0.01), summary.quantile(0.999)) == (1, 9)
    assert set(StatsSummary.of([]).to_json().values()) == {0}


def test_the_summary_is_over_the_completed_ones():
    failed = checkpoint(9, status="FAILED", subtasks=())
    told = statistics(failed, checkpoint(8), checkpoint(7)).to_json()

    assert told["summary"]["state_size"]["min"] == 3_050
    assert told["summary"]["end_to_end_duration"]["p50"] == 210.0


def test_the_latest_of_each_kind_is_named():
    savepoint = checkpoint(8, triggered_as="SAVEPOINT")
    failed = checkpoint(9, status="FAILED")
    under_way = checkpoint(10, status="IN_PROGRESS")
    latest = statistics(under_way, failed, savepoint, checkpoint(7)).to_json()["latest"]

    assert [latest[kind]["id"] for kind in ("completed", "savepoint", "failed")] == [7, 8, 9]
    assert latest["restored"] is None
    restored = CheckpointingStatistics(
        Counts(1, 0, 0, 0, 0), (), Restored(5, 4_711, False, "/chk/chk-5-1")
    ).to_json()
    assert restored["latest"]["restored"]["id"] == 5
    assert restored["latest"]["completed"] is None


def test_a_vertex_keeps_its_id_as_long_as_its_first_operator_keeps_its_uid():
    assert vertex_id("read") == vertex_id("read") != vertex_id("count")
    assert len(vertex_id("read")) == 32


# --- where the time of a checkpoint went ---


def took(vertex, index, delay, align, sync, background, at, last_from=None):
    timings = SubtaskTimings(delay, align, sync, background, 1, 1, 0, task="t", subtask=index)
    sent = ((*last_from, delay + align),) if last_from else ()
    return SubtaskStatistics.of(vertex, replace(timings, arrivals=sent), 1_000, at)


def phases_of(one):
    told = one.phases_json()
    assert sum(told[name] for name in ("start", "align", "sync", "async", "store")) == (
        pytest.approx(one.end_to_end_ms, abs=1)
    )
    return told


def test_the_phases_of_a_checkpoint_follow_its_critical_path_and_add_up_to_its_duration():
    quick = took(COUNT, 0, 3.0, 1.0, 1.0, 5.0, 12.0, ("read", 0))
    slow = took(COUNT, 1, 6.0, 30.0, 2.0, 50.0, 90.0, ("read", 0))
    one = checkpoint(subtasks=(took(READ, 0, 1.0, 0.0, 2.0, 4.0, 8.0), quick, slow))

    told = phases_of(one)

    assert (told["start"], told["align"], told["sync"]) == (1 + 3, 30, 2 + 2)
    assert told["store"] == 210 - 90, "and what is left until 90 ms was written in the background"
    words = one.to_json()["stillframe"]
    assert words["critical-path"] == [["read", 0], ["count", 1]]
    assert words["slowest"]["waited-for"] == ["read", 0]


def test_clocks_that_differ_do_not_make_phases_longer_than_the_checkpoint():
    ahead = took(COUNT, 1, 500.0, 300.0, 2.0, 5.0, 90.0)

    assert min(phases_of(checkpoint(subtasks=(ahead,))).values(), key=lambda v: v or 0) in (0, None)


def test_time_in_which_subtasks_did_not_answer_counts_as_waiting_for_them():
    told = phases_of(checkpoint(status="FAILED", subtasks=(took(READ, 0, 1, 0, 2, 4, 8.0),)))

    assert (told["align"], told["store"]) == (210 - 8, 0)


def test_an_older_checkpoint_shrinks_to_its_three_slowest_subtasks_and_keeps_its_sums():
    tasks = (TaskShape(COUNT, "count", 64),)
    parts = tuple(took(COUNT, index, 1, 1, 1, 1, float(index)) for index in range(64))
    whole = replace(checkpoint(subtasks=parts), tasks=tasks)

    small = whole.shrunk()

    assert [part.index for part in small.subtasks] == [61, 62, 63]
    assert small.sums == whole.sums
    told = small.to_json()
    assert (told["num_acknowledged_subtasks"], told["stillframe"]["details"]) == (64, "slowest")
    assert len(small.task_to_json(COUNT)["subtasks"]) == 3, "none of the others is said to pend"


def test_a_page_has_what_is_older_and_of_one_status_and_counts_all():
    many = [checkpoint(n, status="FAILED" if n % 2 else "COMPLETED") for n in range(300, 0, -1)]
    told = statistics(*many)

    assert [each["id"] for each in told.to_json()["history"]] == list(range(300, 200, -1))
    page = told.to_json(limit=2, before=19, status="FAILED")
    assert [each["id"] for each in page["history"]] == [17, 15]
    assert page["latest"]["failed"]["id"] == 299


def test_the_series_tells_every_checkpoint_of_a_time_in_columns():
    many = [replace(checkpoint(n), triggered_at_ms=n * 1_000) for n in (4, 3, 2, 1)]
    failed = replace(checkpoint(5, status="FAILED"), triggered_at_ms=5_000)

    told = statistics(failed, *many).series_json(2_000, 5_000)

    assert (told["id"], told["status"]) == ([2, 3, 4, 5], "cccf")
    assert {len(column) for column in told.values()} == {4}
    assert told["new"][0] == 350


def test_barriers_are_told_in_the_order_in_which_they_came():
    arrivals = (("edge", 1, 6.1), ("edge", 0, 31.0))
    timings = SubtaskTimings(6.1, 24.9, 2.2, 15.8, 1, 1, 0, task="t", subtask=1, arrivals=arrivals)
    part = SubtaskStatistics.of(COUNT, timings, 1_000, 51.0, senders={"edge": "clicks"})

    [told] = checkpoint(subtasks=(part,)).barriers_json()["subtasks"]

    assert told == {
        "vertex": COUNT,
        "index": 1,
        "first": 6.1,
        "last": 31.0,
        "last_from": ["clicks", 0],
        "taken": 33.2,
        "durable": 49.0,
        "ack": 51.0,
        "arrivals": [["clicks", 1, 6.1], ["clicks", 0, 31.0]],
    }
