"""Two drivers of one job: the older one can no longer harm what the newer one has."""

import pytest

from stillframe.api.sinks import Sink
from stillframe.connectors.discard import DiscardSink
from stillframe.coordinator.history import (
    AttemptStarted,
    CheckpointCompleted,
    CheckpointFailed,
    DriverAwaited,
    SlotsRunning,
)
from stillframe.errors import JobFailed
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import Plan, build_plan
from stillframe.testing.sinks import GatedSink
from stillframe.testing.sources import ScriptedSource

EVERYWHERE = [
    "local",
    pytest.param("s3", marks=pytest.mark.s3),
    pytest.param("hdfs", marks=pytest.mark.hdfs),
]


@pytest.fixture(params=EVERYWHERE)
def anywhere(request, page_views):
    """Options of a job whose checkpoints are on a local disk, in a bucket or on HDFS."""
    if request.param != "s3":
        if request.param == "hdfs":
            page_views.location = request.getfixturevalue("hdfs_root")
        yield {}
        return
    page_views.location = f"s3://{request.getfixturevalue('s3_bucket')}/jobs"
    settings = request.getfixturevalue("s3_settings")
    yield {**settings, "fs.s3a.connection.request.timeout": "10s"}
    page_views.stop_all()  # while the bucket can be reached


def pass_through(source: ScriptedSource, sink: Sink) -> Plan:
    read = Node(Read(source), source.schema, given_uid="clicks")
    write = Node(Write(sink), source.schema, (read,), given_uid="write-clicks")
    return build_plan("page-views", [write], 2)


def test_a_second_driver_is_refused_while_the_first_lives(page_views, anywhere):
    half = page_views.gate("second-half")
    source = page_views.halves(half)
    first = page_views.start(page_views.plan(source), leaseTimeout="3 s", **anywhere)
    first.wait(CheckpointCompleted)

    second = page_views.start(page_views.plan(source), **anywhere)
    with pytest.raises(JobFailed, match=r"another driver runs it, on .* \(pid \d+\): stop"):
        second.query.awaitTermination(90)
    half.open()
    first.finish()

    assert second.attempts() == []
    assert len(first.attempts()) == 1
    page_views.check_exactly_once(source)


def test_a_driver_that_waits_for_another_one_can_be_stopped(page_views):
    source = page_views.halves(page_views.gate("never"))
    first = page_views.start(page_views.plan(source), leaseTimeout="1 hour")
    first.wait(CheckpointCompleted)

    second = page_views.start(page_views.plan(source))
    second.wait(DriverAwaited)
    second.query.stop()

    assert second.query.summary.outcome == "stopped"
    assert first.query.isActive


def test_a_driver_that_waits_goes_on_when_the_first_has_stopped(page_views, anywhere):
    half = page_views.gate("second-half")
    source = page_views.halves(half)
    first = page_views.start(page_views.plan(source), leaseTimeout="10 s", **anywhere)
    first.wait(CheckpointCompleted)

    second = page_views.start(page_views.plan(source), **anywhere)
    second.wait(DriverAwaited)
    first.query.stop()
    half.open()
    second.finish()

    page_views.check_exactly_once(source)


def test_metadata_of_an_older_driver_does_not_replace_that_of_a_newer_one(
    page_views, until, anywhere
):
    prepare, reached = page_views.gate("prepare"), page_views.gate("reached")
    source = page_views.halves(page_views.gate("never"))
    slow = GatedSink(DiscardSink(), prepare=prepare, reached=reached)
    first = page_views.start(pass_through(source, slow), **anywhere)
    until(lambda: reached.is_open)

    plan = pass_through(source, DiscardSink())
    second = page_views.start(plan, checkpointInterval="1 hour", leaseTimeout="0 s", **anywhere)
    second.wait(SlotsRunning)
    completed = second.query.checkpoint(timeout=60)
    prepare.open()
    with pytest.raises(JobFailed, match="only one driver"):
        first.query.awaitTermination(90)
    second.query.stop()
    third = page_views.start(plan, **anywhere)

    assert third.wait(AttemptStarted).restored_from == completed


def test_an_older_driver_that_aborts_a_checkpoint_deletes_nothing_of_a_newer_one(page_views, until):
    prepare, reached = page_views.gate("prepare"), page_views.gate("reached")
    source = page_views.halves(page_views.gate("never"))
    slow = GatedSink(DiscardSink(), prepare=prepare, reached=reached)
    first = page_views.start(pass_through(source, slow), checkpointTimeout="3 s")
    until(lambda: reached.is_open)

    plan = pass_through(source, DiscardSink())
    second = page_views.start(plan, checkpointInterval="1 hour", leaseTimeout="0 s")
    second.wait(SlotsRunning)
    completed = second.query.checkpoint(timeout=60)
    assert not [event for event in first.told if isinstance(event, CheckpointFailed)]
    first.wait(CheckpointFailed)
    prepare.open()
    second.query.stop()
    third = page_views.start(plan)

    assert third.wait(AttemptStarted).restored_from == completed


def test_a_job_that_does_not_fit_the_checkpoint_leaves_the_running_one_alone(page_views):
    half = page_views.gate("second-half")
    source = page_views.halves(half)
    running = page_views.start(page_views.plan(source))
    running.wait(CheckpointCompleted)

    misfit = page_views.start(pass_through(source, DiscardSink()), leaseTimeout="0 s")
    with pytest.raises(JobFailed, match="does not fit this job"):
        misfit.query.awaitTermination(90)
    half.open()
    running.finish()
