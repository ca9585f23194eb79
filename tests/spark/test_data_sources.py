"""Data sources written in Python for plain Spark, run there and here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import stillframe
from stillframe.api.sinks import CommitterContext, Prepared, SinkContext
from stillframe.api.sources import Split
from stillframe.errors import BuildError, UserCodeError
from stillframe.ids import Attempt, CheckpointId, Epoch, Mark, OperatorUid, SubtaskIndex, Writer
from stillframe.options import Options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from stillframe.spark.session import Still

pytestmark = pytest.mark.spark

ROWS = 50
WAIT_SECONDS_MAX = 120


@pytest.fixture(scope="module")
def shops(spark: SparkSession) -> Any:
    from tests.shared.data_sources import Shelf, Shops

    spark.dataSource.register(Shops)
    spark.dataSource.register(Shelf)
    return Shops


KINDS = ["planned", "arrow", "simple"]


def test_data_sources_give_here_what_they_give_in_spark(
    spark: SparkSession, shops: Any, tmp_path: Path
) -> None:
    from pyspark.sql import DataFrame
    from tests.shared.data_sources import notes, on_the_shelf

    def read(kind: str, name: str) -> DataFrame:
        reader = spark.readStream.format("shops").options(kind=kind, last=ROWS)
        return reader.option("notes", str(tmp_path / f"{name}-{kind}")).load()

    def rows(name: str, form: str) -> list[Any]:
        frames = [read(kind, name) for kind in KINDS]
        frame = reduce(DataFrame.union, frames).where("number % 2 = 0")
        writer = frame.writeStream.format("shelf").queryName(name).option("kind", form)
        writer = writer.options(path=str(tmp_path / name), notes=str(tmp_path / f"{name}-shelf"))
        writer = writer.option("checkpointLocation", str(tmp_path / f"{name}-checkpoints"))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(WAIT_SECONDS_MAX)
        return on_the_shelf(tmp_path / name)

    of_spark = rows("of_spark", "rows")
    stillframe.everywhere(spark)
    try:
        ours = rows("ours", "rows")
    finally:
        stillframe.nowhere()
    assert ours == of_spark
    assert ours == sorted([n, f"shop {n % 3}"] for _ in KINDS for n in range(0, ROWS, 2))
    for kind in KINDS:
        assert notes(tmp_path / f"ours-{kind}", "prepared") == [True]
        assert notes(tmp_path / f"ours-{kind}", "commit")[-1] == ROWS


@pytest.mark.slow
def test_after_a_kill_each_record_is_read_and_published_once(
    still: Still,
    shops: Any,
    tmp_path: Path,
    job_options: dict[str, str],
    finish_with_a_kill: Any,
) -> None:
    from tests.shared.data_sources import NotingRows, Shelf, notes, on_the_shelf

    told, shelf, each = tmp_path / "notes", tmp_path / "shelf", tmp_path / "each"
    reader = still.readStream.format(shops).options(kind="planned", last=3000, pause="0.02")
    stream = reader.option("notes", str(told)).load()
    published = stream.writeStream.format(Shelf).option("deliveryGuarantee", "exactly-once")
    published = published.options(kind="arrow", path=str(shelf), notes=str(told))
    handed = stream.writeStream.foreach(NotingRows(str(each)))
    query = still.start("published", published.trigger(availableNow=True), handed, **job_options)
    assert query.guarantee().reasons == (
        "foreach NotingRows is given rows again after a failure, with the same partition and epoch",
    )
    finish_with_a_kill(query)

    (source,) = query.lastProgress.sources
    assert json.loads(source.endOffset) == {"all": {"offset": {"at": 3000}}}
    assert [row[0] for row in on_the_shelf(shelf)] == list(range(3000))
    assert not list((shelf / "aside").iterdir()), "what was not published was aborted"
    commits = notes(told, "commit")
    assert commits == sorted(commits)
    assert commits[-1] == 3000
    assert all(each % 30 == 0 for each in commits)
    batches = [batch for batch, _ in notes(told, "batch")]
    assert batches == sorted(batches)

    opened, closed = notes(each, "open"), notes(each, "close")
    assert {tuple(at) for at in opened} == {(at[0], at[1]) for at in closed}
    rows = {tuple(row) for row in notes(each, "process")}
    assert sorted(number for _, _, number in rows) == list(range(3000)), "known by its two numbers"


def test_foreach_calls_what_spark_calls(spark: SparkSession, shops: Any, tmp_path: Path) -> None:
    from tests.shared.data_sources import NotingRows, note, notes

    def calls(name: str) -> list[Any]:
        options = {"kind": "planned", "last": "20", "notes": str(tmp_path / "unused")}
        frame = spark.readStream.format("shops").options(**options).load().repartition(1)
        told = tmp_path / name
        writer = frame.writeStream.foreach(NotingRows(str(told))).trigger(availableNow=True)
        assert writer.start().awaitTermination(WAIT_SECONDS_MAX)
        (opened,), (closed,) = notes(told, "open"), notes(told, "close")
        assert closed == [*opened, None]
        return [number for *at, number in notes(told, "process") if at == opened]

    of_spark = calls("of_spark")
    stillframe.everywhere(spark)
    try:
        assert calls("ours") == of_spark == list(range(20))

        def by_function(row: Any) -> None:
            note({"notes": str(tmp_path / "function")}, "row", row.number)

        few = spark.readStream.format("shops").options(kind="fixed", last=3).load()
        query = few.writeStream.foreach(by_function).trigger(availableNow=True).start()
        assert query.awaitTermination(WAIT_SECONDS_MAX)
    finally:
        stillframe.nowhere()
    assert notes(tmp_path / "function", "row") == [0, 1, 2]


# --- The sinks by themselves ---------------------------------------------------------------------


def test_a_writer_that_fails_is_closed_with_its_error(tmp_path: Path) -> None:
    import pyarrow as pa
    from tests.shared.data_sources import NotingRows, notes

    from stillframe.spark.formats.foreach import ForeachFormat

    rows = pa.record_batch([pa.array([1])], ["other"])
    made: Any = ForeachFormat(NotingRows(str(tmp_path / "notes"))).from_options(
        Options("foreach", {}), rows.schema
    )
    mark = Mark(Writer("x", OperatorUid("sink"), SubtaskIndex(4)), CheckpointId(7))
    with pytest.raises(Exception, match="number"):
        made.open_target().write(mark, iter([rows]), None)
    ((partition, epoch, error),) = notes(tmp_path / "notes", "close")
    assert (partition, epoch) == (4, 7)
    assert "number" in error
    with pytest.raises(BuildError, match="ATTRIBUTE_NOT_CALLABLE"):
        ForeachFormat("nothing that could be called")


@pytest.fixture
def staging(tmp_path: Path) -> Any:
    from stillframe.storage.local import LocalStore
    from stillframe.storage.staging import StagedFiles

    return StagedFiles(LocalStore(tmp_path / "store"))


SINK = OperatorUid("sink")
MARK = Mark(Writer("x", SINK, None), CheckpointId(5))


def prepared(staging: Any, place: Path, checkpoint: int = 5, **options: str) -> tuple[Any, Any]:
    """A committer, and what the first attempt has prepared for a checkpoint."""
    import pyarrow as pa
    from tests.shared.data_sources import Shelf

    from stillframe.spark.formats.data_source_sinks import PythonSinkFormat

    rows = pa.record_batch([pa.array([1]), pa.array(["a"])], ["number", "shop"])
    given = {"path": str(place), "notes": str(place / "notes"), **options}
    sink = PythonSinkFormat(Shelf).from_options(Options("shelf", given), rows.schema)
    writer = sink.open_writer(SinkContext("job", Attempt(1), SINK, SubtaskIndex(0), "", staging))
    writer.write(rows)
    committables = writer.rotate(CheckpointId(checkpoint))()
    return sink.open_committer(CommitterContext("job", staging)), tuple(committables)


def test_a_message_that_is_no_dataclass_is_kept_only_if_that_is_wished(
    staging: Any, tmp_path: Path
) -> None:
    from tests.shared.data_sources import notes

    with pytest.raises(UserCodeError, match="set option opaqueCommitMessages=true"):
        prepared(staging, tmp_path, kind="talkative")
    committer, committables = prepared(
        staging, tmp_path, kind="talkative", opaqueCommitMessages="true"
    )
    committer.commit(Epoch(4), [Prepared(MARK, committables)])
    assert notes(tmp_path / "notes", "batch") == [[[1, 2]]]


def test_what_no_checkpoint_holds_is_aborted_and_nothing_else(staging: Any, tmp_path: Path) -> None:
    from tests.shared.data_sources import notes, on_the_shelf

    committer, committables = prepared(staging, tmp_path, kind="rows")
    committer.sweep("job", SINK, Attempt(2), committables)
    committer.sweep("job", SINK, Attempt(1), [])
    assert notes(tmp_path / "notes", "abort") == [], "a checkpoint holds it, or its attempt runs"
    committer.commit(Epoch(4), [Prepared(MARK, committables)])
    assert on_the_shelf(tmp_path) == [[1, "a"]]
    prepared(staging, tmp_path, 6, kind="rows")
    committer.sweep("job", SINK, Attempt(2), [])
    assert notes(tmp_path / "notes", "abort") == [6], "not what was committed"
    assert list((tmp_path / "aside").iterdir()) == []
    assert notes(tmp_path / "notes", "batch") == [[5, 1]], "by the checkpoint, not the epoch"


# --- The reader by itself ------------------------------------------------------------------------


def reader_at(shops: Any, spark: SparkSession, place: Path, **options: str) -> Any:
    from stillframe.spark.formats.data_sources import PythonSource

    given = {"notes": str(place / "notes"), **options}
    source = PythonSource.of(spark, shops, Options("the source shops", given), None)
    return source.open((), None)  # type: ignore[arg-type]


def given(reader: Any, position: Any) -> Iterator[tuple[Split, int]]:
    """What it reads from there on, by the rows of each batch."""
    reader.add_splits([Split("all", position)])
    for item in reader.read():
        if item is not None:
            yield item[0], 0 if item[1] is None else item[1].num_rows


def test_a_large_range_goes_on_in_parts_and_is_read_on_in_its_middle(
    spark: SparkSession, shops: Any, tmp_path: Path
) -> None:
    options = {"kind": "fixed", "last": "150000"}
    (first, rows), (second, more), (last, rest) = islice(
        given(reader_at(shops, spark, tmp_path, **options), {"offset": {"at": 0}}), 3
    )
    assert first.position["offset"] == second.position["offset"] == {"at": 0}
    assert last.position == {"offset": {"at": 150000}}
    assert rows + more + rest == 150000
    again = given(reader_at(shops, spark, tmp_path, **options), first.position)
    assert sum(count for _, count in islice(again, 2)) == 150000 - rows


def test_only_what_a_checkpoint_holds_is_committed_and_once(
    spark: SparkSession, shops: Any, tmp_path: Path
) -> None:
    from tests.shared.data_sources import notes

    reader = reader_at(shops, spark, tmp_path, kind="simple", last="90")
    positions: Sequence[Any] = [{"offset": {"at": 0}, "is_initial": True}]
    read = given(reader, positions[0])
    positions = [*positions, *(split.position for split, _ in islice(read, 2))]
    for checkpoint, position in enumerate([*positions, positions[-1]]):
        reader.on_checkpoint_complete(CheckpointId(checkpoint), [Split("all", position)])
    assert notes(tmp_path / "notes", "commit") == [30, 60]


def test_rows_without_a_step_are_refused_in_spark_s_words(
    spark: SparkSession, shops: Any, tmp_path: Path
) -> None:
    reader = reader_at(shops, spark, tmp_path, kind="standing")
    with pytest.raises(UserCodeError, match="SIMPLE_STREAM_READER_OFFSET_DID_NOT_ADVANCE"):
        next(given(reader, {"offset": {"at": 0}}))


def test_a_data_source_without_a_stream_reader_is_refused_at_load(still: Still, shops: Any) -> None:
    with pytest.raises(BuildError, match="no streamReader and no simpleStreamReader"):
        still.readStream.format("shops").option("kind", "none").load()
