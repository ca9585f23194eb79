"""Streams brought together on real Spark: unions, connections and cycles, against the truth."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import stillframe
from stillframe.errors import BuildError, JobFailed
from stillframe.graph.logical import CloseLoop, Connect, LoopHead, Union, walk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from stillframe.spark.session import Still
    from stillframe.spark.stream import Stream

pytestmark = pytest.mark.spark

WAIT_SECONDS_MAX = 120.0


@pytest.fixture
def clicks(still: Still) -> Stream:
    return still.readStream.format("clicks").option("records", 1000).load()


@pytest.fixture
def numbers(still: Still, spark: SparkSession) -> Stream:
    """0 to 99, fed by Spark itself, with a key of seven."""
    return still.stream(spark.range(0, 100, 1, 2).selectExpr("id", "id % 7 AS key"))


@pytest.fixture
def rows_of(still: Still, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs a job to its end and gives what it wrote."""

    def run(stream: Stream, mode: str = "append") -> list[dict[str, Any]]:
        out = tmp_path / "out"
        writer = stream.writeStream.format("json").outputMode(mode).option("path", str(out))
        query = still.start(
            "job", writer, checkpointLocation=str(tmp_path / "chk"),
            checkpointInterval="200 ms", parallelism=2,
        )  # fmt: skip
        assert query.awaitTermination(WAIT_SECONDS_MAX)
        lines = [line for file in out.glob("part-*") for line in file.read_text().splitlines()]
        return [json.loads(line) for line in lines]

    return run


Rows = Callable[..., list[dict[str, Any]]]


def by_id(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


# --- Union --------------------------------------------------------------------------------------


def frames(spark: SparkSession) -> dict[str, DataFrame]:
    return {
        "long": spark.range(0, 20, 1, 2).selectExpr("id", "id * 10 AS n"),
        "int": spark.range(20, 40, 1, 2).selectExpr("cast(id AS int) AS i", "cast(id AS short)"),
        "double": spark.range(40, 50, 1, 2).selectExpr("id / 4 AS id", "id AS n"),
        "turned": spark.range(50, 60, 1, 2).selectExpr("id AS n", "-id AS id"),
        "more": spark.range(60, 70, 1, 2).selectExpr("id", "'x' AS name"),
        "text": spark.range(70, 80, 1, 2).selectExpr("cast(id AS string) AS id", "id AS n"),
    }


UNIONS: list[tuple[str, str, Callable[[Any, Any], Any]]] = [
    ("long", "long", lambda a, b: a.union(b)),
    ("long", "int", lambda a, b: a.union(b)),
    ("int", "long", lambda a, b: a.unionAll(b)),
    ("long", "double", lambda a, b: a.union(b)),
    ("long", "turned", lambda a, b: a.union(b)),
    ("long", "turned", lambda a, b: a.unionByName(b)),
    ("long", "more", lambda a, b: a.unionByName(b, allowMissingColumns=True)),
    ("long", "text", lambda a, b: a.union(b)),
]


@pytest.mark.parametrize(("first", "second", "operation"), UNIONS)
def test_a_union_has_the_schema_that_spark_gives_it(
    spark: SparkSession, still: Still, first: str, second: str, operation: Any
) -> None:
    a, b = frames(spark)[first], frames(spark)[second]
    assert operation(still.stream(a), still.stream(b)).schema == operation(a, b).schema


def test_a_union_has_the_rows_that_spark_gives_it(
    spark: SparkSession, still: Still, rows_of: Rows
) -> None:
    a, b, c = (frames(spark)[name] for name in ("long", "int", "turned"))

    def made(one: Any, two: Any, three: Any) -> Any:
        return one.filter("id > 3").union(two).unionByName(three).withColumn("x", one.id + 1)

    rows = rows_of(made(still.stream(a), still.stream(b), still.stream(c)))

    assert by_id(rows) == by_id([row.asDict() for row in made(a, b, c).collect()])


def test_a_stream_united_with_itself_has_every_row_twice(clicks: Stream, rows_of: Rows) -> None:
    rows = rows_of(clicks.select("id").union(clicks.select("id")))

    assert sorted(row["id"] for row in rows) == sorted([*range(1000), *range(1000)])


def test_a_union_is_counted_as_one_stream(clicks: Stream, rows_of: Rows) -> None:
    rows = rows_of(clicks.union(clicks.filter("id < 500")).groupBy().count(), "update")

    assert max(row["count"] for row in rows) == 1500


def test_a_union_that_spark_refuses_is_refused_in_its_words(clicks: Stream) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match="NUM_COLUMNS_MISMATCH"):
        clicks.union(clicks.select("id"))
    with pytest.raises(AnalysisException, match="Cannot resolve column name"):
        clicks.unionByName(clicks.toDF("a", "b", "c", "d"))


