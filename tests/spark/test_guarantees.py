"""Spark's socket source and the guarantee of whole jobs, on Spark."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stillframe.errors import BuildError, StartRefused

if TYPE_CHECKING:
    from stillframe.spark.session import Still
    from stillframe.spark.stream import Stream

pytestmark = pytest.mark.spark


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        yield listener


@pytest.fixture
def lines(still: Still, listener: socket.socket) -> Stream:
    port = listener.getsockname()[1]
    return still.readStream.format("socket").option("host", "127.0.0.1").option("port", port).load()


def options(tmp_path: Path) -> dict[str, str]:
    return {
        "checkpointLocation": str(tmp_path / "chk"),
        "checkpointInterval": "1 hour",
        "parallelism": "2",
    }


def test_words_of_a_socket_are_counted(
    still: Still, lines: Stream, listener: socket.socket, tmp_path: Path
) -> None:
    counts = lines.groupBy("value").count()
    query = (
        counts.writeStream.queryName("words")
        .outputMode("update")
        .format("memory")
        .options(**options(tmp_path))
        .start()
    )
    connection, _ = listener.accept()
    with connection:
        connection.sendall("grün\nrot\ngrün\n".encode())
        while query.summary.records_in < 3:
            query.processAllAvailable()
        query.processAllAvailable()
        shown = {row["value"]: row["count"] for row in still.spark.table("words").collect()}
        query.stop()

    assert shown == {"grün": 2, "rot": 1}
    assert query.guarantee().word == "at-most-once"
    assert len(query.guarantee().reasons) == 2, "the socket and the table in memory"
    assert lines.schema.simpleString() == "struct<value:string>"


def test_a_schema_for_a_socket_is_refused(still: Still) -> None:
    reader = still.readStream.format("socket").schema("a string").options(host="h", port=1)

    with pytest.raises(BuildError, match="the source socket has a schema of its own"):
        reader.load()


def test_what_a_job_cannot_give_is_refused_before_anything_is_there(
    lines: Stream, tmp_path: Path
) -> None:
    writer = lines.writeStream.queryName("strict").format("parquet").options(**options(tmp_path))

    with pytest.raises(StartRefused, match=r"requireGuarantee is exactly-once.*socket 127.0.0.1"):
        writer.option("requireGuarantee", "exactly-once").start(str(tmp_path / "out"))

    assert not (tmp_path / "chk").exists()
