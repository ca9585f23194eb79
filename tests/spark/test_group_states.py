"""`applyInPandasWithState` and `transformWithState` in a plan of Spark's, run there and here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from stillframe.errors import BuildError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from stillframe.spark.session import Still

pytestmark = pytest.mark.spark

SCHEMA = "id long, at timestamp, k long"
ROWS = 600
SAID = "k long, what string, n long, at timestamp"
STATE = "n long, newest timestamp"


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A row each second, in six files; a key is there for a hundred seconds."""
    (tmp_path / "rows").mkdir()
    for begin in range(0, ROWS, 100):
        lines = (
            {"id": i, "at": f"2024-01-01T00:{i // 60:02d}:{i % 60:02d}Z", "k": i // 100}
            for i in range(begin, begin + 100)
        )
        file = tmp_path / "rows" / f"{begin:03d}.json"
        file.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
        os.utime(file, (begin, begin))  # the order in which they are read
    return str(tmp_path / "rows")


def said(k: int, what: str, n: int, at: Any) -> pd.DataFrame:
    return pd.DataFrame({"k": [k], "what": [what], "n": [n], "at": [at]})


def counting(key: Any, frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """How many there were, up to each row; begun again when there were sixty."""
    (k,) = key
    n, newest = state.getOption or (0, None)
    assert state.exists == (newest is not None)
    for frame in frames:
        for at in frame["at"]:
            n, newest = n + 1, at if newest is None else max(at, pd.Timestamp(newest))
            yield said(k, "so far", n, newest)[["at", "k", "n", "what"]]
            if n == 60:
                n = 0
    state.update((n, newest))
    yield pd.DataFrame()


def forgetting(
    key: Any, frames: Iterator[pd.DataFrame], state: GroupState
) -> Iterator[pd.DataFrame]:
    """A session: said half a minute of event time after its last row, and forgotten."""
    (k,) = key
    if state.hasTimedOut:
        n, newest = state.get
        (nothing,) = frames
        assert (len(nothing), nothing.columns.tolist()) == (0, ["id", "at", "k"])
        state.remove()
        assert not state.exists
        yield said(k, "timed out", n, newest)
        return
    n, newest = state.getOption or (0, pd.Timestamp(0))
    for frame in frames:
        n, newest = n + len(frame), max(frame["at"].max(), pd.Timestamp(newest))
    state.update((n, newest))
    due_ms = int(pd.Timestamp(newest, tz="UTC").timestamp() * 1000) + 30_000
    state.setTimeoutTimestamp(due_ms)
    assert state.getCurrentWatermarkMs() < due_ms
    yield pd.DataFrame()


class Sums(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self.sum = handle.getValueState("sum", "n long")

    def handleInitialState(self, key: Any, row: Any, timerValues: Any) -> None:
        self.sum.update((row.start,))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        (k,) = key
        n = self.sum.get()[0] if self.sum.exists() else 0
        for row in rows:
            n += row.id
            yield Row(k=k, what="sum", n=n, at=row.at)
        self.sum.update((n,))

    def close(self) -> None: ...


def counts(rows: DataFrame) -> DataFrame:
    return rows.groupBy("k").applyInPandasWithState(
        counting, SAID, STATE, "update", GroupStateTimeout.NoTimeout
    )


def sessions(rows: DataFrame) -> DataFrame:
    timely = rows.withWatermark("at", "1 minute").where("id >= 0").groupBy("k")
    given = (forgetting, SAID, STATE, "update", GroupStateTimeout.EventTimeTimeout)
    return timely.applyInPandasWithState(*given).where("n > 1")


def sums(rows: DataFrame) -> DataFrame:
    begun = rows.sparkSession.createDataFrame([(1, 1000)], "k long, start long").groupBy("k")
    made = rows.groupBy("k").transformWithState(Sums(), SAID, "update", "none", begun)
    return made.selectExpr("k", "n * 2 AS n")


@pytest.mark.parametrize("program", [counts, sessions, sums])
def test_a_function_with_a_state_says_what_it_says_in_spark(
    spark: SparkSession,
    still: Still,
    rows: str,
    tmp_path: Path,
    program: Callable[[DataFrame], DataFrame],
) -> None:
    spark.conf.set(
        "spark.sql.streaming.stateStore.providerClass",
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    )
    reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1)
    frame = program(reader.json(rows))
    for name, writer in (("theirs", frame.writeStream), ("ours", still.writeStream(frame))):
        place = str(tmp_path / name)
        writer = writer.format("memory").queryName(name).option("checkpointLocation", place)
        query = writer.outputMode("update").trigger(availableNow=True).start()
        assert query.awaitTermination(120)
    truth = sorted(spark.table("theirs").collect())
    assert len(truth) >= 5
    assert sorted(spark.table("ours").collect()) == truth


def test_a_timeout_that_nobody_knows_is_refused(still: Still) -> None:
    rates = still.readStream.format("rate").load().groupBy("value")
    with pytest.raises(BuildError, match="no timeout 'Never': say one of NoTimeout, Proc"):
        rates.applyInPandasWithState(counting, SAID, STATE, "append", "Never")
