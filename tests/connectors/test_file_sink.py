"""The file sink: nothing seen too early, nothing seen twice, nothing left behind."""

import json
import os
import pickle
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.dataset as pd
import pyarrow.parquet as pq
import pytest
from prepared_parts import parts

from stillframe.api.sinks import CommitterContext, SinkContext
from stillframe.connectors import staged_files
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.files import find_files
from stillframe.connectors.json_lines import JsonLinesSource
from stillframe.connectors.staged_files import Layout, StagedName
from stillframe.errors import BuildError, StorageError
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SubtaskIndex
from stillframe.json_texts.writing import json_lines

SCHEMA = pa.schema([("n", pa.int64())])
JOB, UID = "page-views", OperatorUid("sink-1/a.b")


def context(attempt=1, subtask=0, job=JOB, uid=UID):
    return SinkContext(job, Attempt(attempt), OperatorUid(uid), SubtaskIndex(subtask))


def batch(*values):
    return pa.record_batch([pa.array(values, pa.int64())], SCHEMA)


def seen(path):
    """What Spark or pyarrow would read there now."""
    rows = []
    for file in (found.path for found in find_files([str(path)])):
        if file.endswith(".parquet"):
            rows += pq.read_table(file)["n"].to_pylist()
        else:
            rows += [json.loads(line)["n"] for line in Path(file).read_text().splitlines()]
    return sorted(rows)


def staged(path):
    return sorted(file.name for file in (path / "_stillframe" / "staging").iterdir())


def sink_at(path, file_format="parquet"):
    return FileSink(str(path), file_format, SCHEMA)


def stage(sink, checkpoint_id, *values, **who):
    """One epoch of one writer, prepared; what a completed checkpoint would hold of it."""
    writer = sink.open_writer(context(**who))
    writer.write(batch(*values))
    prepared = list(writer.rotate(CheckpointId(checkpoint_id))())
    writer.close()
    return json.loads(json.dumps(prepared))


@pytest.mark.parametrize("file_format", ["parquet", "json"])
def test_records_are_seen_when_their_epoch_is_committed_and_not_before(file_format, tmp_path):
    sink = pickle.loads(pickle.dumps(sink_at(tmp_path / "out", file_format)))
    writer, committer = sink.open_writer(context()), sink.open_committer(CommitterContext())

    writer.write(batch(1, 2))
    prepare = writer.rotate(CheckpointId(7))
    writer.write(batch(3))
    committables = prepare()
    assert seen(tmp_path / "out") == []

    committer.commit(Epoch(0), parts(committables))
    assert seen(tmp_path / "out") == [1, 2]
    (committable,) = committables
    assert committable["rows"] == 2
    assert committable["bytes"] == (tmp_path / "out" / committable["target"]).stat().st_size
    assert committable["target"].startswith(
        "part-page%2Dviews-sink%2D1%2Fa%2Eb-0000000007-00000-1-"
    )

    committer.commit(Epoch(1), parts(writer.rotate(CheckpointId(8))()))
    writer.close()
    assert seen(tmp_path / "out") == [1, 2, 3]
    if file_format == "parquet":
        assert pd.dataset(tmp_path / "out").count_rows() == 3


def test_an_empty_epoch_makes_no_file(tmp_path):
    writer = sink_at(tmp_path).open_writer(context())
    writer.write(batch())
    assert writer.rotate(CheckpointId(1))() == []
    writer.close()
    assert staged(tmp_path) == []


def test_a_commit_may_be_repeated(tmp_path):
    sink = sink_at(tmp_path)
    committables = stage(sink, 1, 1) + stage(sink, 1, 2, subtask=1)

    sink.open_committer(CommitterContext()).commit(
        Epoch(0), parts(committables[:1])
    )  # and then it crashed
    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))
    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))
    assert seen(tmp_path) == [1, 2]


def receipts(path):
    return sorted(file.name for file in (path / staged_files.RECEIPTS).glob("*"))


def test_a_published_file_that_a_consumer_moved_away_is_not_missed_by_a_repeated_commit(tmp_path):
    sink = sink_at(tmp_path)
    committables = stage(sink, 1, 1) + stage(sink, 1, 2, subtask=1)
    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))
    for committable in committables:
        (tmp_path / committable["target"]).rename(tmp_path / f"_taken-{committable['target']}")

    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))

    assert seen(tmp_path) == [], "nothing was published a second time"


