"""Watermarks on their way through subtasks: made by the chain, by split, passed on, restored."""

from __future__ import annotations

import logging
import math
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from stillframe.graph.expressions import Call, Column, Literal
from stillframe.graph.logical import WithWatermark
from stillframe.protocol.event_time import END_OF_TIME_US
from stillframe.protocol.snapshots import EventTimes
from stillframe.runtime.elements import EndOfRecords, Idle, Watermark
from stillframe.runtime.operators import Filtering
from stillframe.runtime.reading import splits_of, times_of_splits
from stillframe.runtime.watermarking import Watermarking
from stillframe.state.reached import BEGINNING_US
from stillframe.testing.clock import ManualClock
from stillframe.testing.sources import Gate, Wait

TIMED = pa.schema([("at", pa.timestamp("us", "UTC"))])


def timed(*seconds: int | None) -> pa.RecordBatch:
    moments = [None if s is None else datetime.fromtimestamp(s, UTC) for s in seconds]
    return pa.record_batch([pa.array(moments, TIMED.field("at").type)], schema=TIMED)


def watermarking(delay_seconds: int = 0, restored_us: int | None = None, **more) -> Watermarking:
    operator = WithWatermark("at", delay_seconds * 1_000_000)
    return Watermarking("time", 0, operator, more.pop("clock", ManualClock()), restored_us, **more)


def test_time_is_that_of_the_newest_record_less_the_delay():
    operator = watermarking(delay_seconds=10)
    assert list(operator.process(timed(100, 130, 120))) == [timed(100, 130, 120)]
    assert operator.watermark_us == 120_000_000


def test_an_older_record_does_not_turn_time_back():
    operator = watermarking()
    operator.process(timed(100))
    operator.process(timed(50))
    assert operator.watermark_us == 100_000_000


@pytest.mark.parametrize("nothing", [timed(), timed(None, None)])
def test_records_without_an_event_time_do_not_move_it(nothing):
    operator = watermarking(restored_us=7)
    operator.process(nothing)
    assert operator.watermark_us == 7


def test_how_far_time_has_come_is_in_the_snapshot():
    operator = watermarking()
    operator.process(timed(100))
    write = operator.snapshot(1)
    operator.process(timed(200))
    assert operator.described(1, write()).watermark_us == 100_000_000


def test_the_event_times_between_two_barriers_are_told_once():
    operator = watermarking(delay_seconds=10)
    operator.process(timed(100, None, 130))
    operator.process(timed(40))
    operator.process(timed(None))
    assert operator.event_times() == EventTimes("time", 3, 40_000_000, 130_000_000, 90_000_000.0)
    assert operator.event_times() is None
    much = [1_700_000_000 + second % 2 for second in range(20_000)]
    operator.process(timed(*much))
    assert operator.event_times().mean_us == 1_700_000_000_500_000.0


def test_a_subtask_that_knows_nothing_of_time_says_so_in_the_snapshot():
    operator = watermarking()
    assert operator.described(1, operator.snapshot(1)()).watermark_us == BEGINNING_US
    assert watermarking(restored_us=BEGINNING_US).watermark_us is None


# --- far in the future -----------------------------------------------------------------------

NOW = ManualClock().wall_ms() // 1000
DAY = 86_400


@pytest.fixture
def bounded():
    return watermarking(clock=ManualClock(), ahead_seconds_max=2 * DAY)


def test_a_record_from_the_far_future_is_passed_on_and_does_not_move_time(bounded):
    far = timed(NOW + 3 * DAY)
    assert list(bounded.process(far)) == [far]
    assert bounded.watermark_us is None
    bounded.process(timed(NOW, NOW + 3 * DAY, None, NOW - 5))
    assert bounded.watermark_us == NOW * 1_000_000
    assert bounded.ahead_rows == 2


def test_a_record_may_be_as_far_ahead_as_was_said(bounded):
    bounded.process(timed(NOW + 2 * DAY))
    assert bounded.watermark_us == (NOW + 2 * DAY) * 1_000_000
    assert bounded.ahead_rows == 0


