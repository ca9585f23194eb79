"""The handle of a job, fed with what the job would tell; nothing is launched."""

from dataclasses import replace

import pytest

from stillframe.config import job_config
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.history import (
    AttemptFailed,
    AttemptStarted,
    CheckpointCompleted,
    CheckpointFailed,
    JobEnded,
    SlotsRunning,
    Waiting,
)
from stillframe.coordinator.job import Job
from stillframe.coordinator.progress import progress_of
from stillframe.coordinator.query import Query
from stillframe.coordinator.running import DriverAddress
from stillframe.errors import JobFailed, StillframeError
from stillframe.graph.launch import Deployment
from stillframe.graph.logical import Node, Read, WithWatermark, Write
from stillframe.graph.plan import build_plan
from stillframe.protocol.manifests import SubtaskTimings
from stillframe.protocol.snapshots import EventTimes
from stillframe.testing.clock import ManualClock

CLICKS = ClickSource(records=10)
TIMINGS = SubtaskTimings(1.0, 2.0, 3.0, 4.0, 5, 5, 0, task="read", subtask=0)


class Nowhere(Deployment):
    def launch(self, launch, on_ended):
        raise StillframeError("there is no cluster")


def job(location="/nowhere/chk", name="views"):
    read = Node(Read(CLICKS), CLICKS.schema)
    plan = build_plan(name, [Node(Write(DiscardSink()), CLICKS.schema, (read,))], 1)
    options = {"checkpointLocation": location} if location else {}
    return Job(plan, job_config(options), Nowhere(), DriverAddress("127.0.0.1"), ManualClock())


def completed(checkpoint_id, attempt=1, at_ms=1_000, records_in=0, records_late=0):
    return CheckpointCompleted(
        checkpoint_id,
        checkpoint_id - 1,
        attempt,
        at_ms,
        41.0,
        2_000,
        (TIMINGS,),
        records_in,
        0,
        records_late,
    )


def test_the_id_stays_and_the_run_id_changes_with_every_start():
    first, second = Query(job()), Query(job())

    assert first.id == second.id
    assert first.runId != second.runId
    assert Query(job(name="other")).id != first.id
    assert first.name == "views"


def test_the_pids_are_those_of_the_slots_that_run_now():
    running = job()
    query = Query(running)
    assert query.slot_pids == ()

    running.history.tell(SlotsRunning(1, (11, 12)))
    assert query.slot_pids == (11, 12)
    running.history.tell(AttemptFailed(1, "lost", 1.0))
    assert query.slot_pids == (), "a dead slot's number may be somebody else's by now"
    running.history.tell(SlotsRunning(2, (13, 14)))
    running.history.tell(JobEnded("finished"))
    assert query.slot_pids == ()


def test_what_all_slots_wait_for_is_told_once():
    running = job()
    for slot in (0, 1):
        running.history.begin(f"slot {slot} awaits", Waiting("the database cannot be reached"))

    assert Query(running).trouble == ["the database cannot be reached"]


def test_progress_is_told_per_checkpoint_and_restarts_count_anew():
    running = job()
    query = Query(running)
    assert query.lastProgress is None

    running.history.tell(completed(1, at_ms=1_000, records_in=100, records_late=3))
    running.history.tell(completed(2, at_ms=3_000, records_in=500, records_late=7))
    running.history.tell(completed(3, attempt=2, at_ms=4_000, records_in=50, records_late=2))

    rows = [each["numInputRows"] for each in query.recentProgress]
    assert rows == [100, 400, 50]
    assert query.recentProgress[1]["inputRowsPerSecond"] == 200
    assert [each["numRowsDroppedByWatermark"] for each in query.recentProgress] == [3, 4, 2]
    last = query.lastProgress
    assert (last["batchId"], last["name"], last["checkpoint"]["id"]) == (2, "views", 3)
    assert last["checkpoint"]["subtasks"] == [TIMINGS.to_json()]