def test_a_commit_that_died_before_its_receipt_writes_it_when_it_is_repeated(tmp_path):
    sink = sink_at(tmp_path)
    committables = stage(sink, 1, 1)
    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))
    (tmp_path / staged_files.RECEIPTS / receipts(tmp_path)[0]).unlink()
    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))
    (tmp_path / committables[0]["target"]).unlink()

    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))


def test_a_receipt_goes_when_a_completed_checkpoint_no_longer_needs_it(tmp_path):
    sink = sink_at(tmp_path)
    first, second = stage(sink, 1, 1), stage(sink, 2, 2)
    committer = sink.open_committer(CommitterContext())
    committer.commit(Epoch(0), parts(first))
    committer.commit(Epoch(1), parts(second))
    committer.forget(first)
    committer.forget(first)

    assert receipts(tmp_path) == [os.path.basename(second[0]["staged"])]
    assert seen(tmp_path) == [1, 2]


def test_a_sweep_takes_receipts_of_older_attempts_that_the_checkpoint_does_not_need(tmp_path):
    sink = sink_at(tmp_path)
    old, needed, new, other = (
        stage(sink, 1, 1),
        stage(sink, 2, 2),
        stage(sink, 3, 3, attempt=2),
        stage(sink, 3, 4, uid="another"),
    )
    committer = sink.open_committer(CommitterContext())
    committer.commit(Epoch(0), parts([*old, *needed, *new, *other]))

    committer.sweep(JOB, UID, Attempt(2), needed)

    kept = [os.path.basename(each["staged"]) for each in (*needed, *new, *other)]
    assert receipts(tmp_path) == sorted(kept)
    committer.sweep(JOB, UID, Attempt(3), [])
    assert receipts(tmp_path) == [os.path.basename(other[0]["staged"])]


def test_files_that_are_gone_are_named_with_their_rows_and_the_option_that_goes_on(tmp_path):
    sink = sink_at(tmp_path)
    committables = stage(sink, 1, 1, 2) + stage(sink, 1, 3) + stage(sink, 1, 4)
    for lost in committables[:2]:
        (tmp_path / lost["staged"]).unlink()
    with pytest.raises(StorageError) as refused:
        sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))
    said = str(refused.value)
    assert f"{committables[0]['target']} (2 rows) and 1 more" in said
    assert f"are missing from {tmp_path}" in said
    option = said.partition("acceptMissingOutput=")[2]
    assert option == ",".join(f"{each['target']}:{each['rows']}" for each in committables[:2])
    assert seen(tmp_path) == [4], "the others are published"

    accepting = CommitterContext(accepts_missing=frozenset(option.split(",")))
    sink.open_committer(accepting).commit(Epoch(0), parts(committables))

    assert seen(tmp_path) == [4]
    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))
    sink.open_committer(CommitterContext()).forget(committables)
    another = CommitterContext(accepts_missing=frozenset(option.replace(":2", ":3").split(",")))
    with pytest.raises(StorageError, match=r"\(2 rows\) of a completed checkpoint is missing"):
        sink.open_committer(another).commit(Epoch(0), parts(committables))


def test_what_was_not_rotated_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(staged_files, "_BUFFER_ROWS", 1)
    writer = sink_at(tmp_path).open_writer(context())
    writer.write(batch(1))
    assert len(staged(tmp_path)) == 1
    writer.close()
    assert staged(tmp_path) == []


def test_an_epoch_that_was_never_prepared_is_dropped_with_its_writer(tmp_path, monkeypatch):
    monkeypatch.setattr(staged_files, "_BUFFER_ROWS", 1)
    writer = sink_at(tmp_path).open_writer(context())
    writer.write(batch(1))
    prepare = writer.rotate(CheckpointId(1))
    writer.close()
    assert staged(tmp_path) == []
    with pytest.raises(StorageError, match="its writer is closed"):
        prepare()


def test_a_sweep_takes_older_attempts_of_the_same_job_and_operator_only(tmp_path):
    sink = sink_at(tmp_path)
    old, kept = stage(sink, 1, 1, attempt=1), stage(sink, 2, 2, attempt=2)
    others = [
        stage(sink, 1, 3, attempt=3),
        stage(sink, 1, 4, job="page"),
        stage(sink, 1, 5, job=JOB + "-sink"),
        stage(sink, 1, 6, uid="sink"),
    ]
    (tmp_path / "_stillframe" / "staging" / "notes.txt").touch()
    committer = sink.open_committer(CommitterContext())

    committer.sweep(JOB, UID, Attempt(3), kept)
    committer.sweep(JOB, UID, Attempt(3), kept)

    assert not (tmp_path / old[0]["staged"]).exists()
    assert len(staged(tmp_path)) == 6
    committer.commit(Epoch(0), parts(kept))
    for each in others:
        committer.commit(Epoch(0), parts(each))
    assert seen(tmp_path) == [2, 3, 4, 5, 6]


