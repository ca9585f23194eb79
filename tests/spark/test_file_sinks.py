"""What our file sinks write is what Spark reads: partitions, compression, Spark's own log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared_parts import parts

from stillframe.api.sinks import CommitterContext, SinkContext
from stillframe.connectors.file_encoders import FileFormat
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.staged_files import Layout
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SubtaskIndex

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

CONTEXT = SinkContext("job", Attempt(1), OperatorUid("sink"), SubtaskIndex(0))


def written(sink: FileSink, *epochs: pa.RecordBatch) -> None:
    sink.check()
    for number, batch in enumerate(epochs):
        writer = sink.open_writer(CONTEXT)
        writer.write(batch)
        prepared = writer.rotate(CheckpointId(number + 1))()
        writer.close()
        # A commit may come again, from a driver that knows nothing of the first.
        for _ in range(2):
            sink.open_committer(CommitterContext()).commit(Epoch(number), parts(list(prepared)))


ROWS = """SELECT id, cast(id % 3 as double) d, date'2024-01-01' + cast(id % 2 as int) day,
 timestamp'2024-01-01 00:00:00.5' + make_interval(0,0,0,0,0,0,id % 2) at,
 CASE WHEN id % 4 = 0 THEN null WHEN id % 4 = 1 THEN 'a/b=c%' WHEN id % 4 = 2 THEN '' ELSE 'é x' END
 word, id % 2 = 0 even FROM range(0, 40, 1, 1)"""


@pytest.mark.parametrize(
    ("file_format", "compression"), [("parquet", "zstd"), ("json", "gzip"), ("csv", "bzip2")]
)
def test_partitioned_files_are_where_spark_puts_them(
    file_format: FileFormat, compression: str, spark: SparkSession, tmp_path: Path
) -> None:
    frame = spark.sql(ROWS)
    keys = ["day", "at", "word", "even", "d"]
    frame.write.partitionBy(*keys).format(file_format).save(str(tmp_path / "theirs"))
    (batch,) = frame.toArrow().combine_chunks().to_batches()
    zone = str(spark.conf.get("spark.sql.session.timeZone"))
    layout = Layout(partition_by=tuple(keys), rows_max=2)
    out = tmp_path / "ours"
    written(FileSink(str(out), file_format, batch.schema, zone, compression, layout=layout), batch)

    directories = [
        {str(file.parent.relative_to(root)) for file in root.rglob("part-*")}
        for root in (tmp_path / "theirs", out)
    ]
    assert directories[0] == directories[1]
    reader = spark.read.format(file_format)
    if file_format != "parquet":
        reader = reader.schema("id long")
    assert sorted(row.id for row in reader.load(str(out)).collect()) == list(range(40))
    assert len(list(out.rglob("part-*"))) > len(directories[1]), "files are rolled"


def test_spark_sees_what_its_own_log_names_and_nothing_else(
    spark: SparkSession, tmp_path: Path
) -> None:
    schema = pa.schema([("n", pa.int64())])
    out = tmp_path / "out put%"
    epochs = [pa.record_batch([[n]], schema=schema) for n in range(23)]
    written(FileSink(str(out), "parquet", schema).logged(None), *epochs)
    pq.write_table(pa.table({"n": [99]}), out / "part-of-an-epoch-that-is-not-complete.parquet")

    assert sorted(row.n for row in spark.read.parquet(str(out)).collect()) == list(range(23))
    log = sorted(file.name for file in (out / "_spark_metadata").iterdir())
    assert log == sorted(["9.compact", *map(str, range(10, 19)), "19.compact", "20", "21", "22"])


def test_what_is_older_than_its_retention_is_not_named_any_more(
    spark: SparkSession, tmp_path: Path
) -> None:
    schema = pa.schema([("n", pa.int64())])
    epochs = [pa.record_batch([[n]], schema=schema) for n in range(10)]
    written(FileSink(str(tmp_path), "parquet", schema).logged(0.0), *epochs)
    assert [row.n for row in spark.read.parquet(str(tmp_path)).collect()] == [9]
