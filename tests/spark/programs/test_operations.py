"""What a streaming DataFrame can do in Spark, it can do here: plans are made, nothing runs.

Of each operation Spark's own checker says whether a stream may have it, and our translator whether
it runs. The docs have both, operation by operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from guide import BOTH_REFUSE, IS_OLDER, ROWS, as_table, table_in_docs, write_inputs
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor

from stillframe.errors import BuildError
from stillframe.graph.plan import build_plan
from stillframe.spark.steps import analyzed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from stillframe.spark.session import Still

pytestmark = pytest.mark.spark

APPEND = {
    "columns": """
        rows.select("device")
        rows.select("*")
        rows.select(rows.device, rows["signal"])
        rows.select(F.col("device").alias("d"))
        rows.selectExpr("signal * 2 AS twice")
        rows.withColumn("twice", F.col("signal") * 2)
        rows.withColumns({"twice": F.col("signal") * 2, "half": F.col("signal") / 2})
        rows.withColumnRenamed("device", "d")
        rows.withColumnsRenamed({"device": "d", "signal": "s"})
        rows.withMetadata("device", {"unit": "none"})
        rows.drop("device")
        rows.drop("device", "signal")
        rows.drop(rows.device)
        rows.toDF("a", "b", "c", "d", "e")
        rows.to(rows.select("device", "signal").schema)
        rows.select(rows.colRegex("`dev.*`"))
        rows.alias("r").select("r.device")
        rows.transform(lambda frame: frame.select("device"))
        rows.select(F.struct("device", "signal").alias("s")).select("s.*")
        rows.select(F.col("tags")[0])
        rows.select(rows.metadataColumn("_metadata").file_name)
        rows.unpivot("device", ["signal"], "what", "value")
        rows.melt("device", ["signal"], "what", "value")
        rows.toJSON()
    """,
    "missing values": """
        rows.dropna()
        rows.dropna("all")
        rows.dropna(thresh=2, subset=["device", "signal", "time"])
        rows.na.drop(subset="device")
        rows.fillna(0.0)
        rows.fillna({"signal": 1.0, "device": "none"})
        rows.na.fill("none", "device")
        rows.replace("d1", "first")
        rows.replace(["d1", "d2"], ["first", "second"], "device")
        rows.na.replace({"d1": "first"}, subset="device")
    """,
    "rows": """
        rows.filter("signal > 1")
        rows.filter(rows.signal > 1)
        rows.where((rows.signal > 1) & rows.device.isNotNull())
        rows[rows.signal > 1]
        rows[["device", "signal"]]
        rows.limit(3)
        rows.offset(3)
        rows.sample(0.5)
        rows.sampleBy("device", {"d1": 0.5})
        rows.randomSplit([0.5, 0.5])[0]
        rows.select(F.explode("tags"))
        rows.select("device", F.explode_outer("tags").alias("tag"))
        rows.select(F.posexplode("tags"))
        rows.select("device", F.posexplode_outer("tags"))
        rows.mapInPandas(lambda frames: frames, rows.schema)
        rows.mapInArrow(lambda batches: batches, rows.schema)
        rows.select(F.udf(lambda text: text + "!")("device"))
        rows.zipWithIndex()
    """,
    "places and hints": """
        rows.repartition(3)
        rows.repartition("device")
        rows.repartition(3, "device", "deviceType")
        rows.repartitionByRange("device")
        rows.coalesce(1)
        rows.sortWithinPartitions("device")
        rows.hint("broadcast")
        rows.observe("metrics", F.count(F.lit(1)).alias("n"))
        rows.persist()
        rows.cache()
        rows.checkpoint()
        rows.localCheckpoint()
    """,
    "duplicates": """
        rows.drop("tags").dropDuplicates()
        rows.dropDuplicates(["device"])
        rows.drop_duplicates(["device"])
        rows.distinct()
        late.dropDuplicates(["device", "time"])
        late.dropDuplicates(["device"])
        late.dropDuplicatesWithinWatermark(["device"])
        late.drop("tags").dropDuplicatesWithinWatermark()
        rows.dropDuplicatesWithinWatermark(["device"])
    """,
    "several streams": """
        rows.union(other)
        rows.unionAll(other)
        rows.unionByName(other)
        rows.unionByName(other.drop("signal"), allowMissingColumns=True)
        rows.union(rows)
        rows.union(names.selectExpr("deviceType", "name", "1D", "now()", "array('a')"))
        rows.intersect(other)
        rows.intersectAll(other)
        rows.subtract(other)
        rows.exceptAll(other)
        rows.join(other, "device")
        rows.select("device").join(other.select("device", "signal"), "device")
        rows.drop("tags").join(other.select("device", "time"), ["device", "time"])
        rows.join(other, rows.device == other.device).select(rows.device, other.signal)
        late.join(late_other, F.expr(near), "inner")
        late.join(late_other, F.expr(near), "left")
        late.join(late_other, F.expr(near), "right")
        late.join(late_other, F.expr(near), "full")
        late.join(late_other, F.expr(near), "left_semi")
        late.join(late_other, F.expr(near), "left_anti")
        rows.join(other, "device", "left")
        rows.crossJoin(other)
        rows.alias("a").join(rows.alias("b"), F.expr("a.device = b.device")).select("a.device")
    """,
    "with static DataFrames": """
        rows.join(names, "deviceType")
        rows.join(names, rows.deviceType == names.deviceType).select("device", "name")
        rows.join(names, "deviceType", "left")
        rows.join(names, "deviceType", "left_semi")
        rows.join(names, "deviceType", "left_anti")
        rows.join(names, "deviceType", "right")
        rows.join(names, "deviceType", "full")
        rows.join(F.broadcast(names), "deviceType")
        rows.join(names.hint("merge"), "deviceType")
        rows.crossJoin(names.select("name"))
        rows.join(names.select("name"), rows.device < names.name)
        names.join(rows, "deviceType")
        names.join(rows, "deviceType", "right")
        names.join(rows, "deviceType", "left")
        names.join(rows, "deviceType", "full")
        names.crossJoin(rows.select("device"))
        rows.where(F.col("deviceType").isin("t1", "t2"))
    """,
    "event time": """
        late.select("time")
        rows.withWatermark("time", "0 seconds")
        late.groupBy(F.window("time", "1 minute")).count()
        late.groupBy(F.window("time", "1 minute", "30 seconds"), "device").count()
        late.groupBy(F.window("time", "1 minute", "1 minute", "5 seconds")).agg(F.max("signal"))
        late.groupBy(F.window("time", "1 minute").alias("w")).count().select("w.start", "count")
        late.select(F.window("time", "1 minute"), "device")
        late.groupBy("time").count()
        late.groupBy("time", "device").count()
        late.groupBy(F.session_window("time", "10 seconds"), "device").count()
        late.groupBy(F.window("time", "1 minute")).count().select(F.window_time("window"))
        late.groupBy(F.window("time", "1 minute")).count().where("count > 1")
        minutes.groupBy(F.window(F.window_time("window"), "5 minutes")).agg(F.sum("count"))
        minutes.groupBy(F.window("window", "5 minutes")).agg(F.sum("count"))
        minutes.groupBy("window").agg(F.max("count"))
        minutes.join(minutes.withColumnRenamed("count", "again"), ["window", "device"])
        minutes.select("window").dropDuplicates()
        minutes.union(minutes)
        minutes.withWatermark("window", "1 minute")
        late.groupBy("device").count()
        late.groupBy(F.window("time", "1 minute")).count().join(largest, "window")
    """,
    "state": """
        late.groupBy("device").applyInPandasWithState(each, "n int", "n int", "append", "NoTimeout")
        rows.groupBy("device").transformWithState(Kept(), "n long", "append", "none")
        rows.groupBy("device").transformWithStateInPandas(Kept(), "n long", "append", "none")
        rows.groupBy("device").applyInPandas(each, "n long")
        rows.groupBy("device").applyInArrow(each, "n long")
    """,
    "SQL": """
        sql("SELECT device, signal * 2 FROM rows WHERE signal > 1")
        sql("SELECT CASE WHEN signal > 1 THEN device ELSE 'none' END AS d FROM rows")
        sql("SELECT * FROM (SELECT device FROM rows) AS inner_rows")
        sql("WITH few AS (SELECT device FROM rows) SELECT * FROM few")
        sql("SELECT device FROM rows UNION ALL SELECT deviceType FROM rows")
        sql("SELECT device, tag FROM rows LATERAL VIEW explode(tags) AS tag")
        sql("SELECT device, tag FROM rows LATERAL VIEW OUTER explode(tags) AS tag")
        sql("SELECT device, name FROM rows JOIN names USING (deviceType)")
        sql("SELECT device, name FROM rows NATURAL JOIN names")
        sql("SELECT /*+ BROADCAST(names) */ device, name FROM rows JOIN names USING (deviceType)")
        sql("FROM rows |> WHERE signal > 1 |> SELECT device")
        sql("SELECT window.end, count(*) AS n FROM late GROUP BY window(time, '1 minute')")
        sql("SELECT device FROM rows TABLESAMPLE (10 PERCENT)")
        sql("SELECT device, row_number() OVER (ORDER BY time) AS n FROM rows")
        sql("SELECT device FROM rows WHERE deviceType IN (SELECT deviceType FROM names)")
        sql("SELECT device FROM rows WHERE EXISTS (SELECT 1 FROM names)")
        sql("SELECT device, (SELECT max(name) FROM names) AS n FROM rows")
        sql("SELECT device FROM rows SORT BY device")
    """,
}
COMPLETE = {
    "aggregations, complete mode": """
        rows.groupBy("device").count()
        rows.groupby("device").count()
        rows.groupBy().count()
        rows.agg(F.max("signal"))
        rows.agg({"signal": "max"})
        rows.groupBy("device").agg({"signal": "sum"})
        rows.groupBy("device").agg(F.sum("signal"), F.avg("signal"), F.count("*"))
        rows.groupBy("device").sum("signal")
        rows.groupBy("device").avg("signal")
        rows.groupBy("device").mean("signal")
        rows.groupBy("device").min("signal")
        rows.groupBy("device").max("signal")
        rows.groupBy(F.upper("device").alias("d")).count()
        rows.groupBy("device").agg((F.sum("signal") / F.count("*")).alias("mean"))
        rows.rollup("device", "deviceType").count()
        rows.cube("device", "deviceType").count()
        rows.groupingSets([["device"], ["deviceType"]], "device", "deviceType").agg(F.count("*"))
        rows.groupBy("device").pivot("deviceType", ["t1", "t2"]).count()
        rows.groupBy("device").count().where("count > 1")
        rows.groupBy("device").count().orderBy("count")
        rows.groupBy("device").count().sort(F.desc("count"), "device")
        rows.groupBy("device").count().orderBy("device").limit(2)
        rows.groupBy("device").count().limit(2)
        rows.groupBy("device").count().withColumn("twice", F.col("count") * 2)
        rows.groupBy("device").count().drop("count")
        rows.groupBy("device").count().join(names, F.col("device") == F.col("name"))
        rows.groupBy(F.window("time", "1 minute")).count()
        late.groupBy(F.window("time", "1 minute"), "device").count().orderBy("window")
        late.groupBy(F.session_window("time", "10 seconds"), "device").count()
        sql("SELECT count(*) FROM rows")
        sql("SELECT device, count(*) AS n FROM rows GROUP BY device HAVING count(*) > 1")
        sql("SELECT device, count(*) AS n FROM rows GROUP BY ALL ORDER BY n DESC LIMIT 3")
        sql("SELECT device, deviceType, count(*) FROM rows GROUP BY ROLLUP (device, deviceType)")
        sql("SELECT device, count(*) FILTER (WHERE signal > 1) AS n FROM rows GROUP BY device")
    """,
}
UPDATE = {
    "aggregations, update mode": """
        rows.groupBy("device").count()
        rows.groupBy(F.window("time", "1 minute"), "device").count()
        late.groupBy(F.window("time", "1 minute"), "device").count()
        late.groupBy("time").count()
        rows.rollup("device").count()
        sql("SELECT DISTINCT device FROM rows")
        sql("SELECT device FROM rows UNION SELECT deviceType FROM rows")
        late.groupBy(F.session_window("time", "10 seconds"), "device").count()
        minutes.groupBy("window").agg(F.max("count"))
    """,
}
OPERATIONS = [
    (kind, code.strip(), mode)
    for mode, kinds in (("append", APPEND), ("complete", COMPLETE), ("update", UPDATE))
    for kind, lines in kinds.items()
    for code in lines.strip().splitlines()
]
WHY_NOT = {
    "rows.zipWithIndex()": "a stream has no last row to count to",
    "rows.distinct()": "rows are not told apart by arrays",
    'rows.join(other, "device")': "two columns would have one name; rename one",
    "rows.crossJoin(other)": "streams are joined by equal keys; Spark says so at the start",
    'minutes.withWatermark("window", "1 minute")': "event time is a column of times",
    'rows.groupBy("device").count().join(names, F.col("device") == F.col("name"))': (
        "a whole result is selected from, filtered and sorted, and not joined"
    ),
}
"""Of those that are refused here and not in Spark."""
RUNS, MORE = "runs", "runs; refused by Spark"


class Asked:
    """Makes an operation's plan."""

    def __init__(self, still: Still, place: Path) -> None:
        write_inputs(place / "inputs")
        self.still = still
        spark = still.spark
        schema, _ = ROWS["devices"]

        def stream(name: str) -> DataFrame:
            (place / name).symlink_to(place / "inputs" / "devices")
            return spark.readStream.schema(schema).json(str(place / name))

        rows, other = stream("rows"), stream("other")
        late = rows.withWatermark("time", "1 minute")
        minutes = late.groupBy(F.window("time", "1 minute"), "device").count()
        self.names = {
            "F": F,
            "rows": rows,
            "other": other,
            "late": late,
            "late_other": other.withWatermark("time", "1 minute").toDF("d", "t", "s", "at", "g"),
            "near": "device = d AND at BETWEEN time AND time + INTERVAL 5 SECONDS",
            "minutes": minutes,
            "largest": late.groupBy(F.window("time", "1 minute")).agg(F.max("signal").alias("m")),
            "names": spark.createDataFrame([("t1", "one")], "deviceType string, name string"),
            "each": lambda *given: iter(()),
            "Kept": _Kept,
            "sql": spark.sql,
        }
        for name in ("rows", "late", "names"):
            self.names[name].createOrReplaceTempView(name)
        self._location = str(place / "checkpoints")

    def made(self, code: str) -> DataFrame:
        frame: Any = eval(code, dict(self.names))
        assert frame.isStreaming
        return frame

    def of_spark(self, frame: DataFrame, mode: str) -> str | None:
        """Why Spark refuses it; None: it does not."""
        jvm: Any = self.still.spark._jvm
        checker = jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker
        asked = getattr(jvm.org.apache.spark.sql.streaming.OutputMode, mode.capitalize())()
        try:
            checker.checkForStreaming(analyzed(frame), asked)
        except PySparkException as error:
            return str(error)
        return None

    def here(self, frame: DataFrame, mode: str) -> str | None:
        try:
            writer = self.still.writeStream(frame).outputMode(mode)
            writer = writer.format("console").queryName("made")
            options = {"checkpointLocation": self._location, "checkpointInterval": "1 second"}
            sinks, _ = self.still.prepare("made", writer, **options)
            build_plan("made", sinks, 2)
        except (BuildError, PySparkException) as error:
            return str(error)
        return None


