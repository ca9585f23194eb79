"""Spark Structured Streaming: a user's Python function per row, and one with state per key.

url -> site by a Python UDF, then `groupBy("site")` and a `StatefulProcessor` with one value state
that emits (site, count) for every row. Variant "pandas" is `transformWithStateInPandas`, variant
"rows" is `transformWithState`.

Spark hands all the rows a key has in a micro-batch to one call. The processor therefore reads the
state once and writes it once a call, as the guide's examples do (a read or a write is a round trip
over a socket to the JVM: one of each per row would be many times slower), and counts row by row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

STARTED_S = time.time()

import pandas as pd  # noqa: E402
import spark_session as ours  # noqa: E402
from pyspark.sql import DataFrame, Row  # noqa: E402
from pyspark.sql.functions import udf  # noqa: E402
from pyspark.sql.streaming.stateful_processor import (  # noqa: E402
    StatefulProcessor,
    StatefulProcessorHandle,
)

ROWS_PER_BATCH = {"pandas": 2_000_000, "rows": 1_000_000}
ARROW_RECORDS_PER_BATCH = 100_000

_OUTPUT = "site string, count long"
_URL = (
    "concat('https://app-', pmod(xxhash64(value), 1000), '.example.org/p/', value % 1000,"
    " '?u=', pmod(xxhash64(value, 1), 1000000)) as url"
)


def site_of(url: str) -> str:
    return url.split("/")[2]


class CountPandas(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "count long")

    def handleInputRows(
        self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        before = self._count.get()
        count = before[0] if before is not None else 0
        for frame in rows:
            counts = []
            for _site in frame["site"]:
                count += 1
                counts.append(count)
            yield pd.DataFrame({"site": frame["site"], "count": counts})
        self._count.update((count,))

    def close(self) -> None:
        pass


class CountRows(StatefulProcessor):
    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "count long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        before = self._count.get()
        count = before[0] if before is not None else 0
        site = key[0]
        for _row in rows:
            count += 1
            yield Row(site=site, count=count)
        self._count.update((count,))

    def close(self) -> None:
        pass


def counted(urls: DataFrame, variant: str) -> DataFrame:
    sites = urls.select(udf(site_of, "string", useArrow=True)("url").alias("site"))
    grouped = sites.groupBy("site")
    if variant == "rows":
        return grouped.transformWithState(CountRows(), _OUTPUT, "Update", "None")
    return grouped.transformWithStateInPandas(CountPandas(), _OUTPUT, "Update", "None")


def main() -> None:
    params = ours.params_given()
    if params["workload"] != "rows" or params["variant"] not in ROWS_PER_BATCH:
        ours.refuse("This program does rows in the variants pandas and rows only.")
    if params["source"] != "generator":
        ours.refuse("This program makes its rows itself.")
    ours.refuse_without_checkpoints(params)
    params["backend"] = "rocksdb"  # The only one that transformWithState runs on.
    tuned = {"spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_RECORDS_PER_BATCH)}
    spark = ours.session(params, tuned)
    startup_s = time.time() - STARTED_S
    rows = ROWS_PER_BATCH[params["variant"]]
    urls = ours.rate_batches(spark, params, rows).selectExpr(_URL)
    measured = ours.measure_generated(params, rows, counted(urls, params["variant"]))
    total = ours.counted_in_state(spark, measured, "count")
    settings = {**tuned, **ours.state_settings("rocksdb")}
    ours.report_measured(spark, params, startup_s, measured, total, settings)
    spark.stop()


if __name__ == "__main__":
    main()
