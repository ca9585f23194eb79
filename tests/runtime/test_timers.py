"""Timers of user functions in a subtask: when they fire, and what comes between two batches."""

from collections import Counter
from random import Random

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stillframe.api.functions import KeyedFunction, TwoInputFunction
from stillframe.connectors.discard import DiscardSink
from stillframe.errors import UserCodeError
from stillframe.graph.logical import Connect, Node, Process, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.key_groups import key_group_range
from stillframe.protocol.event_time import END_OF_TIME_US
from stillframe.protocol.restore import GroupsReached, SubtaskState
from stillframe.runtime.assembly import assemble
from stillframe.runtime.building import Surroundings
from stillframe.runtime.channels import LocalChannel, ReplayingInput
from stillframe.runtime.connecting import Connecting
from stillframe.runtime.elements import (
    Barrier,
    CancelBarrier,
    EndOfRecords,
    Idle,
    LatencyMarker,
    Watermark,
)
from stillframe.runtime.inputs import ChannelPlace
from stillframe.runtime.keyed_functions import FIRED_ROWS_MAX, Processing
from stillframe.runtime.task import take_turn
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.local import LocalStore
from stillframe.testing.clock import ManualClock
from stillframe.testing.sources import ScriptedSource

SCHEMA = pa.schema([("id", pa.int64())])
BURST = 100_000


def ids(*numbers):
    return pa.record_batch([list(numbers)], schema=SCHEMA)


def at(times_us):
    return pa.array(times_us, pa.int64()).cast(pa.timestamp("us", "UTC"))


def times_of(fired):
    return fired["time"].cast(pa.int64()).to_pylist()


class Alarm(KeyedFunction):
    """Registers for each id a timer at the time that is its number; says the id when it fires."""

    clock = "event"

    def open(self, timers):
        self.timers = timers
        self.calls = []

    def process(self, batch):
        self.timers.register(batch, batch["id"].cast(pa.timestamp("us", "UTC")), self.clock)
        return ()

    def on_event_timers(self, fired):
        self.calls.append(times_of(fired))
        yield fired.select(["id"])

    on_processing_timers = on_event_timers

    def finish(self):
        yield ids(-1)


class ByTheClock(Alarm):
    clock = "processing"


class Stepping:
    """A subtask with a function, and what it is connected to."""

    def __init__(self, new_inner, tmp_path, function=Alarm, clock=None, **more):
        self.store = LocalStore(tmp_path)
        self.elsewhere = str(tmp_path / "savepoint")
        self.made = []
        self.clock = clock or ManualClock(wall_ms=0)
        self.watermark_us = more.pop("watermark_us", None)
        self.operator = self.operator_of(function, more.pop("keys", ("id",)))
        inputs_us = more.pop("inputs_us", self.watermark_us)
        self.inner = new_inner(
            head=self.operator, clock=self.clock, restored_time_us=inputs_us, **more
        )
        self.inputs = self.inner.inputs
        self.run, self.sent = self.inner.run, self.inner.sent
        self.step = self.inner.subtask.step

    def operator_of(self, function, keys):
        def make():
            self.made.append(function())
            return self.made[-1]

        is_keyed = issubclass(function, KeyedFunction)
        kind, node = (Processing, Process) if is_keyed else (Connecting, Connect)
        return kind(
            *("uid", 0, 1, node(make, "alarm", keys), SCHEMA, SCHEMA, self.store, 128),
            *(self.clock, self.watermark_us),
        )

    @property
    def function(self):
        return self.made[0]

    @property
    def fired(self):
        return [time for call in self.function.calls for time in call]

    def watermark(self, time_us):
        for channel in self.inputs:
            channel.send(Watermark(time_us))

    def burst(self, batches_fired=10):
        """So many timers fall due at one watermark; some batches of them have fired."""
        self.inputs[0].send(ids(*range(BURST)))
        self.run()
        self.watermark(BURST)
        while len(self.function.calls) < batches_fired:
            assert self.step()

    def barriers(self, checkpoint_id=1, alignment_timeout_ms=None):
        for channel in self.inputs:
            channel.send(Barrier(checkpoint_id, 0, alignment_timeout_ms))

    def snapshot(self, checkpoint_id=1):
        """What the checkpoint that was just taken holds."""
        self.inner.events.write(self.inner.subtask, checkpoint_id)
        return self.inner.events.acknowledgement()[1][0]