def test_progress_tells_each_source_and_the_event_times_that_came():
    other = ClickSource(records=20)
    read, again = (Node(Read(each), each.schema) for each in (CLICKS, other))
    timed = Node(WithWatermark("at", 0), CLICKS.schema, (read,))
    sinks = [Node(Write(DiscardSink()), CLICKS.schema, (each,)) for each in (timed, again)]
    plan = build_plan("views", sinks, 1)
    first, second = (task.name for task in plan.tasks)
    [time] = [each.uid for _, each in plan.operators() if isinstance(each.operator, WithWatermark)]
    before = replace(completed(1), records_read=((first, 100), (second, 10)))
    seen = EventTimes(time, 2, 1_000_000, 3_000_000, 2_000_000.0)
    this = replace(
        completed(2, at_ms=3_000),
        records_read=((first, 500), (second, 20)),
        event_times=(seen,),
        watermark_us=3_000_000,
    )

    told = progress_of(plan, before, this)
    assert told["numInputRows"] == 410
    assert [each["numInputRows"] for each in told["sources"]] == [400, 10]
    assert [each["inputRowsPerSecond"] for each in told["sources"]] == [200.0, 5.0]
    assert told["eventTime"] == {
        "max": "1970-01-01T00:00:03.000Z",
        "min": "1970-01-01T00:00:01.000Z",
        "avg": "1970-01-01T00:00:02.000Z",
        "watermark": "1970-01-01T00:00:03.000Z",
    }
    endless = replace(this, event_times=(EventTimes(time, 1, -(2**62), 2**62, 0.0),))
    assert progress_of(plan, before, endless)["eventTime"]["max"] == "9999-12-31T23:59:59.999Z"
    unmoved = replace(this, event_times=())
    assert list(progress_of(plan, before, unmoved)["eventTime"]) == ["watermark"]


def test_the_status_is_the_last_thing_told_and_at_the_end_the_outcome():
    running = job()
    query = Query(running)
    assert query.status["message"] == "starting"

    running.history.tell(AttemptStarted(1, None, ()))
    assert query.status["message"] == "attempt 1 starts from the beginning"
    running.history.tell(JobEnded("stopped"))
    assert query.status["message"] == "stopped"
    assert not query.isActive


def test_a_job_without_a_location_can_take_no_checkpoint():
    with pytest.raises(StillframeError, match="'views' has no checkpointLocation"):
        Query(job(location=None)).checkpoint()


class Answering(Query):
    """The job takes checkpoint 5, and this is what becomes of it."""

    def __init__(self, *events):
        asked = job()
        super().__init__(asked)

        def take(on_numbered):
            on_numbered(5)
            for event in events:
                asked.history.tell(event)

        asked.request_checkpoint = take


def test_who_asked_for_a_checkpoint_is_content_with_a_newer_one_that_completed_first():
    failed = CheckpointFailed(5, "checkpoint 6 completed first")

    assert Answering(completed(6), failed).checkpoint() == 6


def test_who_asked_for_a_checkpoint_hears_of_its_failure_also_if_others_fail_with_it():
    query = Answering(CheckpointFailed(5, "disk full"), CheckpointFailed(6, "disk full"))

    with pytest.raises(StillframeError, match="checkpoint 5 failed: disk full"):
        query.checkpoint()


def test_a_failed_job_raises_where_it_is_waited_for(tmp_path):
    running = job(str(tmp_path))
    query = Query(running)
    running.start()

    with pytest.raises(JobFailed, match="job 'views' failed: there is no cluster"):
        query.awaitTermination(20)
    assert "there is no cluster" in str(query.exception())
    assert query.summary.outcome == "failed"
    with pytest.raises(JobFailed):
        query.checkpoint(timeout=5)


def test_explain_prints_the_plan(capsys):
    query = Query(job())
    query.explain()

    assert capsys.readouterr().out.startswith("views: 1 slot, 128 key groups\n")
