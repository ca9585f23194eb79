"""A Java for the tests whose JVMs start in half of the processor time; `make test` makes it once.

Most of what a short JVM of Spark does is to read, to check and to link its classes, thousands of
them, and tests start some hundred such JVMs: of drivers, and beside slots. Java can keep classes in
an archive, ready to use. There is one for each of Spark's two class paths, because an archive is
for the class path with which it was made. A JVM that it does not fit starts as without it.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_KEEPS_ITS_CLASSES = """\
#!/bin/sh
case "$*" in
*py4j.GatewayServer*) archive={beside} ;;
*org.apache.spark.deploy.SparkSubmit*)
  case "$*" in *org.apache.spark.launcher.Main*) exec {java} "$@" ;; esac
  archive={driver} ;;
*) exec {java} "$@" ;;
esac
exec {java} -XX:TieredStopAtLevel=1 -XX:ArchiveClassesAtExit="$archive" -Xlog:disable "$@"
"""
_IS_QUICK = """\
#!/bin/sh
# Written by tests/shared/quick_java.py.
case "$*" in
*py4j.GatewayServer* | *org.apache.spark.launcher.Main*) archive={beside} ;;
*org.apache.spark.deploy.* | *org.apache.spark.executor.*) archive={driver} ;;
*) exec {java} "$@" ;;
esac
exec {java} -XX:TieredStopAtLevel=1 -XX:SharedArchiveFile="$archive" -Xlog:disable "$@"
"""


def use(environ: MutableMapping[str, str]) -> None:
    """Where it has been made, for all processes of this environment."""
    home = Path(sys.prefix) / "quick-java"
    if (home / "bin" / "java").exists():
        environ["JAVA_HOME"] = str(home)


def make(home: Path) -> None:
    """At `home`, which is a JAVA_HOME then: by a run of a program that uses much of what tests use,
    as each JVM can keep its classes when it ends."""
    from stillframe.spark.deployment.java import ensure_java

    names = {"java": ensure_java(), "driver": home / "driver.jsa", "beside": home / "beside.jsa"}
    home.mkdir(exist_ok=True)
    for archive in home.glob("*.jsa"):
        archive.unlink()
    with tempfile.TemporaryDirectory() as place:
        _write_java(Path(place), _KEEPS_ITS_CLASSES, names)
        os.environ["JAVA_HOME"] = place
        _run(Path(place))
    _write_java(home, _IS_QUICK, names)


def _write_java(home: Path, script: str, names: Mapping[str, Path]) -> None:
    java = home / "bin" / "java"
    java.parent.mkdir(exist_ok=True)
    java.write_text(script.format(**{key: shlex.quote(str(name)) for key, name in names.items()}))
    java.chmod(0o755)


def _run(place: Path) -> None:
    os.environ["SPARK_SUBMIT_OPTS"] = "-XX:+UseSerialGC"
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(place / "warehouse"))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    _use_the_driver(spark, place)
    _use_what_is_beside_a_slot(spark)
    gateway: Any = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()  # then it ends
    gateway.proc.wait()


def _use_the_driver(spark: SparkSession, place: Path) -> None:
    """Plans and expressions, Parquet and JSON, Python's workers, micro-batches, a job of ours."""
    import pyarrow as pa

    import stillframe

    words = spark.createDataFrame(pa.table({"id": [1, 2, 3], "word": ["a b", "b", None]}))
    words.write.parquet(str(place / "words"))
    words.write.json(str(place / "lines"))
    read = spark.read.parquet(str(place / "words"))
    read.createOrReplaceTempView("words")
    counted = spark.sql(
        "SELECT each, count(*) AS n, max(id) AS m, struct(sum(id)) AS s FROM (SELECT id, explode("
        "split(upper(word), ' ')) AS each FROM words WHERE id > 0) GROUP BY each"
    )
    counted.join(read, counted.m == read.id, "left").orderBy("each").collect()
    lines = spark.readStream.schema(read.schema).json(str(place / "lines"))
    counts = lines.groupBy("word").count()
    ours: Any = stillframe.on(spark).writeStream(counts)
    for name, made in ("theirs", counts.writeStream), ("ours", ours):
        writer = made.outputMode("complete").format("memory").queryName(name)
        writer = writer.option("checkpointLocation", str(place / name)).trigger(availableNow=True)
        writer.start().awaitTermination()


def _use_what_is_beside_a_slot(spark: SparkSession) -> None:
    import pyarrow as pa
    from py4j.protocol import Py4JError

    from stillframe.evaluator.beside import Evaluator
    from stillframe.graph.expressions import SparkResult
    from stillframe.runtime.expressions import project
    from stillframe.spark.deployment.entry import spark_here
    from stillframe.spark.expressions.evaluated import columns_in_two

    words = spark.createDataFrame([("a b",)], "word string")
    columns = columns_in_two(
        words.selectExpr("soundex(initcap(word)) AS s", "sequence(length(reverse(word)), 9) AS t")
    )
    results = [each.expression for each in columns if isinstance(each.expression, SparkResult)]
    wanted = [result.projection for result in results]
    evaluator = Evaluator(spark_here(), wanted, 1 << 28)
    batch = pa.record_batch({"word": ["a b"]})
    project(columns, batch, pa.schema([(c.name, c.expression.type) for c in columns]), evaluator)
    with suppress(Py4JError):  # it cannot answer any more
        evaluator._process.connect().jvm.java.lang.System.exit(0)
    evaluator._process._process.wait()
    evaluator.close()


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
