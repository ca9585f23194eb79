"""What the code of a user may do to a job, of each kind there is (`user_code_kinds`)."""

from __future__ import annotations

from collections import Counter

import pytest
import user_code_kinds
from user_code_kinds import AT, KINDS, RECORDS, Hangs, Raises, plan_of, said

from stillframe.cli.main import main
from stillframe.coordinator.history import CheckpointCompleted, Hanging, Waiting
from stillframe.errors import JobFailed

ONE_BY_ONE = {"row function", "row function of many", "UDF", "KeyProcessor", "StatefulProcessor"}
"""Kinds that are called with records one after the other, so that the one is known."""
BY_KEY = {"KeyProcessor", "reducing function", "StatefulProcessor"}
CODE = {
    "row function": "function Rows",
    "row function of many": "function ManyRows",
    "Arrow function": "function Batches",
    "pandas function": "function Frames",
    "UDF": "function Udf",
    "KeyProcessor": "Keys",
    "reducing function": "Reduces",
    "StatefulProcessor": "Processor",
    "KeyedFunction": "function KeyedBatches",
    "StreamFunction": "function Stream",
    "source": "source scripted",
    "sink": "sink parquet",
    "sink that prepares": "sink parquet",
    "sink that commits": "sink parquet",
    "foreachBatch": "sink ",
}
OPERATOR = {"source": "read", **{kind: "write" for kind in KINDS if "sink" in kind}}
OPERATOR["foreachBatch"] = "write"
BY_EPOCH = {"sink that prepares", "sink that commits", "foreachBatch"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_loses_no_row_and_is_told_with_code_record_and_line(kind, page_views):
    """A `StopIteration` is the one that Python takes for an end, wherever something is lazy."""
    trouble = Raises(StopIteration, once=page_views.gate("raised"))
    running = page_views.start(plan_of(kind, page_views.home, trouble))
    running.finish()

    assert said(page_views.home) == Counter(range(RECORDS))
    [failure] = running.query.failures
    blame = failure.blame
    assert "raised StopIteration" in failure.reason
    assert blame.code.startswith(CODE[kind])
    assert blame.operator == OPERATOR.get(kind, "code")
    assert blame.line.startswith(f"{user_code_kinds.__file__}:")
    if kind != "UDF":  # there Python itself has forgotten the line
        assert "raise self.error()" in blame.traceback
    assert "stillframe" not in blame.traceback.replace(user_code_kinds.__file__, "")
    if kind in ONE_BY_ONE:
        assert f"id={AT}" in blame.record
    if kind in BY_KEY:
        assert f"key Row(app='app-{AT % 7}')" in blame.record
        assert "on input 0" in blame.record
        assert "since" in blame.record
    elif kind in BY_EPOCH:
        assert "epoch" in blame.record or "checkpoint" in blame.record
    elif kind != "KeyedFunction":
        assert "split 'script-0'" in blame.record
    assert failure.attempt == 1
    assert not failure.is_given_up


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_error_at_the_same_place_ends_the_job_after_a_few_restarts(kind, page_views):
    trouble = Raises(ConnectionError)
    running = page_views.start(
        plan_of(kind, page_views.home, trouble), restartSameErrorMax="1", checkpointInterval="1 h"
    )

    with pytest.raises(
        JobFailed, match=r"raised ConnectionError .*the same error 2 times"
    ) as raised:
        running.query.awaitTermination(90)
    assert [failure.is_given_up for failure in running.query.failures] == [False, True]
    assert "\n" not in str(raised.value)
    shown = "\n".join(raised.value.__notes__)
    assert "raise self.error()" in shown
    assert f'File "{user_code_kinds.__file__}", line ' in shown


@pytest.mark.parametrize("kind", ["row function", "UDF", "Arrow function", "KeyProcessor"])
def test_checkpoints_that_complete_between_do_not_hide_that_a_record_fails_each_time(
    kind, page_views, monkeypatch
):
    gate = page_views.gate("checkpoint completed")
    source = user_code_kinds.records_behind(gate)
    monkeypatch.setattr(user_code_kinds, "records", lambda: source)
    plan = plan_of(kind, page_views.home, Raises(ConnectionError, closes=gate))
    running = page_views.start(plan, restartSameErrorMax="2", restartAttempts="1000")
    running.query.add_listener(
        lambda told: gate.open() if isinstance(told, CheckpointCompleted) else None
    )

    with pytest.raises(JobFailed, match="the same error 3 times at the same record, which comes"):
        running.query.awaitTermination(90)
    completed_by = [each.attempt for each in running.told if isinstance(each, CheckpointCompleted)]
    assert len(set(completed_by)) >= 3, "each attempt has completed one"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_hang_loses_no_row_and_is_told_with_code_record_and_stack(kind, page_views):
    let_go = page_views.gate("let go")
    trouble = Hangs(once=page_views.gate("hung"), let_go=let_go)
    running = page_views.start(plan_of(kind, page_views.home, trouble), stuckTimeout="3 s")
    if kind == "foreachBatch":  # a thread of the driver, which cannot be ended
        assert "self.let_go.await_open" in str(running.wait(Waiting))
        with pytest.raises(
            JobFailed, match=r"epoch \d+ for \d+ s and has not returned \(.*kinds.py"
        ):
            running.query.awaitTermination(90)
        let_go.open()
        page_views.start(plan_of(kind, page_views.home, trouble)).finish()
    else:
        told = running.wait(Hanging)
        running.finish()
        assert "self.let_go.await_open" in told.hanging.stack
        assert told.hanging.operator == OPERATOR.get(kind, "code")
        [failure] = running.query.failures
        assert f"({user_code_kinds.__file__}:" in failure.reason
        assert "has not returned for" in failure.reason
        assert failure.blame.operator == told.hanging.operator
        assert (failure.blame.record is None) == (kind == "source"), "what it was called with"

    assert said(page_views.home) == Counter(range(RECORDS))


@pytest.mark.parametrize("command", ["failures", "status"])
def test_commands_tell_function_operator_record_attempt_and_line(command, page_views, capsys):
    plan = plan_of("KeyProcessor", page_views.home, Raises(ConnectionError))
    running = page_views.start(plan, restartSameErrorMax="0", checkpointInterval="1 h")
    with pytest.raises(JobFailed):
        running.query.awaitTermination(90)

    assert main([command, "said", "--checkpoints", page_views.location]) == 0

    told = capsys.readouterr().out
    assert "Keys raised ConnectionError" in told
    assert "operator" in told
    assert "code" in told
    assert f"key Row(app='app-{AT % 7}')" in told
    assert f"Row(id={AT}, app=" in told
    assert f'File "{user_code_kinds.__file__}", line ' in told
    assert "raise self.error()" in told


@pytest.mark.parametrize("error", [TypeError, AttributeError, NameError, SystemExit])
def test_an_error_of_the_code_itself_ends_the_job_at_once(error, page_views):
    running = page_views.start(plan_of("row function", page_views.home, Raises(error)))

    with pytest.raises(JobFailed, match=rf"function Rows raised {error.__name__} .*correct it and"):
        running.query.awaitTermination(90)
    [failure] = running.query.failures
    assert failure.is_permanent
    assert f"id={AT}" in failure.blame.record


def test_what_the_log_says_of_an_error_has_its_traceback(page_views, caplog):
    trouble = Raises(ConnectionError, once=page_views.gate("raised"))
    running = page_views.start(plan_of("row function", page_views.home, trouble))
    running.finish()

    [told] = [record for record in caplog.records if "attempt 1 failed" in record.getMessage()]
    assert told.levelname == "WARNING"
    assert f'File "{user_code_kinds.__file__}", line ' in told.getMessage()
    assert f"id={AT}" in told.getMessage()
