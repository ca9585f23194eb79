"""Where the time of a subtask goes, by a clock that the test turns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stillframe.protocol.measures import TimeShares
from stillframe.runtime.time_shares import BACKPRESSURED, HELD, IDLE, TURN, ShareClock


def test_time_in_a_turn_that_did_something_is_work_and_between_turns_what_it_waited_for():
    clock = ShareClock(100)
    clock.begin_turn(110)  # 10: nothing to do yet
    clock.end_turn(150, has_worked=True, waits=TURN)
    clock.begin_turn(155)
    clock.end_turn(156, has_worked=False, waits=BACKPRESSURED)
    clock.begin_turn(256)
    clock.end_turn(300, has_worked=True, waits=HELD)

    assert clock.shares(330) == TimeShares(
        working=40 + 44, turn=5, backpressured=1 + 100, held=30, idle=10
    )


def test_a_step_that_does_not_return_is_work_so_far():
    clock = ShareClock(0)
    clock.begin_turn(10)

    assert clock.shares(1_000).working == 990


@given(
    st.lists(
        st.tuples(
            st.integers(0, 50),
            st.integers(0, 50),
            st.booleans(),
            st.sampled_from([TURN, BACKPRESSURED, HELD, IDLE]),
        )
    ),
    st.integers(0, 50),
)
def test_all_time_is_in_one_of_the_shares(turns, rest):
    now, clock = 7, ShareClock(7)
    for pause, step, has_worked, waits in turns:
        clock.begin_turn(now + pause)
        now += pause + step
        clock.end_turn(now, has_worked, waits)

    assert clock.shares(now + rest).total == now + rest - 7
