"""Spark's own examples, from the PySpark package, as they are."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.slow]

EXAMPLES = "examples/src/main/python/sql/streaming"
WAIT_SECONDS_MAX = 120


def started(example, directory, *arguments):
    import pyspark

    script = Path(pyspark.__file__).parent / EXAMPLES / example
    command = ["-m", "stillframe.cli.main", "run", "--unchanged", str(script), "--quiet"]
    return subprocess.Popen(
        [sys.executable, *command, "--", *arguments],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def test_spark_s_word_count_of_a_socket_runs_unchanged(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_SECONDS_MAX)
        port = server.getsockname()[1]
        process = started("structured_network_wordcount.py", tmp_path, "127.0.0.1", str(port))
        try:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"to be or not\nto be\n")
                assert process.stdout is not None
                counts: dict[str, int] = {}
                for line in process.stdout:
                    cells = [each.strip() for each in line.strip().strip("|").split("|")]
                    if line.startswith("|") and cells[1].isdigit():
                        counts[cells[0]] = int(cells[1])
                    if counts == {"to": 2, "be": 2, "or": 1, "not": 1}:
                        break
                process.send_signal(signal.SIGINT)
                process.communicate(timeout=WAIT_SECONDS_MAX)
        finally:
            process.kill()
    assert counts == {"to": 2, "be": 2, "or": 1, "not": 1}
    assert process.returncode == 130


def test_spark_s_data_source_with_admission_control_runs_unchanged(tmp_path):
    process = started("structured_blockchain_admission_control.py", tmp_path)
    try:
        assert process.stdout is not None
        cells = ([each.strip() for each in line.split("|")] for line in process.stdout)
        blocks = [row[1] for row in itertools.islice((row for row in cells if len(row) == 6), 4)]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_SECONDS_MAX)
    finally:
        process.kill()
    assert blocks == ["block_number", "0", "1", "2"]
    assert process.returncode == 130


@pytest.mark.kafka
def test_spark_s_word_count_of_kafka_runs_unchanged_and_without_its_jar(tmp_path, kafka):
    topic, is_over = kafka.topic(1), threading.Event()

    def send() -> None:
        """It begins with what comes after its start, whenever that is."""
        while not is_over.wait(0.5):
            kafka.send(topic, [b"to be"])

    process = started("structured_kafka_wordcount.py", tmp_path, kafka.address, "subscribe", topic)
    sending = threading.Thread(target=send)
    sending.start()
    try:
        assert process.stdout is not None
        cells = ([each.strip() for each in line.split("|")] for line in process.stdout)
        rows = (row[1] for row in cells if len(row) == 4 and row[2].isdigit())
        words = set(itertools.islice(rows, 2))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=WAIT_SECONDS_MAX)
    finally:
        is_over.set()
        sending.join()
        process.kill()
    assert words == {"to", "be"}
    assert process.returncode == 130


SEVERAL = """
import sys
from pyspark.sql import SparkSession
from pyspark.sql.functions import col

spark = SparkSession.builder.master("local[2]").appName("several").getOrCreate()
rows = spark.readStream.schema("n long").json(sys.argv[1])
seen = {}


def note(frame, epoch):
    seen["sum"] = seen.get("sum", 0) + (frame.agg({"n": "sum"}).first()[0] or 0)


queries = [
    rows.where(col("n") % 3 == place).writeStream.format("memory").queryName(f"q{place}").start()
    for place in range(3)
]
queries.append(rows.writeStream.foreachBatch(note).option("header", True).start())
for query in queries:
    query.processAllAvailable()
print([spark.table(f"q{place}").count() for place in range(3)], seen, flush=True)
print(len(spark.streams.active), spark.sparkContext.defaultParallelism, flush=True)
for query in queries:
    query.stop()
"""


def test_a_program_with_several_queries_has_room_for_them_on_two_local_cores(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.json").write_text("".join(f'{{"n": {n}}}\n' for n in range(90)))
    (tmp_path / "several.py").write_text(SEVERAL)
    command = ["-m", "stillframe.cli.main", "run", "--unchanged", "several.py", "--quiet"]
    done = subprocess.run(
        [sys.executable, *command, "--", str(tmp_path / "rows")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS_MAX,
    )
    assert done.stdout.splitlines() == ["[30, 30, 30] {'sum': 4005}", "4 2"], done.stderr
