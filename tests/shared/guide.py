"""What programs of Spark's Structured Streaming guide read, and how each is run there and here."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
from pyarrow import orc
from pyspark.errors import PySparkException

import stillframe
from stillframe.errors import BuildError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SAME = "the same"
BOTH_REFUSE = "refused, as by Spark"
WAIT_SECONDS_MAX = 120
# The pages tell of 4.3. An older one refuses more, and what it refuses may be refused here.
IS_OLDER = tuple(map(int, pyspark.__version__.split(".")[:2])) < (4, 3)

_NOON = datetime.datetime(2024, 1, 1, 12, tzinfo=datetime.UTC)


def _at(seconds: float) -> str:
    return (_NOON + datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def _visits() -> list[dict[str, Any]]:
    seconds = {
        "user1": [0, 3, 200, 900, 1003, 2600],
        "user2": [50, 65, 400, 430, 2001],
        "user3": [10, 290, 2702],
    }
    rows = [(second, user) for user, each in seconds.items() for second in each]
    return [{"timestamp": _at(second), "userId": user} for second, user in sorted(rows)]


def _clicks() -> list[dict[str, Any]]:
    """Ten minutes after every third advertisement, and too late after every fifth. The last one
    is so late that advertisements without a click would come out, if others did not hold time."""
    in_time = [(i * 6 + 10, i) for i in range(0, 120, 3)]
    rows = in_time + [(i * 6 + 71, i) for i in range(0, 120, 5)]
    return [
        {"clickAdId": i, "clickTime": _at(minute * 60)} for minute, i in sorted([*rows, (900, 119)])
    ]


ROWS: Mapping[str, tuple[str, list[dict[str, Any]]]] = {
    "words": (
        "timestamp timestamp, word string",
        [{"timestamp": _at(30 * i), "word": ("cat", "dog", "owl")[i * i % 3]} for i in range(90)],
    ),
    "events": ("timestamp timestamp, userId string", _visits()),
    "devices": (
        "device string, deviceType string, signal double, time timestamp, tags array<string>",
        [
            {
                "device": f"d{i % 5}",
                "deviceType": f"t{i % 3}",
                "signal": i / 2,
                "time": _at(i * 7),
                "tags": ["a", "b"][: i % 3],
            }
            for i in range(60)
        ],
    ),
    "impressions": (
        "impressionAdId long, impressionTime timestamp",
        [
            {"impressionAdId": i, "impressionTime": _at(seconds)}
            for i, seconds in [*((i, 360 * i) for i in range(120)), (200, 42_990)]
        ],
    ),
    "clicks": ("clickAdId long, clickTime timestamp", _clicks()),
    "orders": (
        "guid string, eventTime timestamp",
        [{"guid": f"g{i % 20}", "eventTime": _at(10 * (i // 2))} for i in range(80)],
    ),
}
"""Of each input its columns and its rows, none of which comes late."""
LINES = "to be or not to be\nthat is the question\n\nto sleep\n"


def write_inputs(directory: Path) -> None:
    for name, (_, rows) in ROWS.items():
        (directory / name).mkdir(parents=True)
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (directory / name / "rows.json").write_text(lines)
    for name, text in {
        "lines": LINES,
        "csv": "".join(f"name{i};{i}\n" for i in range(20)),
        "year=2023": '{"n": 1}\n{"n": 2}\n',
        "year=2024": '{"n": 3}\n',
    }.items():
        place = directory / ("years" if "=" in name else "") / name
        place.mkdir(parents=True)
        (place / "part-0").write_text(text)
    (directory / "parquet").mkdir()
    pq.write_table(pa.table({"n": range(50)}), directory / "parquet" / "a.parquet")
    (directory / "orc").mkdir()
    orc.write_table(pa.table({"n": range(50)}), directory / "orc" / "a.orc")


class Inputs:
    """The inputs of one program: it has places of its own, so that no other reads them too."""

    def __init__(self, spark: SparkSession, written: Path, place: Path) -> None:
        self.spark = spark
        self._written = written
        self._place = place
        place.mkdir(parents=True)

    def path(self, name: str) -> str:
        link = self._place / name
        if not link.exists():
            os.symlink(self._written / name, link)
        return str(link)

    def rows(self, name: str) -> DataFrame:
        return self.spark.readStream.schema(ROWS[name][0]).json(self.path(name))

    def types(self) -> DataFrame:
        rows = [("t0", "thermometer"), ("t1", "camera"), ("t9", "door")]
        return self.spark.createDataFrame(rows, "deviceType string, name string")

    def sql(self, text: str, **frames: DataFrame) -> DataFrame:
        for name, frame in frames.items():
            frame.createOrReplaceTempView(name)
        return self.spark.sql(text)


@dataclass(frozen=True, eq=False)
class Program:
    """One of the guide's, in a few lines of our own."""

    section: str
    does: str
    make: Callable[[Inputs], DataFrame]
    mode: str = "append"
    here: str = SAME
    """What is different here, and why."""
    keys: tuple[str, ...] = ()
    """By which new values take the place of older ones, in update mode."""
    match: str = ""
    """What a refusal that is only ours says."""
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def row(self) -> tuple[str, str, str]:
        mode = "" if self.mode == "append" else f", {self.mode} mode"
        return self.section, self.does + mode, self.here


