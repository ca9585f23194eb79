"""A source's subtask, stepped by hand."""

import pyarrow as pa
import pytest

from stillframe.errors import DataError, StorageError
from stillframe.protocol.messages import AssignSplits
from stillframe.runtime.elements import EndOfRecords, Idle, LatencyMarker
from stillframe.runtime.task import take_turn
from stillframe.testing.sources import Gate, Wait

SCHEMA = pa.schema([("id", pa.int64())])


def batch(*ids):
    return pa.record_batch([list(ids)], schema=SCHEMA)


def test_a_sources_barrier_goes_out_between_what_it_read_before_and_after(new_source):
    source = new_source(batch(1), batch(2))
    source.subtask.step()
    source.subtask.on_trigger(source.barrier(1))
    source.subtask.step()

    assert source.sent() == [[1], source.barrier(1), [2]]


def test_a_sources_snapshot_holds_the_position_at_its_barrier_however_late_it_is_written(
    new_source,
):
    source = new_source(batch(1), batch(2))
    source.subtask.step()
    source.subtask.on_trigger(source.barrier(1))
    source.subtask.step()
    source.events.write(source.subtask, 1)

    checkpoint_id, [snapshot], _ = source.events.acknowledgement()
    assert checkpoint_id == 1
    assert snapshot.items == ({"id": "script-0", "position": {"next": 1}},)


def test_text_that_is_not_utf8_does_not_get_past_its_source(new_source):
    text = pa.array([b"a", b"caf\xe9"], pa.binary()).view(pa.string())
    source = new_source(pa.record_batch({"id": [1, 2], "name": text}))

    with pytest.raises(DataError, match=r"^script-0 \(source .*\) has text in column name that is"):
        source.subtask.step()
    assert source.sent() == []


def test_a_source_is_not_read_while_its_output_has_no_room(new_source):
    source = new_source(batch(1), batch(2), buffer_bytes=1)

    assert source.subtask.step()
    assert not source.subtask.step()
    assert source.subtask.counters.records_read == 1
    source.out.take()
    assert source.subtask.step()


def test_a_source_says_since_when_it_has_given_nothing(new_source):
    def silent_ms():
        return source.subtask.measures(0).silent_ms

    source = new_source(batch(1), Wait(Gate("/no/gate")))
    source.clock.advance(2.0)
    assert silent_ms() == 2_000, "from its beginning on"
    source.subtask.step()
    assert silent_ms() == 0
    source.clock.advance(1.5)
    source.subtask.step()
    assert silent_ms() == 1_500


def test_a_marker_says_since_when_it_has_waited_for_room_and_goes_behind_what_was_read(new_source):
    source = new_source(batch(1), batch(2), buffer_bytes=1)
    source.subtask.step()
    wanted_at_ms = source.clock.wall_ms()
    for _ in range(3):
        source.subtask.on_latency_wanted(source.clock.wall_ms())
        assert not source.subtask.step()
        source.clock.advance(1.0)

    assert source.sent() == [[1]]
    source.run()
    assert source.sent() == [LatencyMarker(0, wanted_at_ms), [2]], "one waits, since it was wanted"


def test_a_source_that_is_not_asked_for_markers_sends_none(new_source):
    source = new_source(batch(1))
    source.run()

    assert source.sent() == [[1], EndOfRecords()]


def test_a_source_reads_no_faster_than_its_slot_works_off(new_source, new_inner):
    source = new_source(*(batch(i) for i in range(40)))
    inner = new_inner(channels=[source.out])
    waiting = []

    while take_turn([inner.subtask, source.subtask]):
        read, taken = source.subtask.counters.records_read, inner.subtask.counters.records_in
        waiting.append(read - taken)

    assert max(waiting) == 1, "a barrier would wait behind all of them"
    assert inner.summing.sum == sum(range(40))


def test_forty_sources_read_no_faster_than_their_slot_works_off(new_source, new_inner):
    sources = [new_source(*(batch(i) for i in range(10))) for _ in range(40)]
    inner = new_inner(channels=[source.out for source in sources], together_rows_max=0)
    waiting = []

    while take_turn([inner.subtask, *(source.subtask for source in sources)]):
        read = sum(source.subtask.counters.records_read for source in sources)
        waiting.append(read - inner.subtask.counters.records_in)

    assert max(waiting) == 40, "of each source one batch, which was read in this turn"
    assert inner.summing.sum == 40 * sum(range(10))