def test_what_comes_from_the_far_future_is_said_in_the_log_once(bounded, caplog):
    with caplog.at_level(logging.WARNING):
        bounded.process(timed(NOW + 3 * DAY))
        bounded.process(timed(NOW + 4 * DAY))

    [record] = caplog.records
    assert "withWatermark('at')" in record.message
    assert "2026-01-04 00:00:00" in record.message
    assert "watermarkMaxAhead" in record.message


@pytest.mark.parametrize("time_us", [2**63 - 1, -(2**63)])
def test_no_event_time_is_taken_for_the_beginning_or_the_end_of_time(time_us):
    operator = watermarking(delay_seconds=1, ahead_seconds_max=math.inf)
    column = pa.array([time_us]).cast(TIMED.field("at").type)
    operator.process(pa.record_batch([column], schema=TIMED))
    assert BEGINNING_US < operator.watermark_us < END_OF_TIME_US


# --- by split --------------------------------------------------------------------------------

KEYED = pa.schema([("id", pa.int64()), *TIMED])


def rows(*seconds):
    return pa.record_batch([list(seconds), timed(*seconds).column("at")], schema=KEYED)


def seconds(*moments):
    return [Watermark(moment * 1_000_000) for moment in moments]


def watermarks(source):
    return [each for each in source.sent() if isinstance(each, Watermark | Idle)]


def marking(restored_us=None, restored_splits=None, idle_timeout_seconds=None):
    operator = WithWatermark("at", 0)
    more = (restored_us, restored_splits, idle_timeout_seconds)
    return lambda clock: Watermarking("time", 0, operator, clock, *more)


def longer_than(bound):
    columns = (Literal(pa.scalar(bound)), Column("id", pa.int64()))
    return lambda clock: Filtering(Call("less", columns, pa.bool_()))


def test_records_of_a_slow_split_are_not_late_because_another_is_ahead(new_source):
    fast, slow = (rows(900), rows(1000)), (rows(1), rows(2), Wait(Gate("never")))
    source = new_source(scripts=(fast, slow), behind=[marking()])
    for _ in range(4):
        source.subtask.step()

    assert source.sent() == [[900], [1], *seconds(1), [1000], [2], *seconds(2)]


def test_a_split_that_ends_lets_time_go_on(new_source):
    source = new_source(scripts=((rows(900), rows(1000)), (rows(1),)), behind=[marking()])
    for _ in range(3):
        source.subtask.step()

    assert source.sent() == [[900], [1], *seconds(1, 900), [1000], *seconds(1000)]


def test_how_far_each_split_had_come_is_kept_with_it_and_goes_where_the_split_goes(new_source):
    waits = Wait(Gate("never"))
    scripts = ((rows(900), waits), (rows(1), rows(3), rows(5), waits))
    source = new_source(scripts=scripts, behind=[marking()])
    source.subtask.step()
    source.subtask.step()
    source.trigger(1)
    source.events.write(source.subtask, 1)
    _, [reading, marked], _ = source.events.acknowledgement()

    times = times_of_splits(reading.items, "time")
    assert times == {"script-0": 900_000_000, "script-1": 1_000_000}
    assert marked.watermark_us == 1_000_000
    first, second = ([item] for item in reading.items)
    for items, reached in ((first, [900, 900]), (second, [1, 3])):
        restored = marking(marked.watermark_us, times_of_splits(items, "time"))
        again = new_source(scripts=scripts, splits=splits_of(items), behind=[restored])
        again.subtask.step()
        assert watermarks(again) == seconds(*reached)


def test_a_snapshot_before_the_first_step_keeps_what_was_restored(new_source):
    scripts = ((rows(900),), (rows(1),))
    source = new_source(scripts=scripts, behind=[marking(None, {"script-0": 7, "script-1": 5})])
    source.trigger(1)
    source.events.write(source.subtask, 1)

    _, [reading, marked], _ = source.events.acknowledgement()
    assert times_of_splits(reading.items, "time") == {"script-0": 7, "script-1": 5}
    assert marked.watermark_us == 5