@pytest.fixture
def stepping(new_inner, tmp_path):
    return lambda function=Alarm, **more: Stepping(new_inner, tmp_path, function, **more)


def restore(snapshot, into, subtask=0, parallelism=1):
    owned = key_group_range(subtask, parallelism, 128)
    for state in snapshot.keyed:
        file = state.file
        buffer = into.store.read_verified(file.path, file.length_bytes, file.crc32)
        take = into.operator.restore_timers if state.name == "timers" else into.operator.restore
        for batch in read_keyed_snapshot(buffer, state.key_groups, owned):
            take(batch)


# --- event time


def test_timers_fire_when_both_inputs_have_passed_them_and_the_watermark_follows(stepping):
    alarm = stepping()
    alarm.inputs[0].send(ids(30, 10, 20))
    alarm.inputs[0].send(Watermark(20))
    alarm.run()
    assert alarm.sent() == []
    alarm.inputs[1].send(Watermark(25))
    alarm.run()

    assert alarm.sent() == [[10, 20], Watermark(20)]


def test_a_timer_registered_by_a_timer_for_a_time_that_has_passed_fires_before_the_watermark(
    stepping,
):
    class Chained(Alarm):
        def on_event_timers(self, fired):
            later = pc.add(fired["time"].cast(pa.int64()), 7).cast(pa.timestamp("us", "UTC"))
            self.timers.register(fired, later)
            yield from super().on_event_timers(fired)

    alarm = stepping(Chained)
    alarm.inputs[0].send(ids(1))
    alarm.watermark(20)
    alarm.run()

    assert alarm.fired == [1, 8, 15]
    assert alarm.sent() == [[1], [1], [1], Watermark(20)]
    assert times_of(alarm.function.timers.registered()) == [22]


def test_a_timer_for_a_time_that_has_passed_fires_before_the_next_records(stepping):
    alarm = stepping()
    alarm.watermark(100)
    alarm.inputs[0].send(ids(50))
    alarm.inputs[0].send(ids(51))
    alarm.run()

    assert alarm.sent() == [Watermark(100), [50], [51]]


def test_a_timer_may_delete_a_later_one_of_its_key_that_is_due_too(stepping):
    class First(Alarm):
        def process(self, batch):
            for time_us in (1, 2, 3):
                self.timers.register(batch, at([time_us] * batch.num_rows))
            return ()

        def on_event_timers(self, fired):
            rest = self.timers.registered(fired)
            self.timers.delete(rest, rest["time"])
            yield from super().on_event_timers(fired)

    alarm = stepping(First)
    alarm.inputs[0].send(ids(5, 6))
    alarm.watermark(10)
    alarm.run()

    assert alarm.sent() == [[5, 6], Watermark(10)]


def test_the_function_sees_how_far_time_has_come(stepping):
    alarm = stepping()
    timers = alarm.function.timers
    assert timers.watermark_us is None
    alarm.watermark(17)
    alarm.run()
    alarm.clock.advance(1.5)

    assert (timers.watermark_us, timers.now_us) == (17, 1_500_000)


def test_the_end_of_records_fires_what_is_left_then_finishes_then_says_so(stepping):
    alarm = stepping()
    alarm.inputs[0].send(ids(*range(5000)))
    for channel in alarm.inputs:
        channel.send(EndOfRecords())
    alarm.run()

    assert alarm.fired == list(range(5000))
    assert alarm.sent()[-2:] == [[-1], EndOfRecords()]
    assert alarm.function.timers.watermark_us == END_OF_TIME_US
    assert alarm.inner.events.take() == [("drained",)]


# --- a burst, and what comes in the middle of it


def test_a_burst_fires_in_batches_and_records_wait_for_the_last(stepping):
    alarm = stepping()
    alarm.burst()
    alarm.inputs[0].send(ids(BURST + 5))
    alarm.run()

    assert alarm.fired == list(range(BURST))
    assert alarm.inner.subtask.measures(0).timers_fired == BURST
    assert max(map(len, alarm.function.calls)) == FIRED_ROWS_MAX
    assert len(alarm.function.calls) < BURST / FIRED_ROWS_MAX + 10
    assert alarm.sent()[-1] == Watermark(BURST)
    assert times_of(alarm.function.timers.registered()) == [BURST + 5]