def test_a_barrier_goes_out_even_when_there_is_no_room_for_records(new_source):
    source = new_source(batch(1), batch(2), buffer_bytes=1)
    source.subtask.step()

    source.subtask.on_trigger(source.barrier(1))

    assert source.sent() == [[1], source.barrier(1)]


def test_a_source_that_has_nothing_yet_says_when_to_ask_again(new_source, tmp_path):
    gate = Gate(str(tmp_path / "gate"))
    source = new_source(Wait(gate), batch(1))

    assert not source.subtask.step()
    assert 0 < source.subtask.idle_seconds_max() < 1
    gate.open()
    assert source.subtask.step()


def test_a_source_at_its_end_says_so_once_and_still_answers_checkpoints(new_source):
    source = new_source(batch(1))
    source.run()
    assert not source.subtask.step()
    assert source.events.take() == [("drained",)]

    source.subtask.on_trigger(source.barrier(1))
    source.events.write(source.subtask, 1)

    assert [each[0] for each in source.events.take()] == ["started", "acknowledged"]
    assert source.sent() == [[1], EndOfRecords(), source.barrier(1)]


def test_a_trigger_that_comes_twice_or_late_changes_nothing(new_source):
    source = new_source(batch(1), batch(2))
    source.subtask.step()
    for checkpoint_id in (1, 1, 2, 1):
        source.subtask.on_trigger(source.barrier(checkpoint_id))
        source.subtask.step()

    assert source.sent()[:4] == [
        [1],
        source.barrier(1),
        [2],
        EndOfRecords(),
    ]
    assert [said for said in source.events.take() if said[0] == "started"] == [
        ("started", 1),
        ("started", 2),
    ]


def test_how_long_the_trigger_took_to_arrive_is_measured(new_source):
    source = new_source(batch(1))
    triggered = source.barrier(1)
    source.clock.advance(0.25)
    source.subtask.on_trigger(triggered)
    source.clock.advance(0.5)
    source.events.write(source.subtask, 1)

    timings = source.events.take()[-1][3]
    assert (timings.start_delay_ms, timings.alignment_ms) == (250, 0)
    assert (timings.sync_ms, timings.async_ms) == (0, 500)


# --- at most once ----------------------------------------------------------------------------


def complete(source, checkpoint_id):
    source.subtask.on_complete(checkpoint_id, checkpoint_id)


def records_sent(source):
    return [each for each in source.sent() if isinstance(each, list)]


def test_at_most_once_emits_nothing_before_a_checkpoint_that_reserves_it_is_complete(new_source):
    source = new_source(batch(1), batch(2), mode="at-most-once")
    source.subtask.step()
    source.trigger(1)
    source.subtask.step()
    assert records_sent(source) == []

    complete(source, 1)
    source.run()

    assert records_sent(source) == [[1]], "what was read after the trigger could be read again"
    assert source.subtask.counters.records_read == 2


def test_at_most_once_reserves_with_the_position_behind_what_it_has_read(new_source):
    source = new_source(batch(1), batch(2), batch(3), mode="at-most-once")
    source.subtask.step()
    source.subtask.step()
    source.trigger(1)
    source.events.write(source.subtask, 1)

    _, [snapshot], _ = source.events.acknowledgement()
    assert snapshot.items[0]["position"] == {"next": 2}


def test_what_an_aborted_checkpoint_reserved_waits_for_the_next_one(new_source):
    source = new_source(batch(1), batch(2), mode="at-most-once")
    source.subtask.step()
    source.trigger(1)
    source.subtask.step()
    source.subtask.on_abort(1)
    source.run()
    assert records_sent(source) == []

    source.trigger(2)
    complete(source, 2)
    source.run()

    assert records_sent(source) == [[1], [2]]


def test_an_older_checkpoint_frees_only_what_it_has_reserved(new_source):
    source = new_source(batch(1), batch(2), batch(3), mode="at-most-once")
    for checkpoint_id in (1, 2):
        source.subtask.step()
        source.trigger(checkpoint_id)
    complete(source, 1)
    source.run()
    assert records_sent(source) == [[1]]

    complete(source, 2)
    source.run()
    assert records_sent(source) == [[2]]


def test_a_later_checkpoint_frees_what_an_earlier_one_has_reserved(new_source):
    source = new_source(batch(1), batch(2), mode="at-most-once")
    for checkpoint_id in (1, 2):
        source.subtask.step()
        source.trigger(checkpoint_id)

    complete(source, 2)
    source.run()

    assert records_sent(source) == [[1], [2]]


