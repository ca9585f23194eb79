"""Spark's own examples, from the PySpark package, as `stillframe run --unchanged` runs them.

`tests/cli/test_unchanged.py` has those that are run by the command itself. Here one session runs
the others, by the same two calls.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest
from pyspark.errors import AnalysisException
from waiting import wait_until

import stillframe
from stillframe.cli.jobs import run_as_main
from stillframe.errors import BuildError
from stillframe.spark.streams import Streams

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

EXAMPLES = Path(pyspark.__file__).parent / "examples/src/main/python/sql/streaming"
WAIT_SECONDS_MAX = 120.0


@pytest.fixture
def unchanged(spark: SparkSession) -> Iterator[None]:
    stillframe.everywhere(spark)
    yield
    stillframe.nowhere()


@pytest.mark.parametrize(
    ("example", "also", "word", "count"),
    [
        ("structured_network_wordcount_windowed.py", ["36000"], 1, 2),
        # It tells of a word when that has not come for ten seconds.
        ("structured_network_wordcount_session_window.py", [], 0, 1),
    ],
)
def test_words_of_a_socket_are_counted(
    unchanged: None,
    capsys: pytest.CaptureFixture[str],
    example: str,
    also: list[str],
    word: int,
    count: int,
) -> None:
    counts: dict[str, int] = {}

    def are_there() -> bool:
        for line in capsys.readouterr().out.splitlines():
            cells = [each.strip() for each in line.strip().strip("|").split("|")]
            if line.startswith("|") and cells[count].isdigit():
                counts[cells[word]] = int(cells[count])
        return len(counts) == 4 and sum(counts.values()) == 6

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_SECONDS_MAX)
        asked = ["127.0.0.1", str(server.getsockname()[1]), *also]
        program = threading.Thread(target=run_as_main, args=(EXAMPLES / example, asked))
        program.start()
        try:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"to be or not\nto be\n")
                wait_until(are_there)
        finally:
            for query in Streams().active:
                query.stop()
            program.join(WAIT_SECONDS_MAX)
    assert counts == {"to": 2, "be": 2, "or": 1, "not": 1}
    assert not program.is_alive()


def test_the_example_of_sessions_is_refused_by_spark_and_here_in_the_same_words(
    spark: SparkSession,
) -> None:
    example, asked = EXAMPLES / "structured_sessionization.py", ["127.0.0.1", "9"]
    with pytest.raises(AnalysisException) as by_spark:
        run_as_main(example, asked)
    stillframe.everywhere(spark)
    try:
        with pytest.raises(BuildError) as here:
            run_as_main(example, asked)
    finally:
        stillframe.nowhere()
    assert first_sentences(here.value) == first_sentences(by_spark.value)
    assert "session window" in first_sentences(here.value)


def first_sentences(error: BaseException) -> str:
    return str(error).splitlines()[0].split(". SQLSTATE")[0].split("; ")[0].rstrip(".")
