"""Whether a job starts again, and when."""

import math
from itertools import pairwise

import pytest

from stillframe.config import JobConfig, job_config
from stillframe.protocol.restarts import (
    Backoff,
    CodeFailed,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    GiveUp,
    NoRestart,
    NothingRan,
    Restart,
    RestartStrategy,
    SameFailure,
    Sign,
    SlotCrashed,
    restart_strategy,
)

CHECKPOINTS = {"checkpointLocation": "/chk", "checkpointInterval": "1 s"}
MINUTE, HOUR = 60.0, 3600.0
NOW = 5.0


def no_jitter() -> float:
    """The middle of what chance can give."""
    return 0.5


def made_of(jitter=no_jitter, **options: str) -> RestartStrategy:
    return restart_strategy(job_config({**CHECKPOINTS, **options}), jitter)


def delays(restarts: RestartStrategy, failures: int) -> list[float]:
    """What each failure waits if the job fails again as soon as it has been restarted."""
    now, waited = 1000.0, []
    for _ in range(failures):
        decision = restarts.on_failure("killed", is_permanent=False, now_seconds=now)
        assert isinstance(decision, Restart)
        waited.append(decision.delay_seconds)
        now += decision.delay_seconds
    return waited


# --- which one -----------------------------------------------------------------------------------


def test_with_checkpoints_on_a_job_restarts_with_growing_delays():
    assert isinstance(made_of(), ExponentialDelay)


def test_with_checkpoints_off_a_job_is_not_restarted_unless_told_to():
    assert isinstance(restart_strategy(JobConfig(), no_jitter), NoRestart)
    told = job_config({"restartStrategy": "exponential-delay"})
    assert isinstance(restart_strategy(told, no_jitter), ExponentialDelay)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("none", NoRestart),
        ("fixed-delay", FixedDelay),
        ("failure-rate", FailureRate),
        ("exponential-delay", ExponentialDelay),
    ],
)
def test_every_strategy_can_be_named_and_none_tries_again_what_would_fail_again(name, strategy):
    restarts = made_of(restartStrategy=name)

    assert isinstance(restarts, strategy)
    decision = restarts.on_failure("f raised", is_permanent=True, now_seconds=NOW)
    assert decision == GiveUp("f raised")


# --- none ----------------------------------------------------------------------------------------


def test_without_a_strategy_the_first_failure_ends_the_job_and_says_why():
    gave_up = NoRestart().on_failure("slot 1 was lost", is_permanent=False, now_seconds=NOW)

    assert isinstance(gave_up, GiveUp)
    assert gave_up.reason.startswith("slot 1 was lost (")
    assert "restartStrategy" in gave_up.reason


# --- fixed delay ---------------------------------------------------------------------------------


def test_a_failure_is_followed_by_a_restart_after_the_delay():
    assert FixedDelay(3, 1.5).on_failure(
        "slot 1 was lost", is_permanent=False, now_seconds=NOW
    ) == Restart(1.5)


def test_what_would_fail_again_is_not_tried_again():
    restarts = FixedDelay(3, 1.0)

    assert restarts.on_failure("f raised", is_permanent=True, now_seconds=NOW) == GiveUp("f raised")


def test_too_many_failures_in_a_row_end_the_job_with_the_last_reason_and_the_option():
    restarts = FixedDelay(2, 1.0)

    assert restarts.on_failure("one", is_permanent=False, now_seconds=NOW) == Restart(1.0)
    assert restarts.on_failure("two", is_permanent=False, now_seconds=NOW) == Restart(1.0)
    gave_up = restarts.on_failure("three", is_permanent=False, now_seconds=NOW)
    assert isinstance(gave_up, GiveUp)
    assert gave_up.reason.startswith("three (after 2 restarts")
    assert "restartAttempts" in gave_up.reason


def test_progress_starts_the_count_anew():
    restarts = FixedDelay(1, 1.0)

    for _ in range(5):
        assert restarts.on_failure("killed", is_permanent=False, now_seconds=NOW) == Restart(1.0)
        restarts.on_progress()


def test_without_restarts_the_first_failure_ends_the_job():
    assert isinstance(
        FixedDelay(0, 1.0).on_failure("killed", is_permanent=False, now_seconds=NOW), GiveUp
    )


def test_flinks_fixed_delay_is_one_restart_after_a_second():
    restarts = made_of(restartStrategy="fixed-delay")

    assert delays(restarts, 1) == [1.0]
    assert isinstance(restarts.on_failure("again", is_permanent=False, now_seconds=HOUR), GiveUp)