def test_sweeping_where_nothing_was_written_is_fine(tmp_path):
    sink_at(tmp_path / "absent").open_committer(CommitterContext()).sweep(JOB, UID, Attempt(9), [])


@pytest.mark.parametrize("job", ["a", "a-b", "a-1-2", "页面-浏览", "x/y z%2D", "..", "_"])
def test_names_parse_back_to_what_they_were_made_of(job):
    name = StagedName(job, "u-1", 2, 3, 4, "ab12")
    assert StagedName.parse(name.text() + ".parquet") == name
    assert "/" not in name.text()


def test_a_job_begun_afresh_on_an_old_directory_adds_to_it(tmp_path):
    """Same job, attempt, checkpoint and subtask, because its checkpoints were thrown away."""
    sink = sink_at(tmp_path)
    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(stage(sink, 1, 1)))
    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(stage(sink, 1, 2)))
    assert seen(tmp_path) == [1, 2]


def test_small_batches_are_gathered_into_row_groups(tmp_path):
    writer = sink_at(tmp_path).open_writer(context())
    for n in range(1000):
        writer.write(batch(n))
    ((committable),) = writer.rotate(CheckpointId(1))()
    writer.close()
    assert pq.read_metadata(tmp_path / committable["staged"]).num_row_groups == 1


@pytest.mark.parametrize("seed", range(40))
def test_whatever_crashes_each_record_of_a_completed_checkpoint_is_seen_once(
    seed, tmp_path, monkeypatch
):
    """Attempts die at any step; the checkpoint is complete or not; commits are cut short; and a
    consumer takes away what it sees, whenever it likes."""
    random = Random(seed)
    monkeypatch.setattr(staged_files, "_BUFFER_ROWS", random.choice([1, 2, 1000]))
    sink = sink_at(tmp_path, random.choice(["parquet", "json"]))
    truth, pending, zombies, checkpoint_id, value = [], [], [], 0, 0
    taken = []

    def shown():
        """All that was ever published, in order."""
        now = seen(tmp_path)
        if random.random() < 0.5:
            taken.extend(now)
            for file in tmp_path.glob("part-*"):
                file.unlink()
            return sorted(taken)
        return sorted(taken + now)

    for attempt in range(1, 6):
        committer = sink.open_committer(CommitterContext())
        committer.sweep(JOB, UID, Attempt(attempt), pending)
        committer.commit(Epoch(0), parts(pending))
        assert shown() == truth
        committer.commit(Epoch(0), parts(pending))
        assert shown() == truth
        before, pending = pending, []
        writers = [sink.open_writer(context(attempt, subtask)) for subtask in range(2)]
        while random.random() < 0.8:
            checkpoint_id += 1
            epoch = []
            for writer in writers:
                for _ in range(random.randint(0, 3)):
                    value += 1
                    writer.write(batch(value))
                    epoch.append(value)
            background = [writer.rotate(CheckpointId(checkpoint_id)) for writer in writers]
            if random.random() < 0.2:
                break  # died before it was prepared
            prepared = [committable for prepare in background for committable in prepare()]
            if random.random() < 0.2:
                break  # died before it was complete
            truth += epoch
            pending = prepared
            if random.random() < 0.2:
                committer.commit(Epoch(0), parts(prepared[:1]))
                shown()
                break  # died while committing
            assert set(shown()).isdisjoint(epoch)
            committer.commit(Epoch(0), parts(prepared))
            committer.forget(before)
            before, pending = prepared, random.choice([[], prepared])
            assert shown() == truth
        if random.random() < 0.5:
            zombies += writers
        else:
            for writer in writers:
                writer.close()
    committer.commit(Epoch(0), parts(pending))
    committer.sweep(JOB, UID, Attempt(99), [])
    for writer in zombies:
        writer.close()
    assert shown() == truth
    assert staged(tmp_path) == receipts(tmp_path) == []