def test_a_barrier_waits_for_no_batch_of_a_burst_that_is_under_way(stepping):
    alarm = stepping()
    alarm.burst()
    fired_before = len(alarm.fired)
    alarm.barriers()
    alarm.step()
    alarm.step()

    assert alarm.inner.events.take() == [("started", 1)]
    assert len(alarm.fired) == fired_before, "one step per channel, none for timers"
    assert alarm.sent()[-1] == Barrier(1, 0)
    alarm.run()
    assert alarm.fired == list(range(BURST))


def test_what_has_not_fired_is_in_the_snapshot_and_fires_first_after_a_restore(stepping):
    alarm = stepping()
    alarm.burst()
    alarm.barriers()
    alarm.step(), alarm.step()
    fired_before = alarm.fired
    snapshot = alarm.snapshot()
    [timers] = snapshot.keyed
    assert (timers.name, timers.rows) == ("timers", BURST - len(fired_before))
    assert snapshot.watermark_us == BURST

    again = stepping(watermark_us=snapshot.watermark_us)
    restore(snapshot, again)
    again.inputs[0].send(ids(BURST + 1))
    again.watermark(BURST)
    again.watermark(BURST + 1)
    again.run()
    assert fired_before + again.fired == [*range(BURST), BURST + 1]
    sent = again.sent()
    assert sent[-3:] == [Watermark(BURST), [BURST + 1], Watermark(BURST + 1)]


def test_a_restored_burst_can_be_snapshotted_before_its_first_batch(stepping):
    alarm = stepping()
    alarm.burst()
    alarm.barriers()
    alarm.step(), alarm.step()
    snapshot = alarm.snapshot()
    again = stepping(watermark_us=snapshot.watermark_us)
    restore(snapshot, again)
    again.barriers(2)
    again.step(), again.step()

    assert again.fired == []
    assert again.snapshot(2).keyed[0].rows == snapshot.keyed[0].rows
    assert again.sent() == [Barrier(2, 0)], "no watermark before what it made due"


def test_an_overtaking_barrier_does_not_wait_for_the_records_that_wait_for_the_burst(stepping):
    alarm = stepping()
    alarm.burst()
    for channel in alarm.inputs:
        channel.send(ids(BURST + 1))
    alarm.barriers(alignment_timeout_ms=0)
    fired_before = len(alarm.fired)
    alarm.step()
    assert len(alarm.fired) <= fired_before + FIRED_ROWS_MAX
    alarm.inner.events.write_channels(alarm.inner.subtask, 1)
    assert alarm.inner.log.kept[1] == {("in", 0, 0): [BURST + 1], ("in", 1, 0): [BURST + 1]}
    assert alarm.snapshot().keyed[0].rows == BURST - fired_before


def test_a_barrier_behind_another_watermark_is_not_kept_waiting_by_it(stepping):
    alarm = stepping()
    alarm.burst()
    alarm.watermark(BURST + 10)
    alarm.watermark(BURST + 20)
    alarm.barriers()
    fired_before = len(alarm.fired)
    for _ in range(6):
        alarm.step()

    assert len(alarm.fired) == fired_before
    assert alarm.snapshot().watermark_us == BURST + 20
    alarm.run()
    assert alarm.sent()[-1] == Watermark(BURST + 20)


def test_a_barrier_behind_a_latency_marker_waits_neither_for_a_burst_nor_while_the_job_is_held(
    stepping,
):
    alarm = stepping()
    alarm.burst()
    fired_before = len(alarm.fired)
    for number in (1, 2):
        for channel in alarm.inputs:
            channel.send(LatencyMarker(7, 0))
        if number == 1:
            hold(alarm)
        else:
            alarm.barriers(number)
        for _ in range(6):
            alarm.step()

        assert alarm.snapshot(number).keyed[0].rows == BURST - fired_before
    alarm.inner.subtask.on_abort(1)
    alarm.run()
    assert alarm.fired == list(range(BURST))


def test_an_idle_channel_is_not_told_of_before_the_watermark_in_front_of_it(stepping):
    alarm = stepping()
    alarm.burst()
    for channel in alarm.inputs:
        channel.send(Idle())
    alarm.run()

    assert alarm.sent()[-2:] == [Watermark(BURST), Idle()]