def test_the_options_of_the_fixed_delay_reach_it():
    restarts = made_of(restartAttempts="2", restartDelay="250 ms")

    assert delays(restarts, 2) == [0.25, 0.25]
    assert isinstance(restarts.on_failure("again", is_permanent=False, now_seconds=HOUR), GiveUp)


# --- failure rate --------------------------------------------------------------------------------


def test_as_many_failures_as_the_interval_allows_are_followed_by_restarts_and_one_more_is_not():
    restarts = FailureRate(failures_max=2, interval_seconds=60.0, delay_seconds=0.5)

    for now in (0.0, 10.0):
        decision = restarts.on_failure("killed", is_permanent=False, now_seconds=now)
        assert decision == Restart(0.5)
    gave_up = restarts.on_failure("lost", is_permanent=False, now_seconds=20.0)
    assert isinstance(gave_up, GiveUp)
    assert gave_up.reason.startswith("lost (failure 3 within 60 s")
    assert "restartMaxFailuresPerInterval" in gave_up.reason


def test_a_failure_longer_ago_than_the_interval_counts_no_more():
    restarts = FailureRate(failures_max=2, interval_seconds=60.0, delay_seconds=0.5)

    for now in (0.0, 50.0, 60.5, 111.0, 121.0):
        decision = restarts.on_failure("killed", is_permanent=False, now_seconds=now)
        assert decision == Restart(0.5)


def test_a_failure_just_as_long_ago_as_the_interval_still_counts():
    restarts = FailureRate(failures_max=1, interval_seconds=60.0, delay_seconds=0.5)

    restarts.on_failure("killed", is_permanent=False, now_seconds=0.0)
    assert isinstance(restarts.on_failure("killed", is_permanent=False, now_seconds=60.0), GiveUp)


def test_progress_does_not_change_a_rate():
    restarts = FailureRate(failures_max=1, interval_seconds=60.0, delay_seconds=0.5)

    restarts.on_failure("killed", is_permanent=False, now_seconds=0.0)
    restarts.on_progress()
    assert isinstance(restarts.on_failure("killed", is_permanent=False, now_seconds=30.0), GiveUp)


def test_flinks_failure_rate_is_one_a_minute_after_a_second():
    restarts = made_of(restartStrategy="failure-rate")

    for now in (0.0, 60.1, 120.2):
        decision = restarts.on_failure("killed", is_permanent=False, now_seconds=now)
        assert decision == Restart(1.0)
    assert isinstance(restarts.on_failure("killed", is_permanent=False, now_seconds=180.0), GiveUp)


def test_the_options_of_the_failure_rate_reach_it():
    restarts = made_of(
        restartMaxFailuresPerInterval="2", restartFailureInterval="10 s", restartDelay="3 s"
    )

    assert delays(restarts, 2) == [3.0, 3.0]
    gave_up = restarts.on_failure("killed", is_permanent=False, now_seconds=1010.0)
    assert isinstance(gave_up, GiveUp)


# --- exponential delay ---------------------------------------------------------------------------


def test_flinks_exponential_delay_grows_by_half_from_a_second_to_a_minute():
    waited = delays(made_of(), 13)

    assert waited[:4] == [1.0, 1.5, 2.25, 3.375]
    assert all(later == pytest.approx(1.5 * earlier) for earlier, later in pairwise(waited[:11]))
    assert waited[11:] == [MINUTE, MINUTE]


def test_a_job_that_fails_for_years_still_waits_a_minute_each_time():
    assert delays(made_of(), 10_000)[-1] == MINUTE


def test_what_a_delay_is_made_of_stays_finite_however_often_it_grows():
    backoff = Backoff(initial_seconds=1.0, max_seconds=60.0, multiplier=1000.0, jitter_factor=1.0)
    grown = backoff.initial_seconds

    for _ in range(1000):
        grown = backoff.grown(grown)

    assert math.isfinite(grown)


def test_jitter_moves_a_delay_by_up_to_a_tenth_to_both_sides():
    shortest, longest = made_of(lambda: 0.0), made_of(lambda: 1.0)

    assert delays(shortest, 3) == pytest.approx([1.0, 1.35, 2.025])  # never less than the first
    assert delays(longest, 3) == pytest.approx([1.1, 1.65, 2.475])


def test_jitter_does_not_lengthen_the_longest_delay():
    assert max(delays(made_of(lambda: 1.0), 50)) == MINUTE


def test_jitter_is_drawn_anew_for_each_failure():
    drawn = iter([0.5, 1.0, 0.0])

    assert delays(made_of(lambda: next(drawn)), 3) == pytest.approx([1.0, 1.65, 2.025])


