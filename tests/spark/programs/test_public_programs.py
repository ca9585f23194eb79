"""Programs of the kind that people publish, in words of our own: run by Spark, and here.

Each has the constructs of programs that are in public repositories: what Kafka gives is text that
is parsed as JSON, logs are taken apart by regular expressions, payments are looked up in a table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from guide import (
    Inputs,
    Outcome,
    Program,
    as_table,
    compare,
    outcomes_here,
    outcomes_of_spark,
    settings,
    table_in_docs,
)
from pyspark.sql import functions as f

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# All run before the first is looked at.
pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

AGENTS = ("Mozilla/5.0 (X11)", "curl/8.1", "Googlebot/2.1")
LOG = r'^(\S+) \S+ \S+ \[([\w:/]+\s[+\-]\d{4})\] "(\S+) (\S+) (\S+)" (\d{3}) (\d+|-) "([^"]*)"'


def _minute(number: int) -> str:
    return f"2024-05-01T{10 + number // 60:02}:{number % 60:02}:00Z"


def _access(i: int) -> str:
    size = "-" if i % 7 == 0 else str(100 * i)
    when = f"01/May/2024:10:{i // 2:02}:{30 * (i % 2):02} +0000"
    page = ("/", "/cart", "/item?id=7")[i % 3]
    status = (200, 200, 404, 500)[i % 4]
    return f'10.0.0.{i % 5} - - [{when}] "GET {page} HTTP/1.1" {status} {size} "{AGENTS[i % 3]}"'


def _json(rows: list[dict[str, object]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


FILES = {
    "access": "".join(f"{_access(i)}\n" for i in range(80)) + "not a line of such a log\n",
    "payments": _json(
        [
            {
                "id": i,
                "user": f"u{i % 6}",
                "amount": f"{i * 13 % 97}.{i % 100:02}",
                "fraud": "Yes" if i % 9 == 0 else "No",
                "merchant": ("QuickCash", "Books", None)[i % 3],
                "at": _minute(i // 2),
            }
            for i in range(120)
        ]
    )
    + "{broken\n",
    "edits": _json([{"bot": i % 3 == 0, "wiki": f"w{i % 2}", "at": _minute(i)} for i in range(50)]),
    "readings": _json(
        [
            {
                "sensor": f"s{i // 2 % 4}",
                "at": _minute(i // 2),
                "value": i * 3.5 if i != 6 else None,
            }
            for i in range(60)
        ]
        + [{"sensor": None, "at": _minute(31), "value": 1.0}]
    ),
    "gateways": _json(
        [
            {
                "gateway": f"g{i % 2}",
                "at": _minute(i),
                "readings": [{"name": n, "value": i + len(n)} for n in ("t", "hum")[: i % 3]],
            }
            for i in range(40)
        ]
    ),
    "changes": _json(
        [
            {
                "op": "cud"[i % 3],
                "before": None if i % 3 == 0 else {"id": i, "name": f"old{i}"},
                "after": None if i % 3 == 2 else {"id": i, "name": f"new{i}"},
                "tags": {"a": str(i), "b": "x"},
            }
            for i in range(30)
        ]
    ),
    "ticks": "symbol,price,volume,at\n"
    + "".join(f"S{i % 2},{100 + i * 7 % 13}.5,{i},{_minute(i // 3)}\n" for i in range(90)),
    "posts": "".join(
        f"{i};Some #Text {'good' if i % 3 else 'bad'} no. {i}!;#spark,#{'ab'[i % 2]}\n"
        for i in range(30)
    ),
    "rides": _json([{"ride": i, "zone": f"z{i % 3}", "start": _minute(i)} for i in range(60)]),
    # They end earlier than the rides, and so hold them back.
    "fares": _json(
        [{"ride": i, "tip": i % 10, "paid": _minute(i + i % 25)} for i in range(30) if i % 5]
    ),
    "views": _json(
        [
            {"visitor": f"v{i % 3}", "page": f"p{i % 7}", "at": _minute(i + 30 * (i // 10))}
            for i in range(50)
        ]
    ),
}


def text(at: Inputs, name: str) -> DataFrame:
    return at.spark.readStream.text(at.path(name))


def parsed(at: Inputs, name: str, schema: str) -> DataFrame:
    """As from Kafka: the value is text, and what is in it JSON."""
    values = text(at, name).selectExpr("CAST(value AS STRING) AS value")
    return values.select(f.from_json(f.col("value"), schema).alias("data")).select("data.*")


PAYMENT = "id INT, user STRING, amount STRING, fraud STRING, merchant STRING, at TIMESTAMP"


def payments(at: Inputs) -> DataFrame:
    rows = parsed(at, "payments", PAYMENT).where("id IS NOT NULL")
    return rows.withColumn("amount", f.col("amount").cast("decimal(10,2)"))


def access(at: Inputs) -> DataFrame:
    return text(at, "access").select(
        f.regexp_extract("value", LOG, 1).alias("host"),
        f.try_to_timestamp(
            f.regexp_extract("value", LOG, 2), f.lit("dd/MMM/yyyy:HH:mm:ss Z")
        ).alias("at"),
        f.regexp_extract("value", LOG, 4).alias("endpoint"),
        f.expr(f"try_cast(regexp_extract(value, r'{LOG}', 6) AS INT)").alias("status"),
        f.expr(f"try_cast(regexp_extract(value, r'{LOG}', 7) AS INT)").alias("bytes"),
    )


def top_agents(at: Inputs) -> DataFrame:
    def agent(line: str) -> str | None:
        parts = line.split('"')
        return parts[3] if len(parts) > 4 else None

    at.spark.udf.register("agent_of", agent, "string")
    return at.sql(
        """SELECT agent, count(*) AS count FROM (SELECT agent_of(value) AS agent FROM raw_logs)
        WHERE agent IS NOT NULL GROUP BY agent ORDER BY count DESC, agent LIMIT 2""",
        raw_logs=text(at, "access"),
    )


def busy_endpoints(at: Inputs) -> DataFrame:
    rows = access(at).where("endpoint != ''")
    counts = rows.groupBy(f.window("at", "10 minutes", "5 minutes"), "endpoint").count()
    return counts.orderBy(f.col("window").desc(), f.col("count").desc(), "endpoint")


def hashtags(at: Inputs) -> DataFrame:
    posts = at.spark.readStream.option("sep", ";").schema("id int, post string, tags string")
    words = posts.csv(at.path("posts")).select(f.explode(f.split("tags", ",")))
    counts = words.withColumnRenamed("col", "tag").groupBy("tag").count()
    return counts.orderBy("count", "tag", ascending=False).limit(2)


def cleaned(at: Inputs) -> DataFrame:
    posts = at.spark.readStream.option("sep", ";").schema("id int, post string, tags string")

    @f.udf("double")
    def mood(words: list[str]) -> float:
        return float(words.count("good") - words.count("bad"))

    plain = f.lower(f.regexp_replace("post", r"[^A-Za-z\s]", ""))
    rows = posts.csv(at.path("posts")).select("id", f.trim(plain).alias("plain"))
    scored = rows.withColumn("score", mood(f.split("plain", r"\s+")))
    return scored.withColumn("says", f.when(f.col("score") > 0, "yes").otherwise("no"))


def user_statistics(at: Inputs) -> DataFrame:
    return (
        payments(at)
        .groupBy(f.window("at", "10 minutes"), "user")
        .agg(
            f.count("*").alias("payments"),
            f.sum("amount").alias("total"),
            f.avg("amount").alias("average"),
            f.sum(f.when(f.col("fraud") == "Yes", 1).otherwise(0)).alias("frauds"),
        )
    )


def risky(at: Inputs) -> DataFrame:
    limits = at.spark.createDataFrame([("u1", 20), ("u3", 70)], "user string, limit int")
    rows = payments(at).join(f.broadcast(limits), "user", "left")
    risky = f.col("merchant").isin("QuickCash", "FastMoney").cast("int")
    return (
        rows.withColumn("risk", f.coalesce(risky, f.lit(0)))
        .withColumn("night", f.hour("at").between(0, 6))
        .withColumn("share", f.round(f.col("amount") / f.coalesce("limit", f.lit(50)), 3))
        .where("share > 1 OR risk = 1")
        .drop("limit")
    )


def to_kafka(at: Inputs) -> DataFrame:
    return payments(at).selectExpr("CAST(id AS STRING) AS key", "to_json(struct(*)) AS value")


def bots_and_humans(at: Inputs) -> DataFrame:
    edits = parsed(at, "edits", "bot BOOLEAN, wiki STRING, at TIMESTAMP")
    counts = edits.withWatermark("at", "10 minutes").groupBy(f.window("at", "20 minutes"))
    is_bot = f.col("bot")
    return counts.agg(
        f.sum(f.when(is_bot, 1).otherwise(0)).alias("bots"),
        f.sum(f.when(~is_bot, 1).otherwise(0)).alias("humans"),
    ).orderBy(f.desc("window"))


READING = "sensor STRING, at STRING, value DOUBLE"


def readings(at: Inputs) -> DataFrame:
    return parsed(at, "readings", READING).withColumn("at", f.to_timestamp("at"))


def valid_once(at: Inputs) -> DataFrame:
    rows = readings(at).where(f.col("sensor").isNotNull() & f.col("value").between(0, 150))
    return rows.withWatermark("at", "10 minutes").dropDuplicates(["sensor", "at"])


def invalid(at: Inputs) -> DataFrame:
    reasons = f.concat_ws(
        ", ",
        f.when(f.col("sensor").isNull(), "no sensor"),
        f.when(f.col("value").isNull(), "no value"),
        f.when(f.col("value") > 150, f.format_string("%.1f is too much", "value")),
    )
    return readings(at).withColumn("reasons", reasons).where("reasons != ''")


def unusual(at: Inputs) -> DataFrame:
    rows = readings(at).na.drop().withWatermark("at", "5 minutes")
    kept = rows.groupBy("sensor", f.window("at", "15 minutes")).agg(
        f.round(f.stddev("value"), 6).alias("spread"),
        f.percentile_approx("value", 0.5).alias("middle"),
        f.max_by("at", "value").alias("highest_at"),
    )
    return kept.where("spread > 30").select("sensor", "window.start", "spread", "middle")


def by_gateway(at: Inputs) -> DataFrame:
    schema = "gateway STRING, at TIMESTAMP, readings ARRAY<STRUCT<name: STRING, value: DOUBLE>>"
    rows = parsed(at, "gateways", schema)
    each = rows.select("gateway", "at", f.explode("readings").alias("r"))
    flat = each.select("gateway", "at", "r.*").withWatermark("at", "2 minutes")
    return flat.groupBy("gateway", "name", f.window("at", "10 minutes")).avg("value")


def changed_rows(at: Inputs) -> DataFrame:
    row = "STRUCT<id: INT, name: STRING>"
    rows = text(at, "changes").select(
        f.get_json_object("value", "$.op").alias("op"),
        f.from_json("value", f"before {row}, after {row}, tags MAP<STRING, STRING>").alias("e"),
    )
    return rows.where(f.col("op").isin("c", "u")).select(
        "op",
        f.coalesce("e.after.id", "e.before.id").alias("id"),
        f.col("e.after.name").alias("name"),
        f.col("e.tags").getItem("a").alias("a"),
        f.size("e.tags").alias("tags"),
    )


def candles(at: Inputs) -> DataFrame:
    reader = at.spark.readStream.option("header", True)
    ticks = reader.schema("symbol string, price double, volume long, at timestamp")
    rows = ticks.csv(at.path("ticks")).withWatermark("at", "1 minute")
    return rows.groupBy("symbol", f.window("at", "5 minutes")).agg(
        f.first("price").alias("open"),
        f.max("price").alias("high"),
        f.min("price").alias("low"),
        f.last("price").alias("close"),
        f.sum("volume").alias("volume"),
    )


def by_hour(at: Inputs) -> DataFrame:
    reader = at.spark.readStream.option("header", True)
    ticks = reader.schema("symbol string, price double, volume long, at timestamp")
    rows = ticks.csv(at.path("ticks")).withColumn("hour", f.date_format("at", "yyyy-MM-dd HH"))
    return rows.groupBy("symbol", "hour").agg({"price": "avg", "volume": "max", "*": "count"})


def tips_by_zone(at: Inputs) -> DataFrame:
    rides = parsed(at, "rides", "ride INT, zone STRING, start TIMESTAMP")
    fares = parsed(at, "fares", "ride INT, tip INT, paid TIMESTAMP").withColumnRenamed("ride", "of")
    joined = rides.withWatermark("start", "5 minutes").join(
        fares.withWatermark("paid", "5 minutes"),
        f.expr("ride = of AND paid BETWEEN start AND start + INTERVAL 20 MINUTES"),
    )
    return joined.groupBy(f.window("start", "15 minutes"), "zone").agg(f.sum("tip").alias("tips"))


def unpaid(at: Inputs) -> DataFrame:
    rides = parsed(at, "rides", "ride INT, zone STRING, start TIMESTAMP")
    fares = parsed(at, "fares", "ride INT, tip INT, paid TIMESTAMP").withColumnRenamed("ride", "of")
    joined = rides.withWatermark("start", "5 minutes").join(
        fares.withWatermark("paid", "5 minutes"),
        f.expr("ride = of AND paid BETWEEN start AND start + INTERVAL 20 MINUTES"),
        "leftOuter",
    )
    return joined.where("of IS NULL").select("ride", "zone", "start")


def visits(at: Inputs) -> DataFrame:
    views = parsed(at, "views", "visitor STRING, page STRING, at TIMESTAMP")
    sessions = views.withWatermark("at", "1 minute").groupBy(
        "visitor", f.session_window("at", "10 minutes")
    )
    made = sessions.agg(
        f.count("*").alias("views"),
        f.array_sort(f.collect_set("page")).alias("pages"),
        (f.unix_timestamp(f.max("at")) - f.unix_timestamp(f.min("at"))).alias("seconds"),
    )
    return made.select("visitor", "session_window.start", "views", "pages", "seconds")


def unique_visitors(at: Inputs, exactly: bool) -> DataFrame:
    views = parsed(at, "views", "visitor STRING, page STRING, at TIMESTAMP")
    count = f.countDistinct if exactly else f.approx_count_distinct
    windows = views.withWatermark("at", "1 minute").groupBy(f.window("at", "30 minutes"))
    return windows.agg(count("visitor").alias("visitors"), f.count("*").alias("views"))


def known_by_hash(at: Inputs) -> DataFrame:
    views = parsed(at, "views", "visitor STRING, page STRING, at TIMESTAMP")
    key = f.sha2(f.concat_ws("|", "visitor", "page"), 256)
    return views.withColumn("key", key).dropDuplicates(["key"]).select("key", "visitor", "page")


LOGS, PAYMENTS, SENSORS, STREAMS = "Logs and posts", "Payments", "Sensors", "Several streams"
VISITS, MARKETS, CHANGES = "Visits", "Markets", "Changes of a database"
PUBLIC_PROGRAMS = (
    Program(
        LOGS,
        "an access log by `regexp_extract`, counts by status",
        lambda at: access(at).groupBy("status").count(),
        "complete",
    ),
    Program(LOGS, "sliding windows of endpoints, sorted", busy_endpoints, "complete"),
    Program(LOGS, "SQL with a registered Python function, the top two", top_agents, "complete"),
    Program(LOGS, "hashtags, exploded, sorted and limited", hashtags, "complete"),
    Program(LOGS, "text that is cleaned and scored by a Python function", cleaned),
    Program(PAYMENTS, "JSON from text, four aggregates by window", user_statistics, "complete"),
    Program(PAYMENTS, "flags by a broadcast table, `coalesce` and `isin`", risky),
    Program(PAYMENTS, "key and value for Kafka by `to_json(struct(*))`", to_kafka),
    Program(SENSORS, "readings that are valid, each once", valid_once),
    Program(SENSORS, "readings that are not, with the reasons", invalid),
    Program(SENSORS, "windows with a spread above a limit", unusual),
    Program(SENSORS, "arrays of structs, exploded, averages by window", by_gateway),
    Program(MARKETS, "candles: first, highest, lowest, last, sum", candles),
    Program(MARKETS, "aggregates given by a dictionary", by_hour, "complete"),
    Program(VISITS, "bots and humans by window, sorted", bots_and_humans, "complete"),
    Program(VISITS, "sessions with their pages and length", visits),
    Program(
        VISITS, "`approx_count_distinct` by window", lambda at: unique_visitors(at, exactly=False)
    ),
    Program(
        VISITS,
        "`countDistinct` by window",
        lambda at: unique_visitors(at, exactly=True),
        here="runs; Spark refuses",
    ),
    Program(VISITS, "duplicates by a hash of several columns", known_by_hash),
    Program(CHANGES, "`get_json_object`, nested structs and a map", changed_rows),
    Program(STREAMS, "rides joined with their fares, tips by window", tips_by_zone),
    Program(STREAMS, "rides without a fare", unpaid),
)


@pytest.fixture(scope="module")
def outcomes(
    spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> dict[Program, tuple[Outcome, Outcome]]:
    """Of each program, in Spark and here."""
    place: Path = tmp_path_factory.mktemp("public")
    for name, said in FILES.items():
        (place / "inputs" / name).mkdir(parents=True)
        (place / "inputs" / name / "part-0").write_text(said)
    with settings(spark, {"spark.sql.session.timeZone": "UTC"}):
        here = outcomes_here(spark, PUBLIC_PROGRAMS, place / "inputs", place)
        with settings(spark, {"spark.sql.shuffle.partitions": "1"}):  # the rows are few
            there = outcomes_of_spark(spark, PUBLIC_PROGRAMS, place / "inputs", place)
    return {each: (there[each], here[each]) for each in PUBLIC_PROGRAMS}


@pytest.mark.soak
@pytest.mark.parametrize("program", PUBLIC_PROGRAMS, ids=lambda each: ": ".join(each.row[:2]))
def test_a_program_as_people_publish_it_gives_here_what_it_gives_in_spark(
    program: Program, outcomes: dict[Program, tuple[Outcome, Outcome]]
) -> None:
    compare(program, *outcomes[program])


def test_the_docs_tell_of_each_program_what_was_seen() -> None:
    expected = as_table(program.row for program in PUBLIC_PROGRAMS)
    assert table_in_docs("what it is about") == expected, "\n".join(expected)
