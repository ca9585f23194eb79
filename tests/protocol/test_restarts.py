"""Whether a job starts again."""

from stillframe.protocol.restarts import FixedDelay, GiveUp, Restart


def test_a_failure_is_followed_by_a_restart_after_the_delay():
    assert FixedDelay(3, 1.5).on_failure("slot 1 was lost", is_permanent=False) == Restart(1.5)


def test_what_would_fail_again_is_not_tried_again():
    restarts = FixedDelay(3, 1.0)

    assert restarts.on_failure("f raised", is_permanent=True) == GiveUp("f raised")


def test_too_many_failures_in_a_row_end_the_job_with_the_last_reason_and_the_option():
    restarts = FixedDelay(2, 1.0)

    assert restarts.on_failure("one", is_permanent=False) == Restart(1.0)
    assert restarts.on_failure("two", is_permanent=False) == Restart(1.0)
    gave_up = restarts.on_failure("three", is_permanent=False)
    assert isinstance(gave_up, GiveUp)
    assert gave_up.reason.startswith("three (after 2 restarts")
    assert "restartAttempts" in gave_up.reason


def test_progress_starts_the_count_anew():
    restarts = FixedDelay(1, 1.0)

    for _ in range(5):
        assert restarts.on_failure("killed", is_permanent=False) == Restart(1.0)
        restarts.on_progress()


def test_without_restarts_the_first_failure_ends_the_job():
    assert isinstance(FixedDelay(0, 1.0).on_failure("killed", is_permanent=False), GiveUp)