def test_an_hour_without_failures_after_a_restart_begins_again_with_the_first_delay():
    restarts = made_of()
    delays(restarts, 3)  # the last restart is at 1000 + 1 + 1.5 + 2.25
    restarted = 1004.75

    almost = restarts.on_failure("lost", is_permanent=False, now_seconds=restarted + HOUR - 1)
    assert almost == Restart(3.375)
    restarted += HOUR - 1 + 3.375
    after = restarts.on_failure("lost", is_permanent=False, now_seconds=restarted + HOUR)
    assert after == Restart(1.0)


def test_progress_does_not_shorten_the_delay():
    restarts = made_of()
    delays(restarts, 3)

    restarts.on_progress()

    decision = restarts.on_failure("killed", is_permanent=False, now_seconds=1004.75)
    assert decision == Restart(3.375)


def test_a_second_failure_before_the_restart_waits_for_the_same_restart():
    restarts = made_of()
    delays(restarts, 3)
    restarts.on_failure("slot 0 was lost", is_permanent=False, now_seconds=2000.0)

    same = restarts.on_failure("slot 1 was lost", is_permanent=False, now_seconds=2001.0)
    assert same == Restart(2.375)
    after = restarts.on_failure("slot 1 was lost", is_permanent=False, now_seconds=2003.375)
    assert after == Restart(5.0625)


def test_a_number_of_restarts_without_a_quiet_hour_ends_the_job_if_one_is_given():
    restarts = made_of(restartAttemptsBeforeResetBackoff="2")

    assert delays(restarts, 2) == [1.0, 1.5]
    gave_up = restarts.on_failure("lost", is_permanent=False, now_seconds=1002.5)
    assert isinstance(gave_up, GiveUp)
    assert gave_up.reason.startswith("lost (after 2 restarts without 3600 s free of failures")
    assert "restartAttemptsBeforeResetBackoff" in gave_up.reason


def test_a_quiet_time_gives_all_restarts_back():
    restarts = made_of(restartAttemptsBeforeResetBackoff="2")
    delays(restarts, 2)

    now = 1002.5 + HOUR
    for delay in (1.0, 1.5):
        decision = restarts.on_failure("lost", is_permanent=False, now_seconds=now)
        assert decision == Restart(delay)
        now += delay


def test_the_options_of_the_exponential_delay_reach_it():
    restarts = made_of(
        lambda: 0.0,
        restartInitialBackoff="2 s",
        restartMaxBackoff="30 s",
        restartBackoffMultiplier="4",
        restartResetBackoffThreshold="10 s",
        restartJitterFactor="0.25",
    )

    assert delays(restarts, 4) == [2.0, 6.0, 24.0, 30.0]
    decision = restarts.on_failure("lost", is_permanent=False, now_seconds=1062.0 + 10.0)
    assert decision == Restart(2.0)


# --- failures that come again ---------------------------------------------------------------------

KILLED, BROKEN, STUCK = SlotCrashed(1), CodeFailed("ValueError at a"), CodeFailed("KeyError at b")
UNSTARTED = NothingRan("No module named 'tidying'")


def given_up(same: SameFailure, *signs: Sign | None) -> list[bool]:
    """For each failure, by its sign, whether the job is given up."""
    return [same.on_failure("it failed", sign, 0.0) is not None for sign in signs]


def test_a_slot_that_dies_again_and_again_is_given_up():
    assert given_up(SameFailure(2, 9), KILLED, KILLED, KILLED) == [False, False, True]


def test_an_error_that_comes_again_at_the_same_place_is_given_up():
    assert given_up(SameFailure(9, 2), BROKEN, BROKEN, BROKEN) == [False, False, True]


def test_two_failures_that_take_turns_do_not_hide_each_other():
    same = SameFailure(9, 2)
    assert given_up(same, BROKEN, STUCK, KILLED, BROKEN, STUCK, KILLED) == [False] * 6
    assert given_up(same, BROKEN) == [True]


def test_a_checkpoint_or_a_failure_from_outside_starts_the_count_anew():
    same = SameFailure(2, 2)
    assert given_up(same, KILLED, KILLED, None, KILLED, KILLED) == [False] * 5
    same.on_progress()
    assert given_up(same, KILLED, BROKEN, KILLED, BROKEN, KILLED) == [False] * 4 + [True]


def test_what_fails_outside_is_left_to_the_strategy_for_ever():
    assert not any(given_up(SameFailure(0, 0), *[None] * 1000))


