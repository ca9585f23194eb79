"""When a driver may take a job over."""

from dataclasses import replace

from stillframe.protocol.lease import Alive, Lease, LeaseWatch, LookAgain, TakeOver

THEIRS = Lease("first", 7, 15.0, "a-host", "a boot", 4711, 99)
OTHERS = replace(THEIRS, driver="second", timeout_seconds=60.0)


def test_a_job_without_a_lease_is_free():
    assert LeaseWatch().on_look([], (), 0.0) == TakeOver()


def test_a_driver_that_is_known_to_be_gone_is_not_waited_for():
    assert LeaseWatch().on_look([THEIRS], {"first"}, 0.0) == TakeOver()


def test_a_lease_that_nobody_renews_runs_out_by_the_clock_of_who_waits():
    watch = LeaseWatch()

    assert watch.on_look([THEIRS], (), 1_000.0) == LookAgain(2.5, THEIRS)
    assert watch.on_look([THEIRS], (), 1_014.0) == LookAgain(1.0, THEIRS)
    assert watch.on_look([THEIRS], (), 1_015.0) == TakeOver()


def test_a_lease_that_is_renewed_while_somebody_waits_belongs_to_a_driver_that_lives():
    watch = LeaseWatch()
    watch.on_look([THEIRS], (), 0.0)
    renewed = replace(THEIRS, renewal=8)

    assert watch.on_look([renewed], (), 14.0) == Alive(renewed)


def test_a_renewal_long_after_the_lease_ran_out_still_tells_of_a_driver_that_lives():
    watch = LeaseWatch()
    watch.on_look([THEIRS, OTHERS], (), 0.0)
    renewed = replace(THEIRS, renewal=8)

    assert watch.on_look([renewed, OTHERS], (), 50.0) == Alive(renewed)


def test_of_several_leases_the_one_that_lasts_longest_is_waited_for():
    watch = LeaseWatch()
    watch.on_look([THEIRS, OTHERS], (), 0.0)

    assert watch.on_look([THEIRS, OTHERS], (), 15.0) == LookAgain(10.0, OTHERS)
    assert watch.on_look([THEIRS, OTHERS], (), 60.0) == TakeOver()


def test_of_two_renewals_that_are_there_at_once_the_newer_counts():
    """Their driver may have died between writing the one and deleting the other."""
    watch, renewed = LeaseWatch(), replace(THEIRS, renewal=8)

    assert watch.on_look([THEIRS, renewed], (), 0.0) == LookAgain(2.5, renewed)
    assert watch.on_look([renewed, THEIRS], (), 15.0) == TakeOver()
    assert watch.on_look([THEIRS, replace(THEIRS, renewal=9)], (), 16.0) == Alive(
        replace(THEIRS, renewal=9)
    )


def test_a_lease_given_back_need_not_be_waited_for():
    watch = LeaseWatch()
    watch.on_look([THEIRS], (), 0.0)

    assert watch.on_look([], (), 0.1) == TakeOver()


def test_a_lease_is_read_as_it_was_written():
    assert Lease.from_json(THEIRS.to_json()) == THEIRS