def test_a_cancelled_barrier_releases_its_channel_in_the_middle_of_a_burst(stepping):
    alarm = stepping()
    alarm.burst()
    alarm.inputs[0].send(Barrier(1, 0))
    alarm.step()
    alarm.inputs[1].send(CancelBarrier(1))
    fired_before = len(alarm.fired)
    alarm.step()

    assert len(alarm.fired) == fired_before
    assert [said[0] for said in alarm.inner.events.take()] == ["declined"]
    assert list(alarm.inner.subtask.holdings()) == []


def test_a_held_channel_is_not_read_in_the_middle_of_a_burst_either(stepping):
    alarm = stepping()
    alarm.burst()
    alarm.inputs[0].send(Barrier(1, 0))
    alarm.inputs[0].send(Barrier(2, 0))
    alarm.run()
    assert alarm.fired == list(range(BURST))
    alarm.inputs[1].send(Barrier(1, 0))
    alarm.run()

    assert alarm.inner.events.take() == [("started", 1)]


def test_a_snapshot_in_the_middle_of_the_last_burst_is_not_of_a_subtask_that_has_finished(stepping):
    alarm = stepping()
    alarm.inputs[0].send(ids(*range(BURST)))
    for channel in alarm.inputs:
        channel.send(EndOfRecords())
    while not alarm.function.calls:
        alarm.step()
    alarm.barriers()
    alarm.step(), alarm.step()
    fired_before = alarm.fired
    snapshot = alarm.snapshot()
    assert (snapshot.finished, snapshot.keyed[0].rows) == (False, BURST - len(fired_before))
    alarm.run()
    assert alarm.inner.events.take() == [("drained",)]
    alarm.barriers(2)
    alarm.run()
    ended = alarm.snapshot(2)
    assert (ended.finished, ended.keyed) == (True, ())

    again = stepping(watermark_us=snapshot.watermark_us)
    restore(snapshot, again)
    for channel in again.inputs:
        channel.send(EndOfRecords())
    again.run()
    assert fired_before + again.fired == list(range(BURST))
    assert again.sent()[-2:] == [[-1], EndOfRecords()]


def hold(alarm):
    """The savepoint with which the job stops."""
    for channel in alarm.inputs:
        channel.send(Barrier(1, 0, savepoint=alarm.elsewhere, holds=True))
    alarm.run()


def test_a_burst_stops_at_a_barrier_that_holds_and_the_next_snapshot_has_the_same(stepping):
    alarm = stepping()
    alarm.burst()
    fired_before = len(alarm.fired)
    hold(alarm)
    alarm.barriers(2)
    alarm.run()

    assert len(alarm.fired) == fired_before
    first, second = alarm.snapshot(1), alarm.snapshot(2)
    assert first.keyed[0].rows == second.keyed[0].rows == BURST - fired_before
    assert first.watermark_us == second.watermark_us
    assert Watermark(BURST) not in alarm.sent()
    alarm.inner.subtask.on_abort(1)
    alarm.run()
    assert alarm.fired == list(range(BURST)), "the savepoint failed: the job goes on"


def test_a_job_that_rests_fires_first_what_is_due(stepping):
    alarm = stepping()
    alarm.burst()
    assert alarm.fired != list(range(BURST))
    for channel in alarm.inputs:
        channel.send(Barrier(1, 0, holds=True))
    alarm.run()

    assert alarm.fired == list(range(BURST))
    assert alarm.snapshot(1).keyed == ()
    assert alarm.sent()[-1] == Barrier(1, 0, holds=True)


def test_what_the_end_fires_stops_at_a_barrier_that_holds_and_nothing_finishes(stepping):
    alarm = stepping()
    alarm.inputs[0].send(ids(*range(BURST)))
    for channel in alarm.inputs:
        channel.send(EndOfRecords())
    while not alarm.function.calls:
        alarm.step()
    hold(alarm)
    assert ("drained",) not in alarm.inner.events.said
    alarm.inner.subtask.on_abort(1)
    alarm.run()

    assert alarm.fired == list(range(BURST))
    assert alarm.sent()[-2:] == [[-1], EndOfRecords()]


def test_at_least_once_takes_barriers_in_the_middle_too(stepping):
    alarm = stepping(mode="at-least-once")
    alarm.burst()
    alarm.barriers()
    fired_before = len(alarm.fired)
    alarm.step(), alarm.step()

    assert alarm.snapshot().keyed[0].rows == BURST - fired_before