Outcome = list[Any] | Exception
"""The rows that a program gives, or why it is refused."""


@contextmanager
def settings(spark: SparkSession, asked: Mapping[str, str]) -> Iterator[None]:
    before = {name: spark.conf.get(name, None) for name in asked}
    for name, value in asked.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)


def _writer(program: Program, at: Inputs, name: str) -> Any:
    """The same text for Spark and here."""
    writer = program.make(at).writeStream.outputMode(program.mode)
    return writer.format("memory").queryName(name).trigger(availableNow=True)


def outcomes_of_spark(
    spark: SparkSession, programs: Iterable[Program], written: Path, place: Path
) -> dict[Program, Outcome]:
    """A query for each of them, some at a time.

    On a machine that is busy a worker of Spark's may not come up in time, which says nothing.
    """
    found: dict[Program, Outcome] = {}
    left = list(programs)
    for turn, at_once in enumerate((6, 2, 1, 1)):
        for begin in range(0, len(left), at_once):
            some = left[begin : begin + at_once]
            found |= _side_by_side(spark, some, written, place / f"spark-{turn}-{begin}")
        left = [each for each in left if "failed to connect back" in str(found[each])]
    return found


def _side_by_side(
    spark: SparkSession, programs: list[Program], written: Path, place: Path
) -> dict[Program, Outcome]:
    found: dict[Program, Outcome] = {}
    queries = {}
    for number, program in enumerate(programs):
        try:
            with settings(spark, program.settings):
                at = Inputs(spark, written, place / str(number))
                queries[program] = _writer(program, at, f"of_spark_{number}").start()
        except (PySparkException, AttributeError) as error:  # the latter is an older Spark's
            found[program] = error
    for program, query in queries.items():
        try:
            assert query.awaitTermination(WAIT_SECONDS_MAX), program
            found[program] = spark.table(query.name).collect()
        except PySparkException as error:
            found[program] = error
    return found


def outcomes_here(
    spark: SparkSession, programs: Iterable[Program], written: Path, place: Path
) -> dict[Program, Outcome]:
    """One job has them all."""
    found: dict[Program, Outcome] = {}
    writers, still = {}, stillframe.on(spark)
    options = {"checkpointLocation": str(place / "checkpoints")}
    stillframe.everywhere(spark)
    try:
        for number, program in enumerate(programs):
            try:
                with settings(spark, program.settings):
                    at = Inputs(spark, written, place / f"here-{number}")
                    writer = _writer(program, at, f"here_{number}").uid(f"sink-{number}")
                    still.prepare(f"here_{number}", writer, **options)
                writers[program] = writer, f"here_{number}"
            except (BuildError, PySparkException, AttributeError) as error:
                found[program] = error
        query = still.start("guide", *(writer for writer, _ in writers.values()), **options)
        assert query.awaitTermination(WAIT_SECONDS_MAX)
    finally:
        stillframe.nowhere()
    return found | {each: spark.table(name).collect() for each, (_, name) in writers.items()}


def compare(program: Program, of_spark: Outcome, here: Outcome) -> None:
    """Raise unless it is as the program says."""
    both = f"in Spark: {of_spark}\nhere: {here}"
    if IS_OLDER and isinstance(of_spark, Exception) and isinstance(here, Exception):
        return
    if program.here == BOTH_REFUSE:
        assert [type(each) for each in (of_spark, here) if isinstance(each, list)] == [], both
        return
    if program.match:
        assert isinstance(here, BuildError), both
        assert re.search(program.match, str(here)), both
        assert isinstance(of_spark, list), both
        return
    assert isinstance(here, list), both
    assert here, both
    is_same = isinstance(of_spark, list) and _last(program, of_spark) == _last(program, here)
    assert is_same == (program.here == SAME), both


def _last(program: Program, rows: list[Any]) -> list[Any]:
    """In an order of their own; of update mode the last row of each key."""
    if program.keys:
        by_key = {repr([row[key] for key in program.keys]): row for row in rows}
        rows = list(by_key.values())
    return sorted(map(tuple, rows), key=repr)


# --- The docs -------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs/migrate-from-structured-streaming.md"


def table_in_docs(heading: str) -> list[str]:
    """The lines of the table under the heading that begins with this cell."""
    lines = PAGE.read_text().splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith(f"| {heading} |")) + 2
    return list(itertools.takewhile(lambda line: line.startswith("|"), lines[begin:]))


def as_table(rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """As the docs have it: a section is said once."""
    lines, said = [], ""
    for section, *rest in rows:
        lines.append(f"| {' | '.join(['' if section == said else section, *rest])} |")
        said = section
    return lines