def test_at_most_once_each_batch_counts_for_the_split_it_was_read_from(new_source):
    scripts = ((rows(900),), (rows(1), rows(2)))
    source = new_source(scripts=scripts, behind=[marking()], mode="at-most-once")
    source.run()
    source.trigger(1)
    source.subtask.on_complete(1, 1)
    source.run()

    sent = [each for each in source.sent() if each != source.barrier(1)]
    assert sent == [[900], [1], *seconds(1), [2], *seconds(2, 900), EndOfRecords()]


# --- idle splits, and what is filtered away ---------------------------------------------------


def idle_after_ten(new_source, tmp_path, *before):
    """Two splits that have given something and wait; the first goes on behind the gate."""
    silent = Wait(Gate(str(tmp_path / "gate")))
    never = Wait(Gate("never"))
    scripts = ((rows(10), silent, rows(11), never), (rows(1), never))
    behind = [*before, marking(idle_timeout_seconds=10)]
    source = new_source(scripts=scripts, behind=behind, idle_timeout_seconds=10)
    source.run()
    return source, silent.gate


def test_a_split_with_nothing_to_say_holds_time_back_until_it_is_idle(new_source, tmp_path):
    source, _ = idle_after_ten(new_source, tmp_path)
    assert watermarks(source) == seconds(1)
    source.clock.advance(9)
    source.run()
    assert watermarks(source) == []
    source.clock.advance(1)
    source.run()

    assert watermarks(source) == [Idle(), *seconds(10), Idle()]


def test_time_in_which_a_split_was_not_asked_does_not_make_it_idle(new_source, tmp_path):
    source, gate = idle_after_ten(new_source, tmp_path)
    source.out.send(rows(*range(200_000)))
    source.run()
    source.clock.advance(100)
    source.run()
    source.sent()
    gate.open()
    source.run()

    assert source.sent() == [[11]]


def test_a_split_whose_records_are_all_filtered_away_before_time_is_told_is_idle(
    new_source, tmp_path
):
    source, gate = idle_after_ten(new_source, tmp_path, longer_than(9))
    source.clock.advance(9)
    gate.open()
    source.subtask.step()
    assert source.sent() == [[10], [11]], "nothing is known of the other split"
    source.clock.advance(1)
    source.subtask.step()

    assert source.sent() == seconds(11)


def test_records_that_are_filtered_away_behind_it_still_move_time(new_source):
    source = new_source(rows(1), rows(2), behind=[marking(), longer_than(100)])
    source.run()

    assert source.sent() == [*seconds(1, 2), EndOfRecords()]


# --- from task to task -----------------------------------------------------------------------


def test_a_task_passes_on_the_time_of_its_slowest_input(new_inner):
    inner = new_inner()
    first, second = inner.inputs
    first.send(Watermark(50))
    inner.run()
    assert inner.sent() == []
    second.send(Watermark(20))
    inner.run()

    assert inner.sent() == [Watermark(20)]


def test_an_input_that_has_ended_does_not_hold_time_back(new_inner):
    inner = new_inner()
    first, second = inner.inputs
    first.send(Watermark(50))
    second.send(EndOfRecords())
    inner.run()

    assert inner.sent() == [Watermark(50)]


def test_an_idle_input_does_not_hold_time_back_and_idleness_is_passed_on(new_inner):
    inner = new_inner()
    first, second = inner.inputs
    first.send(Watermark(50))
    second.send(Idle())
    inner.run()
    assert inner.sent() == [Watermark(50)]
    first.send(Idle())
    inner.run()

    assert inner.sent() == [Idle()]


def test_an_input_that_has_ended_beside_an_idle_one_leaves_a_task_idle_and_not_at_its_end(
    new_inner,
):
    inner = new_inner()
    first, second = inner.inputs
    first.send(Watermark(50))
    first.send(EndOfRecords())
    second.send(Idle())
    inner.run()
    assert inner.sent() == [Watermark(50), Idle()]
    second.send(Watermark(60))
    inner.run()

    assert inner.sent() == [Watermark(60)]


def test_the_end_of_the_records_is_the_end_of_time_and_says_so_itself(new_inner):
    inner = new_inner()
    for channel in inner.inputs:
        channel.send(EndOfRecords())
    inner.run()

    assert inner.sent() == [EndOfRecords()]
