"""What jobs on real local Spark share: what they read, a slot that dies, and Spark's own results.

Of clicks the fault is always the same: a slot is killed with SIGKILL right after the second
checkpoint, and the job must have been restored exactly once when it ends. Of rows that come batch
by batch the slot dies between two batches.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

if TYPE_CHECKING:
    # Otherwise imported where they are used: a run without Spark's tests does not wait for pyspark.
    from pyspark.sql import DataFrame, Row, SparkSession
    from pyspark.sql.streaming import DataStreamWriter

    from stillframe.coordinator.query import Query
    from stillframe.spark.session import Still
    from stillframe.spark.stream import Stream
    from stillframe.spark.writer import StreamWriter
    from stillframe.testing.sources import Gate

CLICKS, PARTITIONS = 40_000, 2
WAIT_SECONDS_MAX = 120.0


@pytest.fixture
def still(spark: SparkSession) -> Still:
    import stillframe

    return stillframe.on(spark)


@dataclass(frozen=True)
class Clicks:
    """The same clicks twice: as a stream, and as a table for Spark to say what is true.

    One partition for each of two slots, each in the order of time: nothing is late.
    """

    still: Still
    apps: int = 20
    records: int = CLICKS

    def stream(self) -> Stream:
        return (
            self.still.readStream.format("clicks")
            .options(records=self.records, partitions=PARTITIONS, apps=self.apps, batchRows=500)
            .option("recordsPerSecond", 20_000)
            .load()
        )

    def frame(self) -> DataFrame:
        from stillframe.connectors.generate import ClickSource, clicks_table

        source = ClickSource(records=self.records, partitions=PARTITIONS, apps=self.apps)
        each = self.records // PARTITIONS
        batches = [clicks_table(source, p, 0, each) for p in range(PARTITIONS)]
        return self.still.spark.createDataFrame(pa.Table.from_batches(batches))


@pytest.fixture
def clicks(still: Still) -> Clicks:
    return Clicks(still)


@pytest.fixture
def job_options(tmp_path: Path) -> dict[str, str]:
    """Those of a job on two slots that checkpoints often and is back at once when a slot dies."""
    return {
        "checkpointLocation": str(tmp_path / "checkpoints"),
        "checkpointInterval": "300 ms",
        "restartDelay": "100 ms",
        "restartAttempts": "10",
        "parallelism": "2",
    }


@pytest.fixture
def finish_with_a_kill() -> Callable[[Query], None]:
    """Runs a query to its end; a slot dies after the second checkpoint."""
    from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted, Event

    def finish(query: Query) -> None:
        events: list[Event] = []

        def listen(event: Event) -> None:
            events.append(event)
            if isinstance(event, CheckpointCompleted) and event.checkpoint_id == 2:
                os.kill(query.slot_pids[-1], signal.SIGKILL)

        query.add_listener(listen)
        assert query.awaitTermination(WAIT_SECONDS_MAX), [str(event) for event in events]
        restores = [e for e in events if isinstance(e, AttemptStarted) and e.restored_from]
        assert len(restores) == 1, [str(event) for event in events]

    return finish


@pytest.fixture
def run_and_kill(
    tmp_path: Path, job_options: dict[str, str], finish_with_a_kill: Callable[[Query], None]
) -> Callable[..., list[dict[str, Any]]]:
    """Starts what a writer describes, finishes it with a kill, answers the rows in its files."""

    def run(writer: StreamWriter, **options: str) -> list[dict[str, Any]]:
        out = tmp_path / "out"
        writer = writer.queryName("killed").option("path", str(out))
        finish_with_a_kill(writer.options(**job_options, **options).start())
        return pq.read_table(out).to_pylist()

    return run


# --- Batch by batch -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batches:
    """The same rows twice, batch by batch: for a stream of Spark's own, and for one of ours.

    A row is what JSON makes of it; its `at` is the event time, or null.
    """

    still: Still
    place: Path
    schema: pa.Schema
    rows: list[list[dict[str, Any]]]

    def of_spark(self, make: Callable[[Any], Any]) -> list[Row]:
        """What Spark's own stream says: one micro-batch after the other, and one without rows
        after each, for timers."""
        query = self.spark_writer(make).start()
        try:
            for _ in self.given_to_spark():
                query.processAllAvailable()
            return self.still.spark.table("of_spark").collect()
        finally:
            query.stop()

    def spark_writer(self, make: Callable[[Any], Any]) -> DataStreamWriter:
        from pyspark.sql.pandas.types import from_arrow_schema

        self._incoming.mkdir(parents=True)
        reader = self.still.spark.readStream.schema(from_arrow_schema(self.schema))
        return (
            make(reader.option("maxFilesPerTrigger", 1).json(str(self._incoming)))
            .writeStream.format("memory")
            .queryName("of_spark")
            .option("checkpointLocation", str(self.place / "spark" / "checkpoints"))
        )

    def given_to_spark(self) -> Iterator[list[dict[str, Any]]]:
        """Each batch, when Spark has been given it."""
        for number, batch in enumerate(self.rows):
            name = f"{number}.json"
            (self.place / name).write_text("".join(json.dumps(row) + "\n" for row in batch))
            (self.place / name).rename(self._incoming / name)
            yield batch

    def of_stillframe(self, make: Callable[[Any], Any]) -> list[dict[str, Any]]:
        """What ours says; in the middle a slot dies, after a checkpoint of what came before."""
        from stillframe.coordinator.history import CheckpointCompleted, Event
        from stillframe.testing.sources import Gate

        place = self.place / "ours"
        place.mkdir()
        gate, died = Gate(str(place / "gate")), Gate(str(place / "died"))
        query = (
            make(self._stream_that_dies(gate, died))
            .writeStream.format("parquet")
            .queryName("batches")
            .option("path", str(place / "out"))
            .option("checkpointLocation", str(place / "checkpoints"))
            .option("checkpointInterval", "200 ms")
            .option("restartDelay", "100 ms")
            .option("parallelism", "2")
            .start()
        )

        def listen(event: Event) -> None:
            if isinstance(event, CheckpointCompleted) and event.checkpoint_id == 3:
                gate.open()

        query.add_listener(listen)
        assert query.awaitTermination(WAIT_SECONDS_MAX)
        assert died.is_open
        return pq.read_table(place / "out").to_pylist()

    @property
    def _incoming(self) -> Path:
        return self.place / "spark" / "in"

    def _stream_that_dies(self, gate: Gate, died: Gate) -> Stream:
        from stillframe.graph.logical import Node, Read
        from stillframe.spark.stream import Stream
        from stillframe.testing.sources import Die, Item, ScriptedSource, Wait

        items: list[Item] = [self._arrow_of(batch) for batch in self.rows]
        half = len(items) // 2
        script = (*items[:half], Wait(gate), Die(died), *items[half:])
        # In one subtask: another one, which has nothing to read, would hold time back to its end.
        read = Node(Read(ScriptedSource(self.schema, (script,))), self.schema, parallelism=1)
        return Stream.reading(self.still, read)

    def _arrow_of(self, batch: list[dict[str, Any]]) -> pa.RecordBatch:
        def parsed(at: str | None) -> datetime.datetime | None:
            return None if at is None else datetime.datetime.fromisoformat(at)

        rows = [{**row, "at": parsed(row["at"])} for row in batch]
        return pa.RecordBatch.from_pylist(rows, schema=self.schema)


@pytest.fixture
def batches_of(still: Still, tmp_path: Path) -> Callable[..., Batches]:
    return lambda schema, rows: Batches(still, tmp_path, schema, rows)
