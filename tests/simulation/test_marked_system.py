"""The simulated system that takes marks, and which of its rows count when a job goes back."""

import pytest

from stillframe.ids import Mark, Writer
from stillframe.testing.simulation.limits import limits_of
from stillframe.testing.simulation.marked import MarkedOutside, MarkedTarget, Written
from stillframe.testing.simulation.past import Past, Shown
from stillframe.testing.simulation.run import _Run, run_seed
from stillframe.testing.simulation.world import World

WRITER = Writer("i1", "rows", 0)


class Chosen:
    """Dice that fall as they are told."""

    def __init__(self, *fates):
        self.fates = list(fates)

    def random(self):
        return 0.99 if not self.fates else 0.0

    def choice(self, choices):
        return self.fates.pop(0) if self.fates else choices[0]


def system(*fates):
    """In which the next transactions have these fates, and all else goes well."""
    return MarkedOutside(World(1), Chosen(*fates), fails=0.5 if fates else 0.0)


def written(checkpoint_id, *rows):
    return Written(Mark(WRITER, checkpoint_id), list(rows))


def test_who_began_before_somebody_else_is_shut_out():
    outside = system()
    zombie = outside.shut_out(WRITER)
    outside.do(outside.shut_out(WRITER), written(1, (10, 1)))

    with pytest.raises(ConnectionError, match="is shut out"):
        outside.do(zombie, written(1, (10, 1)))
    assert [each.rows for each in outside.written] == [[(10, 1)]]


def test_a_late_transaction_is_done_unless_somebody_has_begun_since():
    outside = system("late", "late")
    for is_followed, rows in ((False, (1, 0)), (True, (2, 0))):
        began = outside.shut_out(WRITER)
        with pytest.raises(TimeoutError):
            outside.transact(began, written(rows[0], rows))
        if is_followed:
            outside.shut_out(WRITER)
        outside.world.run(lambda: not outside.world._agenda, 10)

    assert outside.marks == {WRITER: 1}
    assert outside.written == [written(1, (1, 0))]


def test_of_a_transaction_that_is_given_up_nothing_is_there_and_of_one_unanswered_all():
    outside = system("given up", "done")
    target = MarkedTarget(outside)
    for fails in (ConnectionError, TimeoutError):
        target._began = outside.shut_out(WRITER)
        with pytest.raises(fails):
            outside.transact(target._began, written(1, (1, 0)))
        if fails is ConnectionError:
            assert (outside.written, outside.marks) == ([], {})

    assert (outside.written, outside.marks) == ([written(1, (1, 0))], {WRITER: 1})


def test_only_marks_of_what_was_reported_are_forgotten():
    outside = system()
    outside.do(outside.shut_out(WRITER), written(1, (1, 0)))
    outside.forget()
    assert outside.marks == {WRITER: 1}, "there is no receipt yet"

    outside.on_reported(Mark(WRITER, 1))
    outside.forget()
    assert outside.marks == {}


def shown(checkpoint_id):
    return Shown("b0", "rows-0", checkpoint_id, [(checkpoint_id, 0)])


def counted(past):
    return [each.prepared_for for each in past.shown]


def test_after_going_back_only_what_came_before_counts_and_what_comes_after():
    past = Past()
    for number in (1, 2, 3):
        past.takes(shown(number))
    past.go_back_to(1, 3)
    past.takes(shown(2))  # by a slot that does not know yet
    past.went_back()

    assert not past.takes(shown(3)), "a zombie"
    assert past.takes(shown(4))
    assert counted(past) == [1, 4]


def test_a_job_that_did_not_go_back_after_all_keeps_what_became_visible_meanwhile():
    past = Past()
    past.takes(shown(1))
    past.go_back_to(1, 2)
    past.takes(shown(2))
    past.went_on()

    assert counted(past) == [1, 2]


@pytest.mark.parametrize("act", ["older", "anew", "losses", "twice"])
def test_a_limit_leaves_out_what_people_do(act):
    seed = next(seed for seed in range(200) if _drawn(seed)[act])

    assert _drawn(seed, f"{act}=0")[act] == 0


def _drawn(seed, limits=""):
    run = _Run(seed, limits_of(limits), False)
    run._world.close()
    return run._drawn()


def test_a_run_with_people_in_it_is_the_same_again():
    seed = next(seed for seed in range(200) if _drawn(seed)["older"])

    assert run_seed(seed) == run_seed(seed)