def test_a_path_that_is_a_file_is_a_mistake_at_build_time(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(BuildError, match="out is a file"):
        sink_at(tmp_path / "out").check()
    sink_at(tmp_path / "absent").check()
    with pytest.raises(BuildError, match="not 'xml'"):
        sink_at(tmp_path, "xml").check()


def test_files_that_spark_would_not_see_beside_its_own_log_are_refused(tmp_path):
    (tmp_path / "_spark_metadata").mkdir()
    with pytest.raises(BuildError, match="set sparkMetadata to true"):
        sink_at(tmp_path).check()
    sink_at(tmp_path).logged(None).check()


def test_what_a_driver_killed_while_it_wrote_sparks_log_has_left_is_swept(tmp_path):
    log = tmp_path / "_spark_metadata"
    log.mkdir()
    left, fresh, other = log / f".{'0' * 16}.tmp", log / f".{'1' * 16}.tmp", log / ".0.crc"
    for file in (left, fresh, other):
        file.write_text("v1")
    for file in (left, other):
        os.utime(file, (1_000_000_000, 1_000_000_000))

    committer = sink_at(tmp_path).logged(None).open_committer(CommitterContext())
    committer.sweep("job", OperatorUid("sink"), Attempt(2), [])

    assert sorted(log.iterdir()) == [other, fresh], "another job may be writing this moment"


def test_what_is_acknowledged_or_committed_is_durable(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def recording(descriptor):
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    sink = sink_at(tmp_path / "out")
    writer = sink.open_writer(context())
    writer.write(batch(1))
    prepare = writer.rotate(CheckpointId(1))
    monkeypatch.setattr(os, "fsync", recording)
    committables = prepare()
    staged_file = tmp_path / "out" / committables[0]["staged"]
    way_there = [staged_file, staged_file.parent, staged_file.parent.parent, tmp_path / "out"]
    assert list(dict.fromkeys(synced)) == [path.stat().st_ino for path in [*way_there, tmp_path]]

    synced.clear()
    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))
    writer.close()
    home, receipts = tmp_path / "out" / "_stillframe", tmp_path / "out" / staged_files.RECEIPTS
    # The new name before its receipt, or a loss of power could leave the receipt alone.
    assert list(dict.fromkeys(synced)) == [
        path.stat().st_ino for path in (tmp_path / "out", home, receipts)
    ]


def test_a_full_disk_is_said_in_one_sentence(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    writer = sink_at(tmp_path).open_writer(context())
    writer.write(batch(1))
    prepare = writer.rotate(CheckpointId(1))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"cannot write .* \(No space left on device\): make"):
        prepare()
    writer.close()


# --- JSON lines ------------------------------------------------------------------------------


def lines_of(**columns):
    return bytes(json_lines(pa.record_batch(columns))).decode().splitlines()


def test_json_lines_look_as_spark_writes_them():
    at = datetime(2024, 1, 2, 3, 4, 5, 6, UTC)
    assert lines_of(
        n=pa.array([1, None]),
        text=pa.array(["é页", 'a"b\\\n']),
        at=pa.array([at, None], pa.timestamp("us", "Asia/Shanghai")),
        local=pa.array([datetime(1969, 12, 31, 23, 59, 59), None], pa.timestamp("ms")),
        day=pa.array([date(2024, 1, 2), None]),
        price=pa.array([Decimal("1.20"), None]),
        x=pa.array([0.5, float("nan")]),
        yes=pa.array([True, None]),
        raw=pa.array([b"\x01\x02", None]),
    ) == [
        '{"n":1,"text":"é页","at":"2024-01-02T03:04:05.000006Z",'
        '"local":"1969-12-31T23:59:59.000","day":"2024-01-02","price":1.20,"x":0.5,"yes":true,"raw":"AQI="}',
        '{"text":"a\\"b\\\\\\n","x":"NaN"}',
    ]


