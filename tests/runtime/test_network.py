"""Slots that exchange elements over real sockets: what arrives, what waits, and what ends it."""

import socket
import subprocess
import sys
import threading
import time
from random import Random

import pyarrow as pa
import pytest

from stillframe.errors import DataError, StillframeError
from stillframe.runtime import frames
from stillframe.runtime.elements import Barrier, CancelBarrier, EndOfRecords, Lap, LatencyMarker
from stillframe.runtime.network import Network
from stillframe.wire import connect

SECRET = b"the secret of this job"
LIMIT_SECONDS = 10.0
ROOMY_BYTES = 4 * 1024 * 1024


class Slot:
    """A network and a loop thread's view of it: waits end when the network wakes it."""

    def __init__(self, index, *, attempt=1, secret=SECRET, buffer_bytes_max=ROOMY_BYTES):
        self.index = index
        self._woken = threading.Event()
        self.network = Network(
            job="page-views", host="127.0.0.1", secret=secret, attempt=attempt, slot=index,
            buffer_bytes_max=buffer_bytes_max, wake=self._woken.set,
        )  # fmt: skip

    def wait_until(self, predicate):
        deadline = time.monotonic() + LIMIT_SECONDS
        while not predicate():
            assert self._woken.wait(deadline - time.monotonic()), "nothing happened in time"
            self._woken.clear()

    def forget_wakes(self):
        self._woken.clear()

    def wait_for_a_wake(self):
        assert self._woken.wait(LIMIT_SECONDS), "nobody woke the loop"

    def take(self, channel):
        self.wait_until(lambda: not channel.is_empty() or self.network.failure())
        return channel.take()

    def awaited_failure(self):
        self.wait_until(lambda: self.network.failure() is not None)
        return self.network.failure()


@pytest.fixture
def slots():
    opened = []

    def open_slots(count, **options):
        opened.extend(Slot(index, **options) for index in range(count))
        return opened[-count:]

    yield open_slots
    for slot in opened:
        slot.network.abort()


def meet(*slots):
    """Every slot connects to every other, each on its own thread as in life."""
    addresses = {slot.index: slot.network.address for slot in slots}
    errors = []

    def connect_one(slot):
        try:
            slot.network.connect(addresses, LIMIT_SECONDS)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=connect_one, args=(slot,)) for slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_SECONDS)
    assert errors == []


def channel(sender, receiver, channel_id):
    return (
        sender.network.output(receiver.index, channel_id),
        receiver.network.input(sender.index, channel_id),
    )


def batch_of(*numbers):
    return pa.record_batch({"n": pa.array(numbers, pa.int64())})


