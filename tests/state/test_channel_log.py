"""Records under way in real files: written channel after channel, read back run by run."""

import pyarrow as pa
import pytest

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import SnapshotDamaged
from stillframe.state.channel_log import Overtaken, read_run, write_channel_log
from stillframe.state.partials import PartialAggregates, is_partial
from stillframe.storage.local import LocalStore

SCHEMA = pa.schema([("app", pa.string()), ("id", pa.int64())])
COUNT = AggregateCall("count", None, "count", pa.int64())


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def batch(*ids):
    return pa.record_batch([[f"app-{i % 3}" for i in ids], list(ids)], schema=SCHEMA)


def partials():
    return PartialAggregates(SCHEMA, ("app",), (COUNT,)).combine(batch(*range(4_000)))


def overtaken(*batches, source=0, target=0, is_input=True):
    return Overtaken("a>b", source, target, is_input, batches)


def buffer_of(store, log):
    return store.read_verified(log.path, log.length_bytes, log.crc32)


def runs_of(store, log):
    buffer = buffer_of(store, log)
    return [read_run(buffer, run.offset_bytes, run.length_bytes) for run in log.runs]


def test_every_channels_batches_come_back_equal_and_in_order(store):
    channels = [
        overtaken(batch(1, 2), batch(3)),
        overtaken(batch(4), target=1, is_input=False),
    ]
    log = write_channel_log(store, "log", channels)

    assert [run.channel for run in log.runs] == channels
    assert [run.rows for run in log.runs] == [3, 1]
    for batches, channel in zip(runs_of(store, log), channels, strict=True):
        assert batches == list(channel.batches)


class MeteredStore(LocalStore):
    """Notes how many bytes it is given at a time."""

    def write(self, path, chunks):
        self.chunk_bytes = []

        def metered():
            for chunk in chunks:
                self.chunk_bytes.append(len(chunk))
                yield chunk

        return super().write(path, metered())


def test_a_long_channel_is_never_in_memory_a_second_time_as_a_whole(tmp_path):
    store = MeteredStore(tmp_path)
    batches = [batch(*range(1_000 * place, 1_000 * (place + 1))) for place in range(50)]
    log = write_channel_log(store, "log", [overtaken(*batches)])

    assert max(store.chunk_bytes) < 2 * max(each.nbytes for each in batches)
    assert runs_of(store, log) == [batches]


def test_batches_that_look_different_are_runs_of_their_own_in_their_order(store):
    combined = partials()
    bare = batch(1).select(["app"])
    batches = [batch(1), batch(2), combined, combined, bare, batch(3)]
    log = write_channel_log(store, "log", [overtaken(*batches)])

    runs = runs_of(store, log)
    assert [len(run) for run in runs] == [2, 2, 1, 1]
    assert [each for run in runs for each in run] == batches


def test_partial_aggregates_are_known_as_such_when_they_come_back(store):
    # Of the same columns as the records: only the mark tells them apart.
    combined = partials()
    records = combined.replace_schema_metadata(None)
    log = write_channel_log(store, "log", [overtaken(records, combined, records)])

    came_back = [each for run in runs_of(store, log) for each in run]
    assert [is_partial(each) for each in came_back] == [False, True, False]


def test_dictionaries_that_change_from_batch_to_batch_survive(store):
    batches = [
        pa.record_batch([pa.array(words).dictionary_encode()], names=["word"])
        for words in (["a", "b", "a"], ["c"], ["b", "c"])
    ]
    log = write_channel_log(store, "log", [overtaken(*batches)])

    [run] = runs_of(store, log)
    assert [each.to_pydict() for each in run] == [each.to_pydict() for each in batches]


def test_batches_are_read_without_a_copy(store):
    log = write_channel_log(store, "log", [overtaken(batch(*range(10_000)))])
    buffer = buffer_of(store, log)
    [run] = log.runs
    [read] = read_run(buffer, run.offset_bytes, run.length_bytes)

    values = read.column("id").buffers()[1]
    assert buffer.address <= values.address < buffer.address + buffer.size


def test_an_altered_file_is_damaged(store, tmp_path):
    log = write_channel_log(store, "log", [overtaken(batch(1, 2))])
    data = bytearray((tmp_path / "log").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "log").write_bytes(data)

    with pytest.raises(SnapshotDamaged):
        buffer_of(store, log)


def test_metadata_that_points_to_another_place_in_the_file_is_damaged(store):
    log = write_channel_log(store, "log", [overtaken(batch(*range(100)))])
    buffer = buffer_of(store, log)

    for offset_bytes in range(1, buffer.size + 2):
        with pytest.raises(SnapshotDamaged, match=r"cannot be read .*restore an older checkpoint"):
            read_run(buffer, offset_bytes, buffer.size)


def test_a_run_that_is_cut_short_within_a_batch_is_damaged(store):
    log = write_channel_log(store, "log", [overtaken(batch(*range(100)))])
    buffer = buffer_of(store, log)

    for length_bytes in range(0, buffer.size - 300, 7):
        with pytest.raises(SnapshotDamaged, match="records under way cannot be read"):
            read_run(buffer, 0, length_bytes)