class _Kept(StatefulProcessor):
    """Is never called."""

    def init(self, handle: Any) -> None: ...

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        yield from ()

    def close(self) -> None: ...


@pytest.fixture
def asked(still: Still, tmp_path: Path) -> Iterator[Asked]:
    spark = still.spark
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    yield Asked(still, tmp_path)
    spark.conf.set("spark.sql.session.timeZone", str(before))


def _told(asked: Asked, code: str, mode: str) -> tuple[str, str]:
    """What the docs say of it, and what a refusal says."""
    try:
        frame = asked.made(code)
    except (PySparkException, AttributeError) as error:
        return BOTH_REFUSE, str(error)  # no plan comes of it; the latter is an older Spark's
    theirs = asked.of_spark(frame, mode)
    ours = asked.here(frame, mode)
    if ours is None:
        return (RUNS if theirs is None else MORE), ""
    if theirs is not None:
        return BOTH_REFUSE, ours
    return f"refused: {WHY_NOT.get(code, '?')}", ours


def test_an_operation_that_spark_allows_runs_here_or_the_docs_say_why_it_does_not(
    asked: Asked,
) -> None:
    seen, said = [], []
    for kind, code, mode in OPERATIONS:
        here, refusal = _told(asked, code, mode)
        seen.append((kind, f"`{code}`".replace("|", "\\|"), here))
        said.append(f"{code}: {here} {refusal}")
    expected = as_table(seen)
    if IS_OLDER:
        assert not [each for each in said if "refused: ?" in each], "\n".join(said)
        return
    assert table_in_docs("operations") == expected, "\n".join([*expected, *said])