def test_at_most_once_ends_only_when_all_is_emitted(new_source):
    source = new_source(batch(1), mode="at-most-once")
    source.run()
    assert source.events.take() == []

    source.trigger(1)
    source.run()
    assert ("drained",) not in source.events.take()
    complete(source, 1)
    source.run()

    assert ("drained",) in source.events.take()
    assert source.sent() == [source.barrier(1), [1], EndOfRecords()]


def test_at_most_once_reads_no_more_ahead_than_its_bound(new_source, monkeypatch):
    monkeypatch.setattr("stillframe.runtime.source_task._RESERVED_BYTES_MAX", 3 * batch(1).nbytes)
    source = new_source(*(batch(number) for number in range(9)), mode="at-most-once")
    source.run()
    assert source.subtask.counters.records_read == 3

    source.trigger(1)
    complete(source, 1)
    source.run()

    assert records_sent(source) == [[0], [1], [2]]
    assert source.subtask.counters.records_read == 6, "what was emitted makes room"


def test_at_most_once_waits_for_room_like_any_source(new_source):
    source = new_source(batch(1), batch(2), mode="at-most-once", buffer_bytes=1)
    source.run()
    source.trigger(1)
    complete(source, 1)
    source.run()

    assert records_sent(source) == [[1]]
    source.run()
    assert records_sent(source) == [[2]]


# --- held ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exactly-once", "at-most-once", "stop-the-world"])
def test_a_source_sends_nothing_behind_a_barrier_that_holds_but_further_barriers(new_source, mode):
    source = new_source(batch(1), mode=mode)
    source.trigger(1, holds=True)
    source.run()
    source.trigger(2)
    complete(source, 2)
    source.run()

    assert source.sent() == [source.barrier(1, holds=True), source.barrier(2)]


def test_a_source_that_was_held_goes_on_when_that_is_given_up_and_not_before(new_source):
    source = new_source(batch(1))
    source.trigger(1, holds=True)
    source.trigger(2)
    source.subtask.on_abort(2)
    source.run()
    assert records_sent(source) == []
    source.subtask.on_abort(1)
    source.run()

    assert records_sent(source) == [[1]]


# --- stop the world --------------------------------------------------------------------------


def test_stop_the_world_reads_nothing_from_the_trigger_to_the_completion(new_source):
    source = new_source(batch(1), batch(2), mode="stop-the-world")
    source.subtask.step()
    source.trigger(1)
    assert not source.subtask.step()

    assert source.sent() == [[1], source.barrier(1)]
    complete(source, 1)
    source.run()
    assert records_sent(source) == [[2]]


def test_stop_the_world_goes_on_after_an_abort(new_source):
    source = new_source(batch(1), mode="stop-the-world")
    source.trigger(1)
    source.subtask.on_abort(1)

    assert source.subtask.step()


def test_news_of_an_older_checkpoint_does_not_end_the_pause(new_source):
    source = new_source(batch(1), mode="stop-the-world")
    source.trigger(1)
    source.subtask.on_abort(1)
    source.trigger(2)

    source.subtask.on_abort(1)
    complete(source, 1)

    assert not source.subtask.step()


def test_a_trigger_that_comes_again_after_the_completion_pauses_nothing(new_source):
    source = new_source(batch(1), mode="stop-the-world")
    source.trigger(1)
    complete(source, 1)
    source.trigger(1)

    assert source.subtask.step()


def test_stop_the_world_writes_its_snapshot_before_it_does_anything_else(new_source):
    source = new_source(batch(1), mode="stop-the-world")
    source.trigger(1)

    checkpoint_id, [snapshot], channels = source.events.acknowledgement()
    assert (checkpoint_id, channels) == (1, ())
    assert snapshot.items[0]["position"] == {"next": 0}


# --- barriers that overtake ------------------------------------------------------------------


def test_a_barrier_that_overtakes_leaves_a_source_ahead_of_what_has_not_left(new_source, new_wire):
    source = new_source(batch(1), batch(2), out=new_wire())
    source.subtask.step()
    source.subtask.step()
    source.out.leave(1)
    source.trigger(1, alignment_timeout_ms=0)
    source.events.write(source.subtask, 1)
    source.events.write_channels(source.subtask, 1)

    assert source.out.leave() == [source.barrier(1, 0), [2]]
    assert source.log.kept == {1: {("out", 0, 0): [2]}}
    [channel] = source.events.acknowledgement()[2]
    assert channel.side == "output"


