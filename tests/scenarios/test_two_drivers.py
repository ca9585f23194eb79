"""Two drivers of one job: the older one can no longer harm what the newer one has."""

import pytest

from stillframe.api.sinks import Sink
from stillframe.connectors.discard import DiscardSink
from stillframe.coordinator.history import (
    AttemptStarted,
    CheckpointCompleted,
    CheckpointFailed,
    SlotsRunning,
)
from stillframe.errors import JobFailed
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import Plan, build_plan
from stillframe.testing.sinks import GatedSink
from stillframe.testing.sources import ScriptedSource


def pass_through(source: ScriptedSource, sink: Sink) -> Plan:
    read = Node(Read(source), source.schema, given_uid="clicks")
    write = Node(Write(sink), source.schema, (read,), given_uid="write-clicks")
    return build_plan("page-views", [write], 2)


def test_metadata_of_an_older_driver_does_not_replace_that_of_a_newer_one(page_views, until):
    prepare, reached = page_views.gate("prepare"), page_views.gate("reached")
    source = page_views.halves(page_views.gate("never"))
    slow = GatedSink(DiscardSink(), prepare=prepare, reached=reached)
    first = page_views.start(pass_through(source, slow))
    until(lambda: reached.is_open)

    plan = pass_through(source, DiscardSink())
    second = page_views.start(plan, checkpointInterval="1 hour")
    second.wait(SlotsRunning)
    completed = second.query.checkpoint(timeout=60)
    prepare.open()
    with pytest.raises(JobFailed, match="only one driver"):
        first.query.awaitTermination(90)
    second.query.stop()
    third = page_views.start(plan)

    assert third.wait(AttemptStarted).restored_from == completed


def test_an_older_driver_that_aborts_a_checkpoint_deletes_nothing_of_a_newer_one(page_views, until):
    prepare, reached = page_views.gate("prepare"), page_views.gate("reached")
    source = page_views.halves(page_views.gate("never"))
    slow = GatedSink(DiscardSink(), prepare=prepare, reached=reached)
    first = page_views.start(pass_through(source, slow), checkpointTimeout="3 s")
    until(lambda: reached.is_open)

    plan = pass_through(source, DiscardSink())
    second = page_views.start(plan, checkpointInterval="1 hour")
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

    misfit = page_views.start(pass_through(source, DiscardSink()))
    with pytest.raises(JobFailed, match="does not fit this job"):
        misfit.query.awaitTermination(90)
    half.open()
    running.finish()
