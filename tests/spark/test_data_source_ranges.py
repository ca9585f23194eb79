"""What a reader of a Python data source raises while its rows are taken, without a JVM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.errors import PySparkNotImplementedError
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamReader,
    InputPartition,
    SimpleDataSourceStreamReader,
)
from pyspark.sql.types import StructType

from stillframe.api.sources import Split
from stillframe.spark.formats.data_sources import PythonSource


def one(number: int) -> tuple[int]:
    return (number,) if number < 5 else next(iter(()))


class Planned(DataSourceStreamReader):
    def initialOffset(self) -> dict:
        return {"at": 0}

    def latestOffset(self) -> dict:  # type: ignore[override]
        return {"at": 10}

    def partitions(self, start: dict, end: dict) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[tuple]:
        return map(one, range(10))


class Simple(SimpleDataSourceStreamReader):
    def initialOffset(self) -> dict:
        return {"at": 0}

    def read(self, start: dict) -> tuple[Iterator[tuple], dict]:
        return map(one, range(start["at"], 10)), {"at": 10}

    def readBetweenOffsets(self, start: dict, end: dict) -> Iterator[tuple]:
        return map(one, range(start["at"], end["at"]))


class Breaks(DataSource):
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        if self.options["kind"] == "planned":
            return Planned()
        raise PySparkNotImplementedError(
            errorClass="NOT_IMPLEMENTED", messageParameters={"feature": "streamReader"}
        )

    def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:
        return Simple()


@pytest.mark.parametrize("kind", ["planned", "simple"])
@pytest.mark.parametrize("is_again", [False, True], ids=["first", "again"])
def test_a_stop_iteration_of_what_a_reader_calls_is_not_the_end_of_its_rows(
    kind: str, is_again: bool
) -> None:
    """`map` takes it for its own end: the rest of the range would be lost."""
    columns = StructType().add("number", "long")
    source = PythonSource(Breaks({"kind": kind}), "breaks", columns, (), "")
    reader: Any = source.open((), None)  # type: ignore[arg-type]
    rest: Any = {"end": {"at": 10}, "partition": 0, "rows": 2} if is_again else {}
    reader.add_splits([Split("all", {"offset": {"at": 0}, **rest})])

    with pytest.raises(RuntimeError, match="StopIteration"):
        next(reader.read())