def batch_of_bytes(size_bytes, number=0):
    return pa.record_batch({"n": pa.array([number] * (size_bytes // 8), pa.int64())})


def close_in_order(*slots):
    threads = [threading.Thread(target=slot.network.close, args=(LIMIT_SECONDS,)) for slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_SECONDS)


# --- what arrives


def test_elements_of_a_channel_arrive_equal_and_in_order(slots):
    zero, one = slots(2)
    output, arriving = channel(zero, one, 7)
    meet(zero, one)
    sent = [batch_of(1, 2), Barrier(1, 1234), batch_of(3), batch_of(), EndOfRecords(),
            Barrier(2, 5678, 0), Barrier(3, 9, 30_000), Barrier(4, 1, None, "/there", True),
            Barrier(5, 1, holds=True), Lap(4, 1, True), Lap(4, 2, False),
            LatencyMarker(3, 1_763_370_000_000), EndOfRecords()]  # fmt: skip

    for element in sent:
        output.send(element)

    assert [one.take(arriving) for _ in sent] == sent
    zero.wait_until(output.is_flushed)


def test_elements_sent_before_the_connection_is_up_arrive_too(slots):
    zero, one = slots(2)
    output, arriving = channel(zero, one, 7)
    output.send(Barrier(1, 0))
    output.send(batch_of(1))
    assert not output.is_flushed()

    meet(zero, one)
    assert one.take(arriving) == Barrier(1, 0)
    assert one.take(arriving) == batch_of(1)


def test_three_slots_exchange_in_all_directions_at_once(slots):
    three = slots(3)
    channels = {
        (sender.index, receiver.index): channel(
            sender, receiver, 10 * sender.index + receiver.index
        )
        for sender in three
        for receiver in three
        if sender is not receiver
    }
    meet(*three)

    for n in range(50):
        for (sender, receiver), (output, _) in channels.items():
            output.send(batch_of(sender, receiver, n))
    for (sender, receiver), (_, arriving) in channels.items():
        for n in range(50):
            assert three[receiver].take(arriving) == batch_of(sender, receiver, n)


def test_batches_of_every_size_keep_their_bytes(slots):
    zero, one = slots(2, buffer_bytes_max=64 * 1024)
    output, arriving = channel(zero, one, 7)
    meet(zero, one)

    for rows in (0, 1, 3, 127, 1024, 70_000, 1_500_000, 5):
        sent = pa.record_batch({"n": pa.array(range(rows), pa.int64())})
        zero.wait_until(output.has_room)
        output.send(sent)
        assert one.take(arriving) == sent


def test_a_record_larger_than_the_buffer_passes_alone(slots):
    zero, one = slots(2, buffer_bytes_max=64 * 1024)
    output, arriving = channel(zero, one, 7)
    back, returning = channel(one, zero, 8)
    meet(zero, one)
    sent = pa.record_batch({"text": ["x" * 10_000_000]})

    for _ in range(3):
        for slot, way in ((zero, output), (one, back)):
            slot.wait_until(way.has_room)
            way.send(sent)
        assert one.take(arriving) == sent
        assert zero.take(returning) == sent


def test_columns_of_all_kinds_survive_the_way(slots):
    zero, one = slots(2)
    output, arriving = channel(zero, one, 7)
    meet(zero, one)
    sent = pa.record_batch(
        {
            "text": pa.array(["a", None, "帧"]),
            "flag": pa.array([True, None, False]),
            "list": pa.array([["x"], [], None]),
            "struct": pa.array([{"a": 1}, {"a": None}, None]),
            "at": pa.array([1, 2, None], pa.timestamp("us", "UTC")),
            "word": pa.array(["x", "y", None]).dictionary_encode(),
        }
    )

    output.send(sent)
    output.send(sent.slice(1, 1))
    assert one.take(arriving) == sent
    assert one.take(arriving) == sent.slice(1, 1)


def test_a_dictionary_may_change_from_batch_to_batch(slots):
    zero, one = slots(2)
    output, arriving = channel(zero, one, 7)
    meet(zero, one)
    sent = [
        pa.record_batch({"word": pa.array(words).dictionary_encode()})
        for words in (["a", "b"], ["c"], ["b", "d", "a"])
    ]

    for batch in sent:
        output.send(batch)
    assert [one.take(arriving) for _ in sent] == sent


# --- what is shipped


def encoded(batch):
    (frame,) = frames.Encoder(1).encode(batch)
    return frame


def shipped_bytes(batch):
    return sum(len(part) for part in encoded(batch).parts)


def decoded(frame):
    payload = b"".join(frame.parts)[frames.HEADER.size :]
    return frames.Decoder().decode(frames.FrameType.BATCH, pa.py_buffer(payload))


def test_a_sliced_batch_ships_only_the_slice():
    whole = pa.record_batch({"t": ["some text"] * 100_000, "n": list(range(100_000))})

    for part, bytes_max in ((whole.slice(50_000, 10), 2_000), (whole.slice(1, 50_000), 1_100_000)):
        assert shipped_bytes(part) < bytes_max
        assert decoded(encoded(part)) == part


def test_a_large_batch_is_not_copied_to_be_sent():
    column = pa.array(range(100_000), pa.int64())
    batch = pa.record_batch({"n": column})

    addresses = {pa.py_buffer(part).address for part in encoded(batch).parts}
    assert column.buffers()[1].address in addresses


def test_every_batch_can_be_read_without_the_ones_before():
    encoder = frames.Encoder(1)
    words = pa.record_batch({"word": pa.array(["a", "b"]).dictionary_encode()})
    nested = pa.record_batch({"l": pa.array([[1], []]), "w": pa.StructArray.from_arrays(
        [words["word"]], ["word"])})  # fmt: skip
    noted = batch_of(3).replace_schema_metadata({"by": "test"})

    for batch in (batch_of(1), batch_of(2), words, words, nested, batch_of(), noted, batch_of(3)):
        (frame,) = encoder.encode(batch)
        assert decoded(frame).equals(batch, check_metadata=True)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_dictionary_much_larger_than_the_slice_is_compacted(ordered):
    words = pa.array([f"word {n}" for n in range(10_000)])
    indices = pa.array([9_999, 5, None, 5, 7_000], pa.int16())
    column = pa.DictionaryArray.from_arrays(indices, words, ordered=ordered)
    batch = pa.record_batch({"n": [1, 2, 3, 4, 5], "word": column})

    arrived = decoded(encoded(batch))

    assert shipped_bytes(batch) < 2_000
    assert arrived.schema == batch.schema
    assert arrived.to_pylist() == batch.to_pylist()
    assert arrived["word"].dictionary.to_pylist() == ["word 5", "word 7000", "word 9999"]


def test_a_batch_too_large_for_a_frame_goes_in_several(monkeypatch):
    monkeypatch.setattr(frames, "PAYLOAD_BYTES_MAX", 4_000)
    batch = pa.record_batch({"n": list(range(2_000))})

    in_frames = frames.Encoder(1).encode(batch)

    assert all(frame.payload_bytes <= 4_000 for frame in in_frames)
    arrived = pa.Table.from_batches([decoded(frame) for frame in in_frames])
    assert arrived.to_pylist() == batch.to_pylist()
    with pytest.raises(DataError, match="one row takes"):  # it would come again
        frames.Encoder(1).encode(pa.record_batch({"t": ["x" * 5_000]}))


# --- what waits

WINDOW_BYTES = 64 * 1024
BATCH_BYTES = 8 * 1024
FRAME_BYTES_MAX = BATCH_BYTES + 1024


class Echo:
    """A second channel in each direction: a barrier there and back proves that bytes still flow."""

    def __init__(self, zero, one):
        self._zero, self._one = zero, one
        self._out, self._in = channel(zero, one, 100)
        self._back_out, self._back_in = channel(one, zero, 101)
        self._count = 0

    def round_trip(self):
        self._count += 1
        self._out.send(batch_of(self._count))
        self._back_out.send(self._one.take(self._in))
        assert self._zero.take(self._back_in) == batch_of(self._count)


def fill(output, echo):
    """Send until there is no room even after what can move has moved; how many were sent."""
    count = 0
    while True:
        while output.has_room():
            output.send(batch_of_bytes(BATCH_BYTES, count))
            count += 1
            assert count < 1_000, "the channel takes without end"
        for _ in range(5):
            echo.round_trip()
        if not output.has_room():
            return count


def test_a_channel_nobody_takes_from_fills_up_and_holds_back_no_other(slots):
    zero, one = slots(2, buffer_bytes_max=WINDOW_BYTES)
    output, arriving = channel(zero, one, 7)
    echo = Echo(zero, one)
    meet(zero, one)

    count = fill(output, echo)

    assert count * FRAME_BYTES_MAX >= 2 * WINDOW_BYTES
    assert count * BATCH_BYTES <= 2 * (WINDOW_BYTES + FRAME_BYTES_MAX)
    for _ in range(100):
        echo.round_trip()
    for n in range(count):
        assert one.take(arriving) == batch_of_bytes(BATCH_BYTES, n)
    zero.wait_until(output.is_flushed)
    assert output.has_room()


def test_taking_gives_the_sender_room_and_wakes_it(slots):
    zero, one = slots(2, buffer_bytes_max=WINDOW_BYTES)
    output, arriving = channel(zero, one, 7)
    echo = Echo(zero, one)
    meet(zero, one)
    count = fill(output, echo)

    for _ in range(count // 2):
        one.take(arriving)
    zero.wait_until(output.has_room)


def test_a_batch_larger_than_the_window_passes(slots):
    zero, one = slots(2, buffer_bytes_max=1)
    output, arriving = channel(zero, one, 7)
    meet(zero, one)

    for n in range(20):
        zero.wait_until(output.has_room)
        output.send(batch_of_bytes(BATCH_BYTES, n))
        if n:
            assert one.take(arriving) == batch_of_bytes(BATCH_BYTES, n - 1)


def test_a_barrier_needs_no_credit_but_waits_behind_its_batches(slots):
    zero, one = slots(2, buffer_bytes_max=WINDOW_BYTES)
    output, arriving = channel(zero, one, 7)
    markers, markers_arriving = channel(zero, one, 8)
    echo = Echo(zero, one)
    meet(zero, one)
    count = fill(output, echo)

    output.send(Barrier(1, 0))
    for n in range(1_000):
        markers.send(Barrier(n, 0))

    assert [one.take(markers_arriving) for _ in range(1_000)] == [
        Barrier(n, 0) for n in range(1_000)
    ]
    for n in range(count):
        assert one.take(arriving) == batch_of_bytes(BATCH_BYTES, n)
    assert one.take(arriving) == Barrier(1, 0)


def test_priority_frames_overtake_at_both_ends_and_keep_their_order(slots):
    zero, one = slots(2, buffer_bytes_max=WINDOW_BYTES)
    output, arriving = channel(zero, one, 7)
    echo = Echo(zero, one)
    meet(zero, one)
    count = fill(output, echo)

    output.send(Barrier(3, 0))
    output.send(CancelBarrier(2))
    output.send(CancelBarrier(3))
    echo.round_trip()

    assert [one.take(arriving) for _ in range(2)] == [CancelBarrier(2), CancelBarrier(3)]
    for n in range(count):
        assert one.take(arriving) == batch_of_bytes(BATCH_BYTES, n)
    assert one.take(arriving) == Barrier(3, 0)


def test_channels_of_one_connection_take_turns(slots):
    one = slots(2)[1]
    busy, quiet = one.network.output(0, 1), one.network.output(0, 2)
    for n in range(300):
        busy.send(batch_of_bytes(BATCH_BYTES, n))
    quiet.send(batch_of(1))
    credit = ROOMY_BYTES.to_bytes(8, "little")
    with connect(one.network.address, SECRET, hello_of(0), LIMIT_SECONDS) as peer:
        peer.sendall(b"".join(frame(frames.FrameType.CREDIT, each, credit) for each in (1, 2)))
        one.network.connect({0: one.network.address}, LIMIT_SECONDS)
        order = [read_channel_id(peer) for _ in range(4)]

    assert order == [1, 2, 1, 1]


def read_channel_id(peer):
    """Of the next frame, whose payload is passed over."""
    head = peer.recv(frames.HEADER.size, socket.MSG_WAITALL)
    header = frames.decode_header(head)
    peer.recv(header.payload_bytes, socket.MSG_WAITALL)
    return header.channel_id


def test_the_loop_is_woken_for_edges_and_not_for_every_frame(slots):
    wakes = []
    zero, one = slots(2)
    output, arriving = channel(zero, one, 7)
    end, end_arriving = channel(zero, one, 8)
    meet(zero, one)
    woken = one.network._wake
    one.network._wake = lambda: (wakes.append(1), woken())

    for n in range(500):
        output.send(batch_of(n))
    end.send(EndOfRecords())
    one.wait_until(lambda: not end_arriving.is_empty())

    assert len(wakes) <= 2
    assert [one.take(arriving) for _ in range(500)] == [batch_of(n) for n in range(500)]


# --- what overtakes


def numbers(batches):
    return [n for batch in batches for n in batch["n"].to_pylist()]


def await_barrier(slot, arriving):
    """The first that waits, with nothing taken: the loop must be woken for it."""
    slot.wait_until(arriving.waiting_barriers)
    return arriving.waiting_barriers()[0]


def test_a_barrier_overtakes_batches_that_have_no_credit_on_a_channel_nobody_takes_from(slots):
    zero, one = slots(2, buffer_bytes_max=WINDOW_BYTES)
    output, arriving = channel(zero, one, 7)
    echo = Echo(zero, one)
    meet(zero, one)
    count = fill(output, echo)

    overtaken = output.overtake(Barrier(1, 5, 0))
    assert await_barrier(one, arriving) == Barrier(1, 5, 0)
    pulled = arriving.pull(1)

    assert len(overtaken) * FRAME_BYTES_MAX >= WINDOW_BYTES
    assert len(pulled) * FRAME_BYTES_MAX >= WINDOW_BYTES
    expected = [batch_of_bytes(BATCH_BYTES, n) for n in range(count)]
    assert pulled + overtaken == expected
    assert arriving.waiting_barriers() == ()
    assert [one.take(arriving) for _ in range(count)] == expected
    assert arriving.is_empty()


def test_a_barrier_that_may_overtake_waits_its_turn_at_the_receiver_until_it_is_pulled(slots):
    zero, one = slots(2, buffer_bytes_max=WINDOW_BYTES)
    output, arriving = channel(zero, one, 7)
    echo = Echo(zero, one)
    meet(zero, one)
    count = fill(output, echo)

    overtaken = output.overtake(Barrier(1, 0, 0))
    taken = [one.take(arriving) for _ in range(count + 1)]

    place = taken.index(Barrier(1, 0, 0))
    assert place == count - len(overtaken)
    assert taken[place + 1 :] == overtaken
    assert arriving.waiting_barriers() == ()


def test_other_markers_keep_their_place_when_a_barrier_overtakes_them(slots):
    zero, one = slots(2, buffer_bytes_max=WINDOW_BYTES)
    output, arriving = channel(zero, one, 7)
    echo = Echo(zero, one)
    meet(zero, one)
    count = fill(output, echo)
    markers = [Barrier(1, 0, 60_000), EndOfRecords(), Lap(4, 1, True), EndOfRecords()]
    for marker in markers:
        output.send(marker)

    output.overtake(Barrier(2, 0, 0))
    assert await_barrier(one, arriving) == Barrier(2, 0, 0)
    arriving.pull(2)

    taken = [one.take(arriving) for _ in range(count + len(markers))]
    assert taken[count:] == markers


def test_a_hastened_barrier_passes_what_was_sent_before_it_and_answers_for_nothing_else(slots):
    zero, one = slots(2, buffer_bytes_max=WINDOW_BYTES)
    output, arriving = channel(zero, one, 7)
    echo = Echo(zero, one)
    meet(zero, one)
    count = fill(output, echo)
    output.send(Barrier(1, 5, 60_000))
    output.send(batch_of(1_000_000))
    output.send(Barrier(2, 6))
    assert output.holds(1)

    overtaken = output.hasten(1)
    assert await_barrier(one, arriving) == Barrier(1, 5, 0)

    expected = [batch_of_bytes(BATCH_BYTES, n) for n in range(count)]
    assert arriving.pull(1) + overtaken == expected
    assert (output.holds(1), output.holds(2)) == (False, True)
    assert [one.take(arriving) for _ in range(count + 2)] == [
        *expected, batch_of(1_000_000), Barrier(2, 6),
    ]  # fmt: skip
    zero.wait_until(output.is_flushed)


def test_a_barrier_that_has_left_or_was_never_sent_cannot_be_hastened(slots):
    zero, one = slots(2)
    output, arriving = channel(zero, one, 7)
    meet(zero, one)

    output.send(Barrier(1, 0, 60_000))
    assert one.take(arriving) == Barrier(1, 0, 60_000)

    assert not output.holds(1)
    assert output.hasten(1) is None
    assert output.hasten(2) is None


def test_a_barrier_already_on_the_fast_lane_has_nothing_more_to_overtake(slots):
    zero, one = slots(2)
    output, arriving = channel(zero, one, 7)
    output.send(batch_of(1))
    assert output.overtake(Barrier(1, 0, 0)) == [batch_of(1)]

    assert not output.holds(1)
    assert output.hasten(1) == []
    meet(zero, one)
    assert [one.take(arriving) for _ in range(2)] == [Barrier(1, 0, 0), batch_of(1)]


def test_the_turn_of_a_hastened_barrier_is_not_used_by_the_batch_behind_it(slots):
    one = slots(2)[1]
    output, other = one.network.output(0, 1), one.network.output(0, 2)
    output.send(Barrier(1, 0, 60_000))
    output.send(batch_of(1))
    other.send(EndOfRecords())

    assert output.hasten(1) == []

    with connect(one.network.address, SECRET, hello_of(0), LIMIT_SECONDS) as peer:
        one.network.connect({0: one.network.address}, LIMIT_SECONDS)
        assert [read_channel_id(peer) for _ in range(2)] == [1, 2]
        peer.sendall(frame(frames.FrameType.CREDIT, 1, (1).to_bytes(8, "little")))
        assert read_channel_id(peer) == 1


def test_who_asked_for_a_held_barrier_is_woken_when_it_leaves(slots):
    zero, one = slots(2, buffer_bytes_max=WINDOW_BYTES)
    output, arriving = channel(zero, one, 7)
    meet(zero, one)
    output.send(batch_of_bytes(2 * WINDOW_BYTES))
    zero.wait_until(output.is_flushed)
    # All credit is used up, but there is room all the time: only the barrier can be the news.
    output.send(batch_of(1))
    output.send(Barrier(1, 0, 60_000))
    zero.forget_wakes()
    assert output.holds(1)

    one.take(arriving)

    zero.wait_for_a_wake()
    assert not output.holds(1)


def test_an_overtaking_barrier_passes_the_other_channels_of_its_connection_too(slots):
    one = slots(2)[1]
    outputs = [one.network.output(0, channel_id) for channel_id in (1, 2, 3)]
    for output in outputs:
        output.send(batch_of_bytes(BATCH_BYTES))
    outputs[2].overtake(Barrier(1, 0, 0))
    credit = ROOMY_BYTES.to_bytes(8, "little")
    with connect(one.network.address, SECRET, hello_of(0), LIMIT_SECONDS) as peer:
        peer.sendall(b"".join(frame(frames.FrameType.CREDIT, each, credit) for each in (1, 2, 3)))
        one.network.connect({0: one.network.address}, LIMIT_SECONDS)
        order = [read_channel_id(peer) for _ in range(4)]

    assert order == [3, 1, 2, 3]


def test_nothing_is_overtaken_on_the_way_to_a_peer_that_has_left(slots):
    zero, one = slots(2, buffer_bytes_max=WINDOW_BYTES)
    output, _ = channel(zero, one, 7)
    echo = Echo(zero, one)
    meet(zero, one)
    fill(output, echo)
    output.send(Barrier(1, 0, 60_000))

    one.network.close(LIMIT_SECONDS)
    zero.wait_until(output.has_room)

    assert not output.holds(1)
    assert output.hasten(1) is None
    assert output.overtake(Barrier(2, 0, 0)) == []
    assert output.is_flushed()


def test_overtaking_again_and_again_uses_up_no_credit(slots):
    zero, one = slots(2, buffer_bytes_max=WINDOW_BYTES)
    output, arriving = channel(zero, one, 7)
    echo = Echo(zero, one)
    meet(zero, one)
    room = fill(output, echo)
    sent = taken = room

    for n in range(200):
        output.overtake(Barrier(n, 0, 0)) if n % 2 else output.send(Barrier(n, 0, 60_000))
        output.hasten(n)
        await_barrier(one, arriving)
        arriving.pull(n)
        for _ in range(room // 2):
            assert numbers([one.take(arriving)])[0] == taken - room
            taken += 1
        while sent < taken:
            zero.wait_until(output.has_room)
            output.send(batch_of_bytes(BATCH_BYTES, sent))
            sent += 1

    for n in range(taken - room, sent):
        assert numbers([one.take(arriving)])[0] == n
    zero.wait_until(output.is_flushed)
    assert fill(output, echo) == room


class Crossing:
    """Both loops of one channel, with a record of what every checkpoint would restore."""

    def __init__(self, random, zero, one, make_batch):
        self._random, self._zero, self._one, self._make_batch = random, zero, one, make_batch
        self._output, self._arriving = channel(zero, one, 7)
        self._echo = Echo(zero, one)
        self._rows_sent = 0
        self.rows_taken = []
        self._has_ended = False
        self._sent_before = {}  # rows, by checkpoint
        self._overtaken = {}
        self.answered = {}  # by checkpoint: how many were taken, pulled, overtaken

    def take_steps(self, count):
        steps = {
            self._send: 10, self._take: 5, self._start_checkpoint: 1, self._hasten: 1,
            self._pull: 1, self._echo.round_trip: 2,
        }  # fmt: skip
        for step in self._random.choices(list(steps), list(steps.values()), k=count):
            step()

    def finish(self):
        self._output.send(EndOfRecords())
        while not self._has_ended:
            self._one.wait_until(lambda: not self._arriving.is_empty())
            self._take()

    def _send(self):
        if self._output.has_room():
            rows = self._random.randint(1, 600)
            self._output.send(self._make_batch(range(self._rows_sent, self._rows_sent + rows)))
            self._rows_sent += rows

    def _take(self):
        if not self._arriving.is_empty():
            match self._arriving.take():
                case Barrier(checkpoint_id):
                    self._arrived(checkpoint_id, [])
                case pa.RecordBatch() as batch:
                    self.rows_taken += numbers([batch])
                case EndOfRecords():
                    self._has_ended = True

    def _start_checkpoint(self):
        checkpoint_id = len(self._sent_before)
        self._sent_before[checkpoint_id] = self._rows_sent
        self._overtaken[checkpoint_id] = []
        if self._random.random() < 0.5:
            overtaken = self._output.overtake(Barrier(checkpoint_id, 0, 0))
            self._overtaken[checkpoint_id] = numbers(overtaken)
        else:
            self._output.send(Barrier(checkpoint_id, 0, 60_000))

    def _hasten(self):
        open_ids = self._sent_before.keys() - self.answered.keys()
        if open_ids:
            checkpoint_id = self._random.choice(sorted(open_ids))
            was_held = self._output.holds(checkpoint_id)
            overtaken = self._output.hasten(checkpoint_id)
            if overtaken:
                assert was_held
                self._overtaken[checkpoint_id] = numbers(overtaken)

    def _pull(self):
        waiting = self._arriving.waiting_barriers()
        if waiting:
            checkpoint_id = self._random.choice(waiting).checkpoint_id
            self._arrived(checkpoint_id, numbers(self._arriving.pull(checkpoint_id)))

    def _arrived(self, checkpoint_id, pulled):
        overtaken = self._overtaken[checkpoint_id]
        covered = [*self.rows_taken, *pulled, *overtaken]
        assert covered == list(range(self._sent_before[checkpoint_id]))
        assert checkpoint_id not in self.answered
        self.answered[checkpoint_id] = (len(self.rows_taken), len(pulled), len(overtaken))

    def check_end(self):
        assert self.rows_taken == list(range(self._rows_sent))
        assert self.answered.keys() == self._sent_before.keys()


def plain(rows):
    return pa.record_batch({"n": pa.array(rows, pa.int64())})


def with_words(rows):
    words = pa.array([f"word {n % 7}" for n in rows]).dictionary_encode()
    return pa.record_batch({"n": pa.array(rows, pa.int64()), "word": words})


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("make_batch", [plain, with_words])
@pytest.mark.parametrize("payload_bytes_max", [frames.PAYLOAD_BYTES_MAX, 2_000])
def test_taken_pulled_and_overtaken_are_together_what_was_sent_before_the_barrier(
    slots, monkeypatch, seed, make_batch, payload_bytes_max
):
    """The smaller bound splits most batches, so that some have left by half."""
    monkeypatch.setattr(frames, "PAYLOAD_BYTES_MAX", payload_bytes_max)
    zero, one = slots(2, buffer_bytes_max=8 * 1024)
    crossing = Crossing(Random(seed), zero, one, make_batch)
    meet(zero, one)

    crossing.take_steps(600)
    crossing.finish()

    crossing.check_end()


def test_a_frame_can_tell_what_it_carries_and_keeps_no_more_than_that(monkeypatch):
    whole = pa.record_batch({"n": pa.array(range(100_000), pa.int64())})
    large, small = encoded(whole), encoded(whole.slice(50_000, 10))
    assert (large.batch(), small.batch()) == (whole, whole.slice(50_000, 10))
    assert large.batch()["n"].buffers()[1].address == whole["n"].buffers()[1].address
    assert small.batch()["n"].buffers()[1].size < 1_000

    monkeypatch.setattr(frames, "PAYLOAD_BYTES_MAX", 4_000)
    parts = frames.Encoder(1).encode(whole.slice(0, 2_000))
    assert len(parts) > 1
    assert [part.batch() for part in parts] == [decoded(part) for part in parts]


# --- how it ends


def test_a_goodbye_is_not_a_failure_and_loses_nothing(slots):
    zero, one = slots(2)
    output, arriving = channel(zero, one, 7)
    back, _ = channel(one, zero, 8)
    meet(zero, one)
    for n in range(100):
        output.send(batch_of(n))
    output.send(EndOfRecords())
    zero.network.close(LIMIT_SECONDS)

    assert [one.take(arriving) for _ in range(100)] == [batch_of(n) for n in range(100)]
    assert one.take(arriving) == EndOfRecords()
    back.send(batch_of(1))
    close_in_order(one)
    assert zero.network.failure() is None
    assert one.network.failure() is None


def test_all_may_close_at_the_same_time_and_twice(slots):
    three = slots(3)
    meet(*three)

    close_in_order(*three)
    close_in_order(*three)
    assert [slot.network.failure() for slot in three] == [None] * 3


def test_closing_ends_at_the_limit_if_a_peer_takes_nothing(slots):
    zero, one = slots(2, buffer_bytes_max=WINDOW_BYTES)
    output, _ = channel(zero, one, 7)
    echo = Echo(zero, one)
    meet(zero, one)
    fill(output, echo)

    zero.network.close(0.05)
    assert "lost its connection to slot 0" in one.awaited_failure()


def test_an_aborted_peer_is_a_failure(slots):
    zero, one, two = slots(3)
    output, _ = channel(one, zero, 7)
    meet(zero, one, two)
    zero.network.abort()

    assert one.awaited_failure().startswith("slot 1 lost its connection to slot 0")
    assert two.awaited_failure().startswith("slot 2 lost its connection to slot 0")
    output.send(batch_of(1))
    assert output.has_room()
    assert output.is_flushed()


CHILD = """
import sys
from stillframe.runtime.network import Network
from stillframe.wire import Address
network = Network(job="page-views", host="127.0.0.1", secret=sys.argv[1].encode(), attempt=1,
                  slot=0, buffer_bytes_max=1024, wake=lambda: None)
network.connect({1: Address("127.0.0.1", int(sys.argv[2]))}, 10.0)
print("met", flush=True)
sys.stdin.read()
"""


def test_a_killed_peer_is_a_failure_told_in_one_sentence(slots):
    _, one = slots(2)
    command = [sys.executable, "-c", CHILD, SECRET.decode(), str(one.network.address.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        # The child dials us, so its own address is never asked for.
        one.network.connect({0: one.network.address}, 3 * LIMIT_SECONDS)
        assert child.stdout.readline() == b"met\n"
        assert one.network.failure() is None
        child.kill()

        assert one.awaited_failure().startswith("slot 1 lost its connection to slot 0 (")


def test_a_missing_peer_is_named(slots):
    zero, one, two = slots(3)
    addresses = {slot.index: slot.network.address for slot in (zero, one, two)}
    two.network.abort()

    with pytest.raises(StillframeError, match="missing: slot 2 at 127"):
        one.network.connect({1: addresses[1], 2: addresses[2]}, 0.2)
    with pytest.raises(StillframeError, match=r"slot 1 of job 'page-views'.*missing: slot 0 at"):
        slots(2)[1].network.connect({0: addresses[0]}, 0.05)


def test_closing_interrupts_connecting(slots):
    _, one = slots(2)
    errors = []

    def try_to_connect():
        try:
            one.network.connect({0: one.network.address}, 60.0)
        except StillframeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=try_to_connect)
    thread.start()
    one.network.close(LIMIT_SECONDS)
    thread.join(LIMIT_SECONDS)
    assert "was closed while it was connecting" in errors[0]


def test_a_slot_alone_has_nobody_to_meet(slots):
    (zero,) = slots(1)
    zero.network.connect({0: zero.network.address}, LIMIT_SECONDS)
    zero.network.close(LIMIT_SECONDS)
    assert zero.network.failure() is None


def test_no_thread_and_no_open_file_is_left_behind(slots):
    before = set(threading.enumerate())
    closed, aborted = slots(2), slots(2)
    meet(*closed)
    meet(*aborted)

    close_in_order(*closed)
    for slot in aborted:
        slot.network.abort()

    assert set(threading.enumerate()) == before
    for slot in (*closed, *aborted):
        assert slot.network._bell.fileno() == -1
        assert slot.network._selector.get_map() is None


# --- who may not come in


def test_strangers_get_nothing_and_break_nothing(slots):
    zero, one = slots(2)
    output, arriving = channel(zero, one, 7)
    address = (one.network.address.host, one.network.address.port)
    strangers = [socket.create_connection(address, LIMIT_SECONDS) for _ in range(100)]
    for number, stranger in enumerate(strangers):
        if number % 2:
            stranger.sendall(b"\x00\xff garbage " * 20)
    with pytest.raises(StillframeError, match="closed the connection during the handshake"):
        connect(one.network.address, b"wrong", hello_of(0), LIMIT_SECONDS)

    meet(zero, one)
    output.send(batch_of(1))

    assert one.take(arriving) == batch_of(1)
    assert (zero.network.failure(), one.network.failure()) == (None, None)
    for stranger in strangers:
        stranger.close()


def hello_of(slot):
    return {
        "kind": "data", "job": "page-views", "attempt": 1, "slot": slot,
        "format": frames.FORMAT_VERSION,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"attempt": 2}, "expects attempt 1 but was offered 2"),
        ({"job": "other"}, "expects job 'page-views' but was offered 'other'"),
        ({"kind": "control"}, "expects kind 'data' but was offered 'control'"),
        ({"format": 99}, "expects format 4 but was offered 99"),
        ({"slot": 5}, "dialed by lower slots only, not by slot 5"),
        ({"slot": "0"}, "dialed by lower slots only, not by slot '0'"),
    ],
)
def test_a_peer_that_does_not_belong_to_this_attempt_is_refused(slots, changed, complaint):
    one = slots(2)[1]
    with pytest.raises(StillframeError, match=complaint):
        connect(one.network.address, SECRET, {**hello_of(0), **changed}, LIMIT_SECONDS)


def test_a_slot_of_an_older_attempt_is_refused_at_once(slots):
    (zero, _), (_, newer) = slots(2, attempt=1), slots(2, attempt=2)

    with pytest.raises(StillframeError, match=r"refused us: .* but was offered 1"):
        zero.network.connect({1: newer.network.address}, 60.0)


def test_a_second_connection_of_the_same_slot_is_refused(slots):
    one = slots(2)[1]
    with (
        connect(one.network.address, SECRET, hello_of(0), LIMIT_SECONDS),
        pytest.raises(StillframeError, match="already has its connection to slot 0"),
    ):
        connect(one.network.address, SECRET, hello_of(0), LIMIT_SECONDS)


def frame(kind, channel_id, payload=b"", length=None):
    size = len(payload) if length is None else length
    return frames.HEADER.pack(kind, 0, channel_id, size) + payload


def batch_frame(channel_id, size_bytes=8):
    (encoded,) = frames.Encoder(channel_id).encode(batch_of_bytes(size_bytes))
    return b"".join(encoded.parts)


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        (frame(99, 7), "unknown type 99"),
        (frame(frames.FrameType.BATCH, 8, b"x"), "BATCH came for the unknown channel 8"),
        (frame(frames.FrameType.CREDIT, 7, b"x" * 8), "credit came for the unknown channel 7"),
        (frame(frames.FrameType.CREDIT, 9, b"x"), "a credit could not be read"),
        (frame(frames.FrameType.CREDIT, 9, b"\0" * 8), "a credit of 0 bytes"),
        (frame(frames.FrameType.BATCH, 7, length=2**31 + 1), "a frame of 2147483649 bytes"),
        (frame(frames.FrameType.BATCH, 7), "BATCH frame of 0 bytes could not be read"),
        (frame(frames.FrameType.BATCH, 7, b"nonsense" * 9), "BATCH frame of 72 bytes"),
        (frame(frames.FrameType.BARRIER, 7, b"123"), "BARRIER frame of 3 bytes"),
        (batch_frame(7, 2 * WINDOW_BYTES) + batch_frame(7), "sent a batch without credit"),
    ],
)
def test_a_peer_that_misbehaves_is_a_failure_and_not_a_crash(slots, said, complaint):
    one = slots(2, buffer_bytes_max=WINDOW_BYTES)[1]
    one.network.input(0, 7)
    one.network.output(0, 9)
    with connect(one.network.address, SECRET, hello_of(0), LIMIT_SECONDS) as peer:
        one.network.connect({0: one.network.address}, LIMIT_SECONDS)
        peer.sendall(said)

        sentence = one.awaited_failure()
    assert sentence.startswith("slot 0 sent slot 1 what cannot be: ")
    assert complaint in sentence


def test_frames_may_come_in_any_pieces(slots):
    one = slots(2)[1]
    arriving = one.network.input(0, 7)
    (whole,) = frames.Encoder(7).encode(batch_of(1, 2, 3))
    said = b"".join(whole.parts) + frame(frames.FrameType.END_OF_RECORDS, 7)
    with connect(one.network.address, SECRET, hello_of(0), LIMIT_SECONDS) as peer:
        one.network.connect({0: one.network.address}, LIMIT_SECONDS)
        for byte in said:
            peer.sendall(bytes([byte]))

        assert one.take(arriving) == batch_of(1, 2, 3)
        assert one.take(arriving) == EndOfRecords()