def test_the_same_failure_again_without_a_slot_that_ever_ran_is_final():
    assert given_up(SameFailure(9, 9), UNSTARTED, UNSTARTED) == [False, True]
    assert given_up(SameFailure(9, 9), UNSTARTED, NothingRan("no executor")) == [False, False]


def test_what_keeps_the_slots_of_a_job_that_has_run_from_starting_may_heal():
    same = SameFailure(9, 9)
    same.on_running()
    assert not any(given_up(same, *[UNSTARTED] * 100))


def test_places_without_number_are_not_remembered_for_ever():
    same = SameFailure(9, 1)
    assert not any(given_up(same, *(CodeFailed(f"line {n}") for n in range(10_000))))
    assert len(same._seen) == 100


@pytest.mark.parametrize(
    ("sign", "says"),
    [
        (KILLED, "slot 1 has died 1 times without a completed checkpoint"),
        (KILLED, "raise restartSameCrashMax"),
        (BROKEN, "the same error 1 times without a completed checkpoint"),
        (BROKEN, "raise restartSameErrorMax"),
    ],
)
def test_the_sentence_says_how_often_where_and_what_to_do(sign, says):
    decision = SameFailure(0, 0).on_failure("it failed", sign, 0.0)

    assert decision.reason.startswith("it failed (")
    assert says in decision.reason


@pytest.mark.parametrize(("text", "limit"), [("3", 3), ("0", 0), ("infinite", math.inf)])
def test_the_limit_of_crashes_is_an_option(text, limit):
    assert job_config({"restartSameCrashMax": text}).restart_same_crash_max == limit


@pytest.mark.parametrize(("text", "limit"), [("3", 3), ("0", 0), ("infinite", math.inf)])
def test_the_limit_of_errors_is_an_option(text, limit):
    assert job_config({"restartSameErrorMax": text}).restart_same_error_max == limit


# --- at the same record, although checkpoints complete --------------------------------------------

AT_7 = CodeFailed("ValueError at a", "Row(id=7)")
AT_8 = CodeFailed("ValueError at a", "Row(id=8)")


def given_up_with_checkpoints_between(
    same: SameFailure, *signs: Sign, apart_seconds: float = 60.0
) -> list[bool]:
    """The same, with a checkpoint that completes before each failure."""
    told = []
    for number, sign in enumerate(signs):
        same.on_progress()
        told.append(same.on_failure("it failed", sign, number * apart_seconds) is not None)
    return told


def test_an_error_at_a_record_that_comes_again_after_each_restart_is_given_up_whatever_completes():
    same = SameFailure(9, 2)
    assert given_up_with_checkpoints_between(same, AT_7, AT_7, AT_7) == [False, False, True]


def test_two_records_that_take_turns_are_given_up_too():
    same = SameFailure(9, 2)
    told = given_up_with_checkpoints_between(same, AT_7, AT_8, AT_7, AT_8, AT_7)
    assert told == [False] * 4 + [True]


def test_an_error_at_one_record_after_the_other_is_an_outage_that_the_job_gets_through():
    same = SameFailure(9, 2)
    signs = [CodeFailed("ValueError at a", f"Row(id={n})") for n in range(1000)]
    assert not any(given_up_with_checkpoints_between(same, *signs))


def test_records_that_fail_in_turn_without_a_checkpoint_are_one_failure_that_comes_again():
    assert given_up(SameFailure(9, 2), AT_7, AT_8, AT_7) == [False, False, True]


def test_a_record_that_looks_the_same_long_after_is_another_one():
    same, signs = SameFailure(9, 2), [AT_7] * 100
    assert not any(given_up_with_checkpoints_between(same, *signs, apart_seconds=3601.0))


def test_long_delays_between_restarts_do_not_make_it_another_record():
    same = SameFailure(9, 2)
    told = [same.on_failure("it failed", AT_7, now) is not None for now in (0.0, 5000.0, 10_000.0)]
    assert told == [False, False, True]


def test_what_fails_outside_explains_a_record_too():
    same = SameFailure(9, 2)
    given_up_with_checkpoints_between(same, AT_7, AT_7)
    assert given_up(same, None, AT_7) == [False, False]


def test_of_a_record_that_comes_again_the_sentence_says_so():
    same = SameFailure(9, 1)
    given_up_with_checkpoints_between(same, AT_7)
    same.on_progress()
    decision = same.on_failure("it failed", AT_7, 0.0)
    assert "the same error 2 times at the same record, which comes again" in decision.reason
    assert "raise restartSameErrorMax" in decision.reason
