"""What jobs on real local Spark share: clicks to read, a slot that dies, and Spark's own results.

The fault is always the same: a slot is killed with SIGKILL right after the second checkpoint, and
the job must have been restored exactly once when it ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

if TYPE_CHECKING:
    # Otherwise imported where they are used: a run without Spark's tests does not wait for pyspark.
    from pyspark.sql import DataFrame, SparkSession

    from stillframe.coordinator.query import Query
    from stillframe.spark.session import Still
    from stillframe.spark.stream import Stream
    from stillframe.spark.writer import StreamWriter

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
                os.kill(query.slot_pids[1], signal.SIGKILL)

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