def test_a_burst_stops_while_there_is_no_room_for_what_it_makes(stepping):
    alarm = stepping(buffer_bytes=1)
    alarm.inputs[0].send(ids(*range(BURST)))
    alarm.run()
    alarm.watermark(BURST)
    alarm.run()

    assert len(alarm.function.calls) == 1
    alarm.inner.out.take()
    alarm.run()
    assert len(alarm.function.calls) == 2


def test_others_have_their_turn_after_each_batch(stepping):
    alarm = stepping()
    alarm.burst()
    before = len(alarm.function.calls)
    take_turn([alarm.inner.subtask])

    assert len(alarm.function.calls) == before + 1


# --- processing time


def test_timers_of_processing_time_fire_when_the_clock_has_passed_them(stepping):
    alarm = stepping(ByTheClock)
    alarm.inputs[0].send(ids(300_000, 100_000, 900_000))
    alarm.watermark(10**15)
    alarm.run()
    assert alarm.fired == []
    assert alarm.inner.subtask.idle_seconds_max() == 0.1
    alarm.clock.advance(0.5)
    assert alarm.inner.subtask.idle_seconds_max() == 0
    alarm.run()

    assert alarm.fired == [100_000, 300_000]
    assert alarm.inner.subtask.idle_seconds_max() == pytest.approx(0.4)


def test_without_room_an_overdue_timer_does_not_keep_the_loop_busy(stepping):
    alarm = stepping(ByTheClock, buffer_bytes=1)
    alarm.inputs[0].send(ids(1000))
    alarm.run()
    alarm.inner.out.send(ids(1))
    alarm.clock.advance(1)
    alarm.run()

    assert alarm.fired == []
    assert alarm.inner.subtask.idle_seconds_max() == 1.0


def test_a_function_that_registers_for_now_again_and_again_does_not_keep_records_out(stepping):
    class Again(ByTheClock):
        def on_processing_timers(self, fired):
            self.timers.register(fired, fired["time"], "processing")
            return ()

    alarm = stepping(Again)
    alarm.inputs[0].send(ids(0))
    for _ in range(3):
        alarm.step()
    alarm.inputs[0].send(ids(7_000_000))
    alarm.step()

    assert times_of(alarm.function.timers.registered(clock="processing")) == [0, 7_000_000]


def test_overdue_timers_of_processing_time_fire_at_once_after_a_restore(stepping):
    alarm = stepping(ByTheClock)
    alarm.inputs[0].send(ids(1_000_000, 50_000_000))
    alarm.barriers()
    alarm.run()
    snapshot = alarm.snapshot()
    again = stepping(ByTheClock, clock=ManualClock(wall_ms=20_000))
    restore(snapshot, again)
    again.run()

    assert again.fired == [1_000_000]


def test_timers_of_processing_time_do_not_fire_behind_a_barrier_that_holds(stepping):
    alarm = stepping(ByTheClock)
    alarm.inputs[0].send(ids(1_000_000))
    hold(alarm)
    alarm.clock.advance(10)
    alarm.run()
    assert alarm.fired == []
    assert alarm.inner.subtask.idle_seconds_max() == 1.0, "nor do they keep the loop busy"
    alarm.inner.subtask.on_abort(1)
    alarm.run()

    assert alarm.fired == [1_000_000]


def test_timers_of_processing_time_that_have_not_come_are_dropped_at_the_end(stepping):
    alarm = stepping(ByTheClock)
    alarm.inputs[0].send(ids(1_000_000))
    for channel in alarm.inputs:
        channel.send(EndOfRecords())
    alarm.barriers()
    alarm.run()

    assert alarm.sent()[:2] == [[-1], EndOfRecords()]
    assert alarm.snapshot().keyed == ()
    alarm.clock.advance(10)
    alarm.run()
    assert alarm.fired == []


# --- snapshots


def test_timers_that_have_not_changed_are_not_written_again(stepping):
    alarm = stepping()
    alarm.inputs[0].send(ids(5))
    alarm.barriers(1)
    alarm.run()
    first = alarm.snapshot(1)
    alarm.inner.subtask.on_complete(1, 1)
    alarm.barriers(2)
    alarm.run()
    assert alarm.snapshot(2).keyed == first.keyed
    alarm.inner.subtask.on_complete(2, 2)
    alarm.inputs[0].send(ids(6))
    alarm.barriers(3)
    alarm.run()

    assert alarm.snapshot(3).keyed[0].file != first.keyed[0].file


