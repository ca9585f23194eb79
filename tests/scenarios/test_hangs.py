"""A function that hangs: it is told which and where, the attempt ends, and no process is left."""

import time

import pytest
from hanging_functions import HangingAt, match_for_long, sleep_for_long
from hanging_readers import HangingLog

from stillframe.coordinator.history import CheckpointFailed, Hanging, SlotsRunning
from stillframe.processes import await_ended

HANGS = pytest.mark.parametrize("hang", [sleep_for_long, match_for_long])
QUICK = {"stuckTimeout": "4 s", "heartbeatTimeout": "4 s"}
STOP_SECONDS_MAX = 15
"""Of which most are a busy machine's."""


def hanging_job(page_views, hang, **options):
    """The job has hung in slot 0 when this returns; answers the pids of its slots too."""
    gate, reached = page_views.gate("more"), page_views.gate("reached")
    source = page_views.halves(gate)
    plan = page_views.plan(source, function=HangingAt(1_050, reached, hang))
    running = page_views.start(plan, **options)
    pids = running.wait(SlotsRunning).pids
    gate.open()
    reached.await_open()
    return running, source, pids


@HANGS
def test_a_function_that_hangs_is_told_and_the_job_goes_on_with_the_next_attempt(page_views, hang):
    running, source, pids = hanging_job(page_views, hang, **QUICK)

    told = running.wait(Hanging)
    during = running.query.status["message"]
    running.finish()

    assert told.slot == 0
    assert hang.__name__ in told.hanging.stack
    assert "__call__ (" in during, "the function"
    assert f"in {hang.__name__}) has not returned for" in during, "where it is, and since when"
    if hang is sleep_for_long:  # what holds the interpreter's lock can only be seen from outside
        assert "map tidy" in told.hanging.task
        assert told.hanging.operator.startswith("mapinarrow-")
        assert told.hanging.called_with == "batches=<tuple_iterator>"
    [failure] = running.query.failures
    assert f"in {hang.__name__}) has not returned for" in failure.reason
    assert failure.slot == 0
    assert await_ended(pids, 10) == []
    assert "has not returned" not in running.query.status["message"]
    page_views.check_exactly_once(source)


@HANGS
def test_a_job_whose_function_hangs_is_stopped_soon_and_leaves_no_process(page_views, hang):
    running, _, pids = hanging_job(page_views, hang)

    began = time.monotonic()
    running.query.stop()

    assert time.monotonic() - began < STOP_SECONDS_MAX
    assert await_ended(pids, 10) == []
    if hang is sleep_for_long:
        assert "function HangingAt.__call__" in str(running.wait(Hanging))


def test_zero_leaves_a_function_that_hangs_alone_and_tells_it_all_the_same(page_views):
    options = {"stuckTimeout": "0", "heartbeatTimeout": "4 s"}
    running, _, pids = hanging_job(page_views, sleep_for_long, **options)

    assert running.wait(Hanging).hanging.seconds < 15
    assert sorted(await_ended(pids, 5)) == sorted(pids)
    assert len(running.attempts()) == 1


def test_a_checkpoint_that_times_out_names_who_did_not_answer_and_what_it_did(page_views):
    running, _, _ = hanging_job(page_views, sleep_for_long, checkpointTimeout="12 s")

    reason = running.wait(CheckpointFailed).reason

    assert "subtasks had not acknowledged it" in reason
    assert "map tidy" in reason
    assert "function HangingAt.__call__" in reason
    running.query.stop()


# --- readers that hang in threads of their own ---


def test_a_reader_that_takes_splits_and_hangs_is_told_and_ended(page_views):
    reached, let_go = page_views.gate("reached"), page_views.gate("let go")
    source = HangingLog(200, reached, let_go, takes_splits=True)
    running = page_views.start(page_views.plan(source, parallelism=1), **QUICK)

    told = running.wait(Hanging)
    during = running.query.status["message"]
    running.finish()

    assert told.hanging.operator == "clicks"
    assert "source hanging log (" in during
    assert "in HangingReader.read) has not returned for" in during
    [failure] = running.query.failures
    assert "in HangingReader.read) has not returned for" in failure.reason
    assert running.query.summary.records_out >= 200


def test_a_reader_that_may_wait_is_told_and_not_ended(page_views):
    reached, let_go = page_views.gate("reached"), page_views.gate("let go")
    source = HangingLog(200, reached, let_go, takes_splits=False)
    running = page_views.start(page_views.plan(source, parallelism=1), **QUICK)

    running.wait(Hanging)
    during = running.query.status["message"]
    completed = running.next_checkpoint()
    let_go.open()
    running.finish()

    assert "in HangingReader.read) has given nothing for" in during
    assert completed.checkpoint_id, "the job runs on"
    assert running.query.failures == []
