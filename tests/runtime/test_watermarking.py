"""Watermarks on their way through subtasks: made by the chain, passed on, restored."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from stillframe.graph.logical import WithWatermark
from stillframe.runtime.elements import EndOfRecords, Idle, Watermark
from stillframe.runtime.watermarking import Watermarking

TIMED = pa.schema([("at", pa.timestamp("us", "UTC"))])


def timed(*seconds: int | None) -> pa.RecordBatch:
    moments = [None if s is None else datetime.fromtimestamp(s, UTC) for s in seconds]
    return pa.record_batch([pa.array(moments, TIMED.field("at").type)], schema=TIMED)


def watermarking(delay_seconds: int = 0, restored_us: int | None = None) -> Watermarking:
    return Watermarking("time", 0, WithWatermark("at", delay_seconds * 1_000_000), restored_us)


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


def test_the_end_of_the_records_is_the_end_of_time_and_says_so_itself(new_inner):
    inner = new_inner()
    for channel in inner.inputs:
        channel.send(EndOfRecords())
    inner.run()

    assert inner.sent() == [EndOfRecords()]