def test_rows_and_timers_of_a_function_are_kept_side_by_side(stepping):
    class Both(Alarm):
        def snapshot(self):
            return self.timers.registered().select(["id"])

        def restore(self, batch):
            self.restored = batch["id"].to_pylist()

    alarm = stepping(Both)
    alarm.inputs[0].send(ids(5))
    alarm.barriers()
    alarm.run()
    snapshot = alarm.snapshot()
    again = stepping(Both)
    restore(snapshot, again)

    assert {state.name for state in snapshot.keyed} == {"function", "timers"}
    assert again.function.restored == [5]
    assert times_of(again.function.timers.registered()) == [5]


def test_timers_are_dealt_out_anew_when_the_parallelism_changes(stepping):
    alarm = stepping()
    alarm.burst()
    alarm.barriers()
    alarm.step(), alarm.step()
    fired_before = alarm.fired
    snapshot = alarm.snapshot()
    fired = []
    for subtask in range(3):
        again = stepping(watermark_us=snapshot.watermark_us)
        restore(snapshot, again, subtask, 3)
        again.run()
        assert again.fired == sorted(again.fired)
        assert again.sent()[-1] == Watermark(BURST)
        fired += again.fired

    assert Counter(fired_before + fired) == Counter(range(BURST))


def test_a_subtask_that_knows_no_time_says_so_and_fires_nothing_after_a_restore(stepping):
    alarm = stepping()
    alarm.inputs[0].send(ids(5))
    alarm.barriers()
    alarm.run()
    snapshot = alarm.snapshot()
    again = stepping(watermark_us=snapshot.watermark_us)
    restore(snapshot, again)
    again.run()
    assert (again.sent(), again.function.timers.watermark_us) == ([], None)
    again.watermark(4)
    again.watermark(5)
    again.run()

    assert again.sent() == [Watermark(4), [5], Watermark(5)]


def test_a_function_that_had_come_further_than_its_inputs_are_said_to_have_tells_no_older_time(
    stepping,
):
    """After a restore the inputs begin at the slowest subtask's time, which is not this one's."""
    alarm = stepping(watermark_us=100, inputs_us=50)
    alarm.watermark(60)
    alarm.run()
    assert alarm.function.timers.watermark_us == 100
    alarm.watermark(120)
    alarm.run()

    told = [watermark.time_us for watermark in alarm.sent()]
    assert told == sorted(told)
    assert (told[0], told[-1]) == (100, 120)


class Nowhere:
    """Ends of channels that lead nowhere."""

    def output(self, peer, channel_id):
        return LocalChannel(1 << 20)

    input = output


@pytest.mark.parametrize(
    ("reached", "time_us"),
    [
        ((GroupsReached(0, 64, 100),), 100),
        ((GroupsReached(0, 40, 100), GroupsReached(40, 64, 80)), 80),
        ((GroupsReached(0, 40, 100),), 50),
        ((), 50),
    ],
)
def test_a_function_begins_at_the_time_of_its_own_key_groups(new_inner, reached, time_us):
    made = []

    def make():
        made.append(Alarm())
        return made[-1]

    read = Node(Read(ScriptedSource(SCHEMA, ((),))), SCHEMA, given_uid="read")
    alarm = Node(Process(make, "alarm", ("id",)), SCHEMA, (read,), given_uid="alarm")
    write = Node(Write(DiscardSink()), SCHEMA, (alarm,), given_uid="write")
    around = Surroundings(
        plan=build_plan("alarms", [write], 2),
        slot=0,
        attempt=2,
        state={("alarm", 0): SubtaskState(watermark_us=50, reached=reached)},
        store=None,
        network=Nowhere(),
        channel_buffer_bytes=1000,
        clock=ManualClock(),
        wake=lambda: None,
        feed=None,
        events=new_inner().events,
        mode="exactly-once",
    )
    assemble(around)

    assert made[0].timers.watermark_us == time_us


# --- two inputs


class Meeting(TwoInputFunction):
    """Registers a timer for what comes first, deletes it when the second comes."""

    def open(self, timers):
        self.timers = timers
        self.calls = []

    def process_first(self, batch):
        self.timers.register(batch, batch["id"].cast(pa.timestamp("us", "UTC")))
        return ()

    def process_second(self, batch):
        self.timers.delete(batch, batch["id"].cast(pa.timestamp("us", "UTC")))
        return ()

    def on_event_timers(self, fired):
        self.calls.append(times_of(fired))
        yield fired.select(["id"])