def test_a_barrier_with_patience_overtakes_only_when_it_is_over(new_source, new_wire):
    source = new_source(batch(1), out=new_wire())
    source.subtask.step()
    hastened = source.barrier(1, alignment_timeout_ms=0)
    source.trigger(1, alignment_timeout_ms=200)
    source.events.write(source.subtask, 1)
    source.clock.advance(0.15)
    source.run()
    assert source.subtask.idle_seconds_max() == pytest.approx(0.05)
    assert source.events.take() == [("started", 1), ("drained",)]

    source.clock.advance(0.05)
    source.run()
    source.events.write_channels(source.subtask, 1)

    assert source.out.leave() == [hastened, [1], EndOfRecords()]
    assert source.log.kept == {1: {("out", 0, 0): [1]}}
    assert source.events.acknowledgement()[0] == 1
    assert source.subtask.idle_seconds_max() == 1.0, "there is nothing left to hasten"


def test_a_barrier_that_left_in_time_overtakes_nothing(new_source, new_wire):
    source = new_source(batch(1), out=new_wire())
    source.subtask.step()
    source.trigger(1, alignment_timeout_ms=200)
    source.events.write(source.subtask, 1)
    source.out.leave()
    source.run()

    assert source.events.acknowledgement()[2] == ()
    assert source.log.kept == {}


def test_what_was_under_way_and_cannot_be_written_declines_the_checkpoint(new_source, new_wire):
    source = new_source(batch(1), out=new_wire())
    source.subtask.step()
    source.trigger(1, alignment_timeout_ms=0)
    source.log.broken = StorageError("no space left")
    source.events.write_channels(source.subtask, 1)
    source.events.write(source.subtask, 1)

    assert source.events.take()[-1] == ("declined", 1, "no space left")


# --- a job that stops when it has read what was there ---


def told_to_stop(source):
    source.subtask.on_splits(AssignSplits("clicks", 0, (), is_last=True, stops=True))
    return source


def test_a_source_that_has_read_what_was_there_says_so_once_and_does_not_finish(new_source):
    source = told_to_stop(new_source(batch(1)))
    for _ in range(4):
        source.subtask.step()
    source.subtask.on_trigger(source.barrier(1))

    assert source.sent() == [[1], Idle(), source.barrier(1)]
    assert [said for said in source.events.take() if said[0] != "started"] == [("caught up",)]


def test_a_source_that_has_read_what_was_there_finishes_if_the_job_ends_for_good(new_source):
    source = told_to_stop(new_source(batch(1)))
    for _ in range(3):
        source.subtask.step()
    source.subtask.on_end_wanted()
    source.subtask.step()

    assert source.sent() == [[1], Idle(), EndOfRecords()]
    assert source.events.take() == [("caught up",), ("drained",)]


def test_a_source_that_may_not_emit_yet_has_not_caught_up(new_source):
    source = told_to_stop(new_source(batch(1), mode="at-most-once"))
    for _ in range(4):
        source.subtask.step()
    assert source.events.take() == []
    source.subtask.on_trigger(source.barrier(1))
    source.subtask.on_complete(1, 1)
    for _ in range(3):
        source.subtask.step()

    assert source.sent() == [source.barrier(1), [1], Idle()]
    assert ("caught up",) in source.events.take()


def test_a_source_without_splits_soon_does_not_hold_event_time_back(new_source):
    source = new_source(batch(1), awaits_splits=True)
    source.subtask.step()
    source.subtask.step()
    assert source.sent() == [[1]]
    source.clock.advance(4.9)
    source.subtask.step()
    assert source.sent() == []
    source.clock.advance(0.2)
    source.subtask.step()
    source.clock.advance(60.0)
    source.subtask.step()

    assert source.sent() == [Idle()]


def test_a_source_that_has_a_split_open_is_not_idle_however_long_it_waits(new_source, tmp_path):
    source = new_source(Wait(Gate(str(tmp_path / "gate"))), batch(1), awaits_splits=True)
    for _ in range(5):
        source.subtask.step()
        source.clock.advance(60.0)

    assert source.sent() == []


# --- told to end ---


def test_a_source_that_was_told_to_end_reads_nothing_more_after_a_restore(new_source):
    """Event time has come to its end behind it: what it read now would all be late."""
    source = new_source(batch(1), batch(2))
    source.subtask.step()
    source.subtask.on_end_wanted()
    source.run()
    source.trigger(1)
    source.events.write(source.subtask, 1)
    [snapshot] = source.events.acknowledgement()[1]
    assert snapshot.ended

    again = new_source(batch(1), batch(2), was_ended=snapshot.ended)
    again.run()
    assert again.sent() == [EndOfRecords()]