def test_what_cannot_be_united_is_refused_in_one_sentence(
    spark: SparkSession, clicks: Stream
) -> None:
    counted = clicks.groupBy("app_id").count()
    with pytest.raises(BuildError, match="unite the streams before groupBy"):
        counted.union(counted)
    with pytest.raises(BuildError, match=r"make it one with still\.stream"):
        clicks.union(spark.range(5))  # type: ignore[arg-type]
    with pytest.raises(BuildError, match="leave out broadcast"):
        clicks.union(clicks.broadcast())  # type: ignore[arg-type]
    other = stillframe.on(spark.newSession()).readStream.format("clicks").load()
    with pytest.raises(BuildError, match="two Spark sessions"):
        clicks.union(other)


# --- Connect ------------------------------------------------------------------------------------


class Pair(stillframe.TwoInputFunction):
    """Answers a row for each two rows, one of each stream, that have the same key and number."""

    SCHEMA = pa.schema([("key", pa.int64()), ("number", pa.int64())])

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int], int] = {}

    def process_first(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield self._matched(batch, 1)

    def process_second(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield self._matched(batch, 2)

    def _matched(self, batch: pa.RecordBatch, side: int) -> pa.RecordBatch:
        keys, numbers = (batch.column(name).to_pylist() for name in ("key", "id"))
        made = []
        for pair in zip(keys, numbers, strict=True):
            if self._waiting.get(pair, side) == side:
                self._waiting[pair] = side
            else:
                made.append(pair)
                del self._waiting[pair]
        return self._rows(made)

    def finish(self) -> Iterator[pa.RecordBatch]:
        yield self._rows([(key, -number) for key, number in self._waiting])

    def _rows(self, pairs: list[tuple[int, int]]) -> pa.RecordBatch:
        rows = [{"key": key, "number": number} for key, number in pairs]
        return pa.RecordBatch.from_pylist(rows, self.SCHEMA)


class Translate(stillframe.TwoInputFunction):
    """Names the keys of the first stream by the newest names that the second has told."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._early: list[pa.RecordBatch] = []

    def process_first(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        if len(self._names) < 7:
            self._early.append(batch)
            return ()
        names = [self._names[key] for key in batch.column("key").to_pylist()]
        return [pa.record_batch({"id": batch.column("id"), "name": names})]

    def process_second(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        self._names.update(zip(*(column.to_pylist() for column in batch.columns), strict=True))
        if len(self._names) == 7:
            early, self._early = self._early, []
            for waiting in early:
                yield from self.process_first(waiting)


def test_connected_by_key_rows_of_a_key_meet(numbers: Stream, rows_of: Rows) -> None:
    rows = rows_of(
        numbers.connect(numbers.filter("id < 60"), Pair, "key long, number long", by="key")
    )

    met = [*range(60), *(-number for number in range(60, 100))]
    assert sorted(row["number"] for row in rows) == sorted(met)
    assert all(row["key"] == abs(row["number"]) % 7 for row in rows)


def test_a_broadcast_stream_is_heard_by_every_subtask(
    spark: SparkSession, still: Still, numbers: Stream, rows_of: Rows
) -> None:
    names = still.stream(spark.range(7).selectExpr("id AS key", "concat('n', id) AS name"))

    rows = rows_of(numbers.connect(names.broadcast(), Translate, "id long, name string"))

    assert by_id(rows) == by_id([{"id": n, "name": f"n{n % 7}"} for n in range(100)])


def test_a_function_may_be_made_by_any_callable(numbers: Stream, rows_of: Rows) -> None:
    rows = rows_of(
        numbers.connect(numbers, lambda: Pair(), "key long, number long", by=["key", "id"])
    )

    assert sorted(row["number"] for row in rows) == list(range(100))


def test_a_callable_that_makes_something_else_is_told_by_name(
    numbers: Stream, rows_of: Rows
) -> None:
    with pytest.raises(JobFailed, match="<lambda> made a dict: connect wants"):
        rows_of(numbers.connect(numbers, lambda: {}, "id long", by="key"))  # type: ignore


class Undone(stillframe.TwoInputFunction):
    def process_first(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        return ()


@pytest.mark.parametrize(
    ("connect", "says"),
    [
        (lambda s: s.connect(s, Pair, "id long"), "by='user_id', or .* other.broadcast()"),
        (lambda s: s.connect(s, Pair, "id long", by=[]), "by='user_id', or"),
        (lambda s: s.connect(s.broadcast(), Pair, "id long", by="key"), "leave out one of by"),
        (lambda s: s.connect(s, Pair, "id long", by="kex"), "'kex' needs that column in both"),
        (lambda s: s.connect(s.drop("key"), Pair, "id long", by="key"), "the second has id"),
        (
            lambda s: s.connect(s.selectExpr("cast(key AS int) AS key"), Pair, "id long", by="key"),
            "it is bigint in the first and int in the second: cast",
        ),
        (lambda s: s.connect(s, Pair, "id long", by=["key", "key"]), "two columns"),
        (lambda s: s.connect(s, Pair, "id long", by=[s.key]), "takes the names of columns"),
        (lambda s: s.connect(s, Pair(), "id long", by="key"), "give the class"),
        (lambda s: s.connect(s, dict, "id long", by="key"), "not the class dict"),
        (lambda s: s.connect(s, 7, "id long", by="key"), "TwoInputFunction, not 7"),
        (lambda s: s.connect(s, Undone, "id long", by="key"), "to do in process_second"),
        (lambda s: s.connect(7, Pair, "id long", by="key"), "takes a stream, not a int"),
        (lambda s: s.broadcast().filter("id > 1"), "only there to be connected"),
        (
            lambda s: s.map_rows(lambda row: ([row.id],), "key array<long>").transform(
                lambda t: t.connect(t, Pair, "id long", by="key")
            ),
            "not told apart by a array<bigint>",
        ),
    ],
)
def test_what_cannot_be_connected_is_refused_in_one_sentence(
    numbers: Stream, connect: Any, says: str
) -> None:
    with pytest.raises(BuildError, match=says) as raised:
        connect(numbers)
    assert "\n" not in str(raised.value)


# --- Iterate ------------------------------------------------------------------------------------


def halved(stream: Stream) -> tuple[Stream, Stream]:
    """Collatz: odd numbers leave, even ones go round again at half their size."""
    return stream.filter("n % 2 = 1"), stream.filter("n % 2 = 0").selectExpr("id", "n / 2 AS n")


def odd_part(number: int) -> int:
    return number if number % 2 else odd_part(number // 2)


def truth(numbers: Iterable[int]) -> list[dict[str, Any]]:
    return by_id([{"id": n, "n": odd_part(n)} for n in numbers])


def numbered(still: Still, spark: SparkSession, last: int = 256) -> Stream:
    return still.stream(spark.range(1, last + 1, 1, 2).selectExpr("id", "id AS n"))


def with_long_n(stream: Stream) -> tuple[Stream, Stream]:
    out, back = halved(stream)
    return out, back.selectExpr("id", "cast(n AS long) AS n")


def test_a_record_goes_round_a_cycle_until_it_leaves(
    still: Still, spark: SparkSession, rows_of: Rows
) -> None:
    rows = rows_of(numbered(still, spark).iterate(with_long_n))

    assert by_id(rows) == truth(range(1, 257))


def test_a_cycle_may_shuffle_and_have_its_own_parallelism(clicks: Stream, rows_of: Rows) -> None:
    def body(stream: Stream) -> tuple[Stream, Stream]:
        turned = stream.uid("head").parallelism(2).withColumn("n", stream.n - 1).parallelism(1)
        out = turned.filter("n <= 0").parallelism(2)
        return out, turned.filter("n > 0").parallelism(2)

    rounds = clicks.selectExpr("id", "id % 5 AS n").parallelism(1)
    rows = rows_of(rounds.iterate(body).groupBy().count(), "update")

    assert max(row["count"] for row in rows) == 1000


def test_the_uid_and_parallelism_of_a_cycle_are_those_of_its_head(clicks: Stream) -> None:
    cycle = clicks.iterate(lambda stream: (stream, stream.filter("id > 5")))
    named = cycle.uid("rounds").parallelism(3)

    assert isinstance(named.node.operator, CloseLoop)
    heads = [node for node in walk([named.node]) if isinstance(node.operator, LoopHead)]
    assert [(head.uid, head.parallelism) for head in heads] == [("rounds", 3)]
    assert named.node.operator.head is heads[0]
    assert named.filter("id > 1").uid("late").node.uid == "late"


def test_uid_and_parallelism_of_a_connection_are_its_own(clicks: Stream) -> None:
    connected = clicks.connect(clicks.broadcast(), Pair, "id long").uid("pairs").parallelism(3)

    assert isinstance(connected.node.operator, Connect)
    assert (connected.node.uid, connected.node.parallelism) == ("pairs", 3)


def test_the_uid_of_a_union_names_it(clicks: Stream) -> None:
    united = clicks.union(clicks).uid("both").parallelism(3)

    assert isinstance(united.node.operator, Union)
    assert (united.node.uid, united.node.parallelism) == ("both", 3)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda s: s, r"answers two streams, \(out, back\)"),
        (lambda s: (s, s, s), r"answers two streams, \(out, back\)"),
        (lambda s: (s, s.drop("at")), "sends back id bigint.* but the cycle takes id bigint"),
        (lambda s: (s.uid("x"), s), "both with and without a uid"),
        (lambda s: (s, s.groupBy("app_id").count()), "is aggregated"),
    ],
)
def test_a_body_that_makes_no_cycle_is_refused_in_one_sentence(
    clicks: Stream, body: Any, says: str
) -> None:
    with pytest.raises(BuildError, match=says) as raised:
        clicks.iterate(body)
    assert "\n" not in str(raised.value)


def test_both_streams_of_a_body_come_from_the_one_it_is_given(clicks: Stream) -> None:
    with pytest.raises(BuildError, match=r"stream out .* does not come from"):
        clicks.iterate(lambda stream: (clicks, stream))
    with pytest.raises(BuildError, match=r"stream back .* does not come from"):
        clicks.iterate(lambda stream: (stream, clicks))


def test_a_cycle_within_a_cycle_is_refused_by_both_their_names(clicks: Stream) -> None:
    def body(stream: Stream) -> tuple[Stream, Stream]:
        inner = stream.iterate(lambda within: (within, within.filter("id > 5"))).uid("inner")
        return inner, inner.filter("id > 7")

    with pytest.raises(BuildError, match=r"two cycles \(outer and inner\)"):
        clicks.iterate(body).uid("outer").explain()


def test_an_aggregated_stream_does_not_go_round(clicks: Stream) -> None:
    with pytest.raises(BuildError, match="call iterate before groupBy"):
        clicks.groupBy("app_id").count().iterate(lambda stream: (stream, stream))


def test_explain_shows_what_meets_where(clicks: Stream, capsys: pytest.CaptureFixture[str]) -> None:
    connected = clicks.union(clicks).connect(clicks, Pair, "id long, app_id string", by="app_id")
    connected.iterate(lambda stream: (stream, stream.filter("id > 5"))).explain()
    printed = capsys.readouterr().out
    for part in ("connect Pair by app_id", "--hash(app_id)-->", "head of a cycle", "(back)"):
        assert part in printed
    clicks.connect(clicks.broadcast(), Pair, "id long").explain()
    assert "--broadcast-->" in capsys.readouterr().out
    clicks.union(clicks).explain()
    assert capsys.readouterr().out.count("--forward-->") == 2