TWO_INPUTS = [ChannelPlace(("in", 0), 0), ChannelPlace(("in", 1), 1)]


def test_a_function_over_two_streams_has_timers_by_the_slower_of_them(stepping):
    meeting = stepping(Meeting, places=TWO_INPUTS)
    first, second = meeting.inputs
    first.send(ids(1, 2, 3))
    meeting.run()
    second.send(ids(2))
    first.send(Watermark(10))
    meeting.run()
    assert meeting.sent() == []
    second.send(Watermark(2))
    meeting.run()

    assert meeting.sent() == [[1], Watermark(2)]


def test_with_a_broadcast_stream_there_are_no_timers(stepping):
    meeting = stepping(Meeting, places=TWO_INPUTS, keys=None)
    meeting.watermark(5)
    meeting.run()
    assert (meeting.sent(), meeting.function.timers.watermark_us) == ([Watermark(5)], 5)
    meeting.inputs[0].send(ids(1))

    with pytest.raises(UserCodeError, match=r"alarm calls timers\.register, but .* broadcast"):
        meeting.run()


# --- what a function may do wrong


def times(*given):
    return at(list(given))


@pytest.mark.parametrize(
    ("keys", "given", "clock", "said"),
    [
        (ids(1), [1], "event", "as a pyarrow Array of timestamps, not of list"),
        (ids(1), pa.array([1]), "event", "as a pyarrow Array of timestamps, not of int64"),
        (ids(1), times(1, 2), "event", "is given 1 keys and 2 times"),
        (ids(1), times(1), "wall", "takes the clock 'event' or 'processing', not 'wall'"),
        ([1], times(1), "event", "with a list: give the keys as a pyarrow RecordBatch with id"),
        (
            pa.record_batch({"x": [1]}),
            times(1),
            "event",
            "with a batch of x, which has not the one column 'id'",
        ),
        (pa.record_batch({"id": ["one"]}), times(1), "event", "id string, not id int64"),
    ],
)
def test_what_is_wrong_with_a_timer_is_named(stepping, keys, given, clock, said):
    timers = stepping().function.timers
    for call in (timers.register, timers.delete):
        with pytest.raises(UserCodeError, match=said):
            call(keys, given, clock)


def test_times_may_be_of_any_unit_and_null_where_there_is_no_timer(stepping):
    timers = stepping().function.timers
    nanoseconds = pa.array([1001, 2000, None, -1], pa.timestamp("ns"))
    timers.register(ids(1, 2, 3, 4), nanoseconds)
    timers.register(ids(5), pa.array([7], pa.timestamp("s", "Europe/Berlin")))
    timers.register(pa.record_batch({"id": pa.array([6], pa.int32())}), times(9))

    listed = timers.registered().to_pylist()
    found = {
        row["id"]: time for row, time in zip(listed, times_of(timers.registered()), strict=True)
    }
    assert found == {1: 2, 2: 2, 4: 0, 5: 7_000_000, 6: 9}


@pytest.mark.parametrize(("clock", "method"), [("event", "event"), ("processing", "processing")])
def test_timers_that_nobody_answers_are_a_mistake_that_is_named(stepping, clock, method):
    class Silent(KeyedFunction):
        def open(self, timers):
            self.timers = timers

        def process(self, batch):
            self.timers.register(batch, times(0), clock)
            return ()

    alarm = stepping(Silent)
    alarm.inputs[0].send(ids(1))
    alarm.watermark(5)
    with pytest.raises(UserCodeError, match=f"Silent registers .* no on_{method}_timers"):
        alarm.run()


def test_a_key_named_as_the_times_are_is_refused_where_timers_are_used():
    schema = pa.schema([("time", pa.int64())])
    alarm = Alarm()
    operator = Process(lambda: alarm, "alarm", ("time",))
    Processing("uid", 0, 1, operator, schema, schema, None, 128, ManualClock())

    with pytest.raises(UserCodeError, match="one of its keys is named time"):
        alarm.timers.register(pa.record_batch({"time": [1]}), times(1))


