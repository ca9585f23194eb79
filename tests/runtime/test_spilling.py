"""What comes back in a cycle waits in memory up to a limit, and beyond it on disk."""

from random import Random

import pyarrow as pa
import pytest

from stillframe.runtime.channels import LocalChannel
from stillframe.runtime.elements import Barrier, EndOfRecords, Lap
from stillframe.runtime.spilling import FeedbackInput, on_disk

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])
ROWS = 100
BATCH_BYTES = pa.record_batch([[0] * ROWS, ["n"] * ROWS], schema=SCHEMA).nbytes
LIMIT_BYTES = 10 * BATCH_BYTES


@pytest.fixture(autouse=True)
def disk(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},/elsewhere")
    return tmp_path


def batch(number):
    return pa.record_batch([[number] * ROWS, [f"{number % 10}"] * ROWS], schema=SCHEMA)


def taken(queue):
    elements = []
    while not queue.is_empty():
        elements.append(queue.take())
    return elements


def fed(*elements, memory_bytes_max=LIMIT_BYTES):
    channel = LocalChannel(1 << 30)
    queue = FeedbackInput(channel, memory_bytes_max)
    for element in elements:
        channel.send(element)
        queue.take_all()
    return queue


def test_what_comes_is_taken_at_once_whatever_the_reader_does():
    channel = LocalChannel(1)
    queue = FeedbackInput(channel)
    for number in range(50):
        channel.send(batch(number))
        assert queue.take_all()
        assert channel.has_room()

    assert not queue.take_all()
    assert [each["id"][0].as_py() for each in taken(queue)] == list(range(50))


def test_beyond_the_limit_batches_wait_on_disk_and_come_back_equal_and_in_order():
    batches = [batch(number) for number in range(100)]
    before = pa.total_allocated_bytes()
    queue = fed(*(batch(number) for number in range(100)))

    held_bytes = pa.total_allocated_bytes() - before
    assert held_bytes <= 2 * LIMIT_BYTES, "the rest is not in memory"
    came_back = taken(queue)
    assert all(a.equals(b) for a, b in zip(came_back, batches, strict=True))


def test_below_the_limit_nothing_is_written(monkeypatch):
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/no/such/directory")

    assert len(taken(fed(*(batch(number) for number in range(9))))) == 9
    with pytest.raises(FileNotFoundError):
        fed(*(batch(number) for number in range(20)))


def test_spilled_files_have_no_names(disk):
    queue = fed(*(batch(number) for number in range(100)))

    assert list(disk.iterdir()) == []
    assert len(taken(queue)) == 100


def test_markers_keep_their_place_among_spilled_batches():
    elements = []
    for number in range(60):
        elements.append(batch(number))
        if number % 7 == 0:
            elements.append(Barrier(number, 0))
        if number % 11 == 0:
            elements += [Lap(0, number, True), EndOfRecords()]
    queue = fed(*elements)

    assert [barrier.checkpoint_id for barrier in queue.waiting_barriers()] == [
        *range(0, 60, 7),
    ]
    came_back = taken(queue)
    assert [markers(each) for each in came_back] == [markers(each) for each in elements]
    assert list(queue.waiting_barriers()) == []


def markers(element):
    return element["id"][0].as_py() if isinstance(element, pa.RecordBatch) else element


def test_a_barrier_is_pulled_from_among_spilled_batches():
    queue = fed(*(batch(n) for n in range(50)), Barrier(1, 0), *(batch(n) for n in range(50, 80)))

    assert [markers(each) for each in queue.pull(1)] == list(range(50))
    assert [markers(each) for each in taken(queue)] == list(range(80))


def test_what_is_taken_makes_room_in_memory_again():
    """Otherwise each batch would go by way of the disk once a limit was ever reached."""
    channel = LocalChannel(1 << 30)
    queue = FeedbackInput(channel, LIMIT_BYTES)
    for number in range(100):
        channel.send(batch(number))
        queue.take_all()
        assert queue.take() is not None
    for number in range(8):
        channel.send(batch(number))
        queue.take_all()
    assert queue._buffered_bytes == 8 * BATCH_BYTES

    taken(queue)
    assert queue._buffered_bytes == 0


def test_batches_without_columns_have_nothing_to_spill():
    empty = batch(1).select([])
    queue = fed(*[empty] * 20, *(batch(n) for n in range(30)), empty)

    assert [each.num_rows for each in taken(queue)] == [ROWS] * 51


def test_the_same_batches_from_disk_are_equal_and_no_batches_are_no_file():
    batches = [batch(1), batch(2).slice(3, 5)]

    assert all(a.equals(b) for a, b in zip(on_disk(batches), batches, strict=True))
    assert on_disk([]) == []


@pytest.mark.parametrize("seed", range(30))
def test_in_any_order_of_sending_and_taking_nothing_is_lost_or_moved(seed):
    random = Random(seed)
    channel = LocalChannel(1 << 30)
    queue = FeedbackInput(channel, random.choice([1, BATCH_BYTES, 5 * BATCH_BYTES]))
    sent, came_back = [], []
    for number in range(150):
        element = Barrier(number, 0) if random.random() < 0.2 else batch(number)
        sent.append(markers(element))
        channel.send(element)
        if random.random() < 0.5:
            queue.take_all()
        while random.random() < 0.3 and not queue.is_empty():
            came_back.append(markers(queue.take()))
        assert queue._buffered_bytes <= queue._memory_bytes_max
    queue.take_all()

    assert came_back + [markers(each) for each in taken(queue)] == sent
    assert queue._buffered_bytes == 0
