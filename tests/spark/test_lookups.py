"""Joins with what is looked up, on real local Spark: a DataFrame, or newest rows of a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted, Event
from stillframe.errors import BuildError, StartRefused
from stillframe.graph.logical import Enrich, Lookup, Node, Read, walk
from stillframe.spark.plans import lookups
from stillframe.spark.session import Still
from stillframe.spark.stream import Stream
from stillframe.testing.sources import Die, Gate, Item, ScriptedSource, Wait

pytestmark = pytest.mark.spark

WAIT_SECONDS_MAX = 120.0
ORDERS = [(1, "eur", 10), (2, "usd", 20), (3, None, 30), (4, "chf", 40), (5, "usd", 5)]
RATES = [("eur", 1.0, 1), ("usd", 1.1, 2), ("usd", 1.2, 30), (None, 9.0, 4)]


@pytest.fixture
def orders(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(ORDERS, "id int, currency string, amount long").coalesce(1)


@pytest.fixture
def rates(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(RATES, "currency string, rate double, least int")


def operators(stream: Stream, kind: type) -> list[Any]:
    return [node.operator for node in walk([stream.node]) if isinstance(node.operator, kind)]


# --- A DataFrame: what is built -------------------------------------------------------------------


def test_the_columns_are_those_of_sparks_join(
    still: Still, orders: DataFrame, rates: DataFrame
) -> None:
    stream = still.stream(orders)
    for on, how in (("currency", "inner"), (["currency"], "left"), ("currency", "left_semi")):
        assert stream.join(rates, on, how).dtypes == orders.join(rates, on, how).dtypes


def test_equalities_are_keys_and_the_rest_is_the_condition(
    still: Still, orders: DataFrame, rates: DataFrame
) -> None:
    stream = still.stream(orders)
    other = rates.withColumnRenamed("currency", "of")
    on = (stream.currency == other.of) & (stream.amount > other.least)
    (lookup,) = operators(stream.join(other, on, "left"), Lookup)
    assert (lookup.how, lookup.keys, lookup.table_keys) == ("left", ("currency",), ("of",))
    assert lookup.condition is not None


def test_building_reads_nothing(still: Still, orders: DataFrame, spark: SparkSession) -> None:
    def fail() -> None:
        raise AssertionError("the DataFrame was read")

    broken = spark.range(3).select("id", F.udf(fail, "string")().alias("x"))
    assert still.stream(orders).join(broken, "id").columns == ["id", "currency", "amount", "x"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("right", "RightOuter join with a streaming DataFrame/Dataset on the left and a static"),
        ("full", "FullOuter joins with streaming DataFrames/Datasets on the left and a static"),
    ],
)
def test_what_a_stream_cannot_know_is_refused_in_sparks_words(
    still: Still, orders: DataFrame, rates: DataFrame, how: str, words: str
) -> None:
    with pytest.raises(BuildError, match=words):
        still.stream(orders).join(rates, "currency", how)


def test_unknown_columns_and_kinds_are_told_by_spark(
    still: Still, orders: DataFrame, rates: DataFrame
) -> None:
    with pytest.raises(AnalysisException, match="UNRESOLVED_USING_COLUMN_FOR_JOIN"):
        still.stream(orders).join(rates, "country")
    with pytest.raises(AnalysisException, match="UNSUPPORTED_JOIN_TYPE"):
        still.stream(orders).join(rates, "currency", "sideways")


def test_a_stream_of_sparks_own_is_refused(
    still: Still, orders: DataFrame, spark: SparkSession
) -> None:
    streaming = spark.readStream.format("rate").load().withColumnRenamed("value", "id")
    with pytest.raises(BuildError, match=r"make it a stream with still\.stream\(df\)"):
        still.stream(orders).join(streaming, "id")


def test_a_dataframe_that_is_too_large_is_refused_with_its_size(
    still: Still, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "TABLE_BYTES_MAX", 2**20)
    clicks = still.readStream.format("clicks").option("records", 10).load()
    stream = clicks.join(spark.range(400_000), "id")
    with pytest.raises(StartRefused, match=r"has 3 MiB.*up to 1 MiB.*latest_by"):
        stream.writeStream.format("noop").start()


# --- A DataFrame: what comes out ------------------------------------------------------------------


def written(stream: Stream, place: Path, name: str = "looked-up") -> list[dict[str, Any]]:
    query = (
        stream.writeStream.format("parquet")
        .queryName(name)
        .option("path", str(place / "out"))
        .option("checkpointLocation", str(place / "checkpoints"))
        .option("checkpointInterval", "300 ms")
        .option("parallelism", "2")
        .start()
    )
    assert query.awaitTermination(WAIT_SECONDS_MAX)
    found: list[dict[str, Any]] = pq.read_table(place / "out").to_pylist()
    return found


def counted(rows: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.items()) for row in rows)


JOINS: dict[str, Callable[[Any, DataFrame], Any]] = {
    "inner by name": lambda rows, rates: rows.join(rates, "currency"),
    "left by name": lambda rows, rates: rows.join(rates, ["currency"], "left"),
    "semi": lambda rows, rates: rows.join(rates, "currency", "left_semi"),
    "anti": lambda rows, rates: rows.join(rates, "currency", "left_anti"),
    "left with a condition": lambda rows, rates: rows.join(
        rates, (rows.currency == rates.currency) & (rows.amount > rates.least), "left_outer"
    ).drop(rates.currency),
    "semi with a condition": lambda rows, rates: rows.join(
        rates, (rows.currency == rates.currency) & (rows.amount > rates.least), "semi"
    ),
    "by an alias": lambda rows, rates: rows.join(
        rates.withColumnRenamed("currency", "of").alias("r"), F.col("currency") == F.col("r.of")
    ),
    "with a cast": lambda rows, rates: rows.join(
        rates, rows.amount == rates.least * 10, "left"
    ).drop(rates.currency),
    "without equality": lambda rows, rates: rows.join(
        rates.drop("currency"), rows.amount < rates.least
    ),
    "then grouped": lambda rows, rates: rows.join(rates, "currency").filter("rate > 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", JOINS)
def test_the_rows_are_those_of_sparks_join(
    still: Still, orders: DataFrame, rates: DataFrame, tmp_path: Path, kind: str
) -> None:
    found = written(JOINS[kind](still.stream(orders), rates), tmp_path)
    expected = [row.asDict() for row in JOINS[kind](orders, rates).collect()]
    assert counted(found) == counted(expected)


# --- The newest rows of a stream ------------------------------------------------------------------

ORDER = pa.schema([("n", pa.int64()), ("currency", pa.string())])
RATE = pa.schema(
    [("currency", pa.string()), ("version", pa.int64()), ("at", pa.timestamp("us", "UTC"))]
)


def scripted(still: Still, schema: pa.Schema, *items: Item) -> Stream:
    source = ScriptedSource(schema, (items,), name=",".join(schema.names))
    return Stream.reading(still, Node(Read(source), schema, parallelism=1))


def orders_of(*numbers: int) -> pa.RecordBatch:
    rows = [{"n": number, "currency": f"c{number % 3}"} for number in numbers]
    return pa.RecordBatch.from_pylist(rows, schema=ORDER)


def rates_of(*versions: int) -> pa.RecordBatch:
    """Of c0 and c1; none of c2."""
    rows = [
        {"currency": f"c{which}", "version": version, "at": version * 1_000_000}
        for version in versions
        for which in (0, 1)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=RATE)


@pytest.mark.parametrize("how", ["inner", "left"])
def test_the_newest_rows_are_kept_by_key(still: Still, how: str) -> None:
    orders, rates = scripted(still, ORDER), scripted(still, RATE)
    joined = orders.join(rates.latest_by("CURRENCY"), "currency", how)
    assert joined.columns == ["currency", "n", "version", "at"]
    (enrich,) = operators(joined, Enrich)
    assert (enrich.how, enrich.keys, enrich.newest_time) == (how, ("currency",), None)


def test_newest_is_by_event_time_where_there_is_one(still: Still) -> None:
    orders = scripted(still, ORDER)
    rates = scripted(still, RATE).withWatermark("at", "1 second")
    joined = orders.join(rates.latest_by("currency"), "currency")
    (enrich,) = operators(joined, Enrich)
    assert enrich.newest_time == "at"
    assert not any("watermark" in str(field.metadata) for field in joined.schema)


def test_what_cannot_be_looked_up_is_refused(still: Still) -> None:
    orders, rates = scripted(still, ORDER), scripted(still, RATE)
    latest = rates.latest_by("currency")
    with pytest.raises(BuildError, match="can be joined 'inner' or 'left', not 'full'"):
        orders.join(latest, "currency", "full")
    with pytest.raises(BuildError, match=r"kept by currency.*the join is on version"):
        orders.join(latest, orders.n == rates.version)
    with pytest.raises(BuildError, match="equal keys alone"):
        orders.join(latest, (orders.currency == rates.currency) & (orders.n > rates.version))
    with pytest.raises(BuildError, match="call latest_by last"):
        latest.select("version")
    with pytest.raises(BuildError, match="name the columns"):
        rates.latest_by()
    with pytest.raises(AnalysisException, match="UNRESOLVED_COLUMN"):
        rates.latest_by("country")


@pytest.mark.slow
def test_orders_come_out_once_beside_what_is_newest_also_after_a_kill(
    still: Still, tmp_path: Path
) -> None:
    gates = [Gate(str(tmp_path / f"gate-{place}")) for place in range(4)]
    died = Gate(str(tmp_path / "died"))
    rates = scripted(
        still,
        RATE,
        Wait(gates[0]),
        rates_of(3, 7, 5),
        Wait(gates[2]),
        rates_of(6),  # older than 7: it changes nothing
        rates_of(9),
    ).withWatermark("at", "1 hour")
    orders = scripted(
        still,
        ORDER,
        orders_of(*range(30)),
        Wait(gates[1]),
        Die(died),
        orders_of(*range(30, 60)),
        Wait(gates[3]),
        orders_of(*range(60, 90)),
    )
    events: list[Event] = []
    query = (
        orders.join(rates.latest_by("currency"), "currency", "left")
        .writeStream.format("parquet")
        .queryName("newest")
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoints"))
        .option("checkpointInterval", "300 ms")
        .option("restartDelay", "100 ms")
        .option("parallelism", "2")
        .start()
    )

    def listen(event: Event) -> None:
        """What was let in before a checkpoint is in the state long before the one after next."""
        events.append(event)
        if isinstance(event, CheckpointCompleted) and event.checkpoint_id % 3 == 0:
            closed = [gate for gate in gates if not gate.is_open]
            if closed:
                closed[0].open()

    query.add_listener(listen)
    assert query.awaitTermination(WAIT_SECONDS_MAX), [str(event) for event in events]
    rows = {row["n"]: row["version"] for row in pq.read_table(tmp_path / "out").to_pylist()}

    assert pq.read_table(tmp_path / "out").num_rows == 90
    assert died.is_open
    assert any(isinstance(e, AttemptStarted) and e.restored_from for e in events)
    expected = [None] * 30 + [7] * 30 + [9] * 30
    assert rows == {n: None if n % 3 == 2 else expected[n] for n in range(90)}