def test_nested_json_leaves_nulls_out_of_objects_but_not_out_of_lists():
    inner = pa.struct([("a", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
    assert lines_of(
        s=pa.array([{"a": None, "at": 0}], inner),
        l=pa.array([[1, None]], pa.list_(pa.int64())),
        m=pa.array([[("k", 1.5)]], pa.map_(pa.string(), pa.float64())),
        e=pa.array([[]], pa.map_(pa.string(), pa.float64())),
    ) == ['{"s":{"at":"1970-01-01T00:00:00.000Z"},"l":[1,null],"m":{"k":1.5},"e":{}}']


def test_what_is_nested_is_written_as_exactly_as_what_is_not():
    money = pa.decimal128(38, 2)
    deep = pa.struct([("d", money), ("l", pa.list_(pa.struct([("x", pa.float64())])))])
    value = {
        "d": Decimal("123456789012345678901234567890.12"),
        "l": [{"x": 1e10}, None, {"x": None}],
    }
    lines = lines_of(s=pa.array([None, value, {"d": None, "l": []}], deep).slice(1))
    assert lines == [
        '{"s":{"d":123456789012345678901234567890.12,"l":[{"x":1.0E10},null,{}]}}',
        '{"s":{"l":[]}}',
    ]


def test_times_are_written_with_the_offset_of_the_zone_and_no_digit_is_lost():
    at = pa.array([0, 1, None, 1_720_000_000_123_000], pa.timestamp("us", "UTC"))
    lines = bytes(json_lines(pa.record_batch({"at": at}), "America/New_York")).decode()
    assert lines.splitlines() == [
        '{"at":"1969-12-31T19:00:00.000-05:00"}',
        '{"at":"1969-12-31T19:00:00.000001-05:00"}',
        "{}",
        '{"at":"2024-07-03T05:46:40.123-04:00"}',
    ]


def test_an_interval_is_not_written_as_json(tmp_path):
    sink = FileSink(str(tmp_path), "json", pa.schema([("i", pa.duration("us"))]))
    with pytest.raises(BuildError, match="column i is an interval, which is not written as JSON"):
        sink.check()


def test_a_row_of_nulls_is_an_empty_object_and_no_rows_are_no_bytes():
    assert lines_of(n=pa.nulls(2, pa.int64())) == ["{}", "{}"]
    assert lines_of(n=pa.array([], pa.int64())) == []
    assert lines_of(n=pa.array([1, 2, 3]).slice(1, 1)) == ['{"n":2}']


def test_what_the_sink_writes_the_source_reads(tmp_path):
    from stillframe.api.sources import SourceContext
    from stillframe.clock import SystemClock
    from stillframe.connectors.generate import ClickSource, clicks_table

    clicks = clicks_table(ClickSource(), 0, 0, 1000)
    sink = FileSink(str(tmp_path), "json", clicks.schema)
    writer = sink.open_writer(context())
    writer.write(clicks)
    sink.open_committer(CommitterContext()).commit(
        Epoch(0), parts(writer.rotate(CheckpointId(1))())
    )
    writer.close()

    source = JsonLinesSource(str(tmp_path), clicks.schema)
    reader = source.open(source.splits(1), SourceContext(SubtaskIndex(0), 1, SystemClock()))
    ((_, back),) = reader.read()
    assert back.equals(clicks)


# --- layout ----------------------------------------------------------------------------------


def test_files_end_with_their_rows_or_bytes_and_their_names_sort(tmp_path, monkeypatch):
    monkeypatch.setattr(staged_files, "_BUFFER_ROWS", 10)
    sink = FileSink(str(tmp_path), "csv", SCHEMA, layout=Layout(rows_max=40))
    for checkpoint in (9, 10):
        committables = stage(sink, checkpoint, *range(checkpoint * 100, checkpoint * 100 + 100))
        assert [each["rows"] for each in committables] == [40, 40, 20]
        sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))
    files = sorted(tmp_path.glob("*.csv"))
    shown = [int(line) for file in files for line in file.read_text().splitlines()]
    assert shown == [*range(900, 1000), *range(1000, 1100)]
    assert staged(tmp_path) == []

    small = FileSink(str(tmp_path / "small"), "csv", SCHEMA, layout=Layout(bytes_max=30))
    writer = small.open_writer(context())
    for at in range(0, 100, 10):
        writer.write(batch(*range(at, at + 10)))
    committables = writer.rotate(CheckpointId(1))()
    writer.close()
    assert len(committables) > 3
    assert sum(each["rows"] for each in committables) == 100


def test_a_writer_holds_few_files_open_whatever_the_partitions(tmp_path, monkeypatch):
    monkeypatch.setattr(staged_files, "_OPEN_FILES_MAX", 3)
    schema = pa.schema([("k", pa.int64()), ("n", pa.int64())])
    sink = FileSink(str(tmp_path), "parquet", schema, layout=Layout(partition_by=("k",)))
    writer = sink.open_writer(context())
    for _ in range(3):
        writer.write(pa.record_batch([[n % 10 for n in range(50)], list(range(50))], schema=schema))
    committables = list(writer.rotate(CheckpointId(1))())
    writer.close()
    sink.open_committer(CommitterContext()).commit(Epoch(0), parts(committables))
    assert pd.dataset(tmp_path, partitioning="hive", exclude_invalid_files=True).count_rows() == 150
    assert {file.parent.name for file in tmp_path.rglob("part-*")} == {f"k={k}" for k in range(10)}