def test_what_makes_another_function_is_refused(stepping):
    class Wrong(KeyedFunction):
        def __new__(cls):
            return object()

        def process(self, batch): ...

    with pytest.raises(UserCodeError, match="process wants what makes a KeyedFunction"):
        stepping(Wrong)


# --- any schedule


class SixTimes(Alarm):
    """Six timers for each id, a little apart: never two of one id in a batch."""

    def process(self, batch):
        numbers = batch["id"].to_pylist()
        for later_us in range(6):
            self.timers.register(batch, at([10 * number + later_us for number in numbers]))
        return ()


CHECKPOINTS = 3


def script_of(random, channel, alignment_timeout_ms):
    """What a sender sends, with its barriers; the numbers on a channel roughly ascend."""
    number, time_us, script = 0, 0, []
    for checkpoint_id in range(1, CHECKPOINTS + 2):
        for _ in range(random.randrange(6)):
            if random.random() < 0.5:
                count = random.choice([1, 3, 9])
                script.append(ids(*range(channel + 2 * number, channel + 2 * (number + count), 2)))
                number += count
            else:
                time_us = max(time_us, 20 * number + random.choice([-300, 0, 100]))
                script.append(Watermark(time_us))
        if checkpoint_id <= CHECKPOINTS:
            script.append(Barrier(checkpoint_id, 0, alignment_timeout_ms))
    return [*script, EndOfRecords()]


def feed(random, stepping, scripts):
    """Send and step in any order until all is said; what came out."""
    waiting = [list(script) for script in scripts]
    while any(waiting):
        channel = random.choice([c for c, script in enumerate(waiting) if script])
        for _ in range(random.choice([1, 1, 4])):
            if waiting[channel]:
                stepping.inputs[channel].send(waiting[channel].pop(0))
        for _ in range(random.choice([0, 1, 3, 30])):
            stepping.step()
    stepping.run()
    return stepping.sent()


def fired_in(sent):
    return Counter(number for each in sent if isinstance(each, list) for number in each)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_checkpoint_is_restored_every_timer_fires_once(stepping, seed):
    random = Random(seed)
    timeout_ms = random.choice([None, 0])
    scripts = [script_of(random, channel, timeout_ms) for channel in range(2)]
    truth = Counter(
        number
        for script in scripts
        for each in script
        if isinstance(each, pa.RecordBatch)
        for number in each["id"].to_pylist() * 6
    )
    alarm = stepping(SixTimes, buffer_bytes=1 << 30)
    sent = feed(random, alarm, scripts)
    assert fired_in(sent) == truth + Counter([-1])
    told = [each.time_us for each in sent if isinstance(each, Watermark)]
    assert told == sorted(set(told))

    checkpoint_id = random.randint(1, CHECKPOINTS)
    for number in range(1, CHECKPOINTS + 1):
        alarm.inner.events.write(alarm.inner.subtask, number)
        if number in alarm.inner.events.channel_writes:
            alarm.inner.events.write_channels(alarm.inner.subtask, number)
    [[snapshot]] = [
        said[2]
        for said in alarm.inner.events.take()
        if said[0] == "acknowledged" and said[1] == checkpoint_id
    ]
    [barrier] = [e for e in sent if isinstance(e, Barrier) and e.checkpoint_id == checkpoint_id]
    kept = alarm.inner.log.kept.get(checkpoint_id, {})
    replayed = [kept.get(("in", channel, 0), []) for channel in range(2)]
    channels = [
        ReplayingInput(LocalChannel(1 << 20), [ids(*each)] if each else []) for each in replayed
    ]
    about = {"watermark_us": snapshot.watermark_us, "buffer_bytes": 1 << 30}
    again = stepping(SixTimes, channels=channels, **about)
    restore(snapshot, again)
    again.inputs = [channel._channel for channel in channels]
    sent_again = feed(random, again, [rest_of(script, checkpoint_id) for script in scripts])

    assert fired_in(sent[: sent.index(barrier)]) + fired_in(sent_again) == truth + Counter([-1])


def rest_of(script, checkpoint_id):
    """What a sender sends after a restore: its time again, then what followed the barrier."""
    [place] = [
        place
        for place, each in enumerate(script)
        if isinstance(each, Barrier) and each.checkpoint_id == checkpoint_id
    ]
    told = [each for each in script[:place] if isinstance(each, Watermark)]
    return told[-1:] + script[place + 1 :]
