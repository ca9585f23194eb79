"""Python data sources as users write them for plain Spark: they know nothing of Stillframe.

What they are told they note in a file, because Spark calls them in processes of its own.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    SimpleDataSourceStreamReader,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadMaxRows, SupportsTriggerAvailableNow

COLUMNS = "number bigint, shop string"


def note(options: Any, what: str, value: Any) -> None:
    with open(options["notes"], "a") as file:
        file.write(json.dumps([what, value]) + "\n")


def notes(path: Path, what: str) -> list[Any]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [value for said, value in map(json.loads, lines) if said == what]


@dataclass
class Numbers(InputPartition):
    first: int
    end: int


class PlannedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Up to 30 rows at once, in two partitions, as far as `last`."""

    def __init__(self, options: Any) -> None:
        self.options = options

    def initialOffset(self) -> dict:
        return {"at": 0}

    def getDefaultReadLimit(self) -> ReadMaxRows:
        return ReadMaxRows(30)

    def prepareForTriggerAvailableNow(self) -> None:
        note(self.options, "prepared", True)

    def latestOffset(self, start: dict, limit: Any) -> dict:
        last = int(self.options["last"])
        return {"at": min(start["at"] + getattr(limit, "max_rows", last), last)}

    def partitions(self, start: dict, end: dict) -> list[Numbers]:
        middle = (start["at"] + end["at"]) // 2
        return [Numbers(start["at"], middle), Numbers(middle, end["at"])]

    def read(self, partition: Numbers) -> Iterator[tuple]:
        threading.Event().wait(float(self.options.get("pause", "0")))
        for number in range(partition.first, partition.end):
            yield number, f"shop {number % 3}"

    def commit(self, end: dict) -> None:
        note(self.options, "commit", end["at"])

    def stop(self) -> None:
        note(self.options, "stop", True)


class ArrowReader(PlannedReader):
    def read(self, partition: Numbers) -> Iterator[pa.RecordBatch]:
        numbers = pa.array(range(partition.first, partition.end), pa.int64())
        shops = pa.array([f"shop {number.as_py() % 3}" for number in numbers])
        yield pa.record_batch([numbers, shops], ["number", "shop"])


class FixedReader(DataSourceStreamReader):
    """With the older form of `latestOffset`, which knows no limits; its rows have names."""

    def __init__(self, options: Any) -> None:
        self.options = options

    def initialOffset(self) -> dict:
        return {"at": 0}

    def latestOffset(self) -> dict:  # type: ignore[override]
        return {"at": int(self.options["last"])}

    def partitions(self, start: dict, end: dict) -> list[Numbers]:
        return [Numbers(start["at"], end["at"])]

    def read(self, partition: Numbers) -> Iterator[Row]:
        for number in range(partition.first, partition.end):
            yield Row(shop=f"shop {number % 3}", number=number)


class SimpleReader(SimpleDataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Any) -> None:
        self.options = options

    def initialOffset(self) -> dict:
        return {"at": 0}

    def prepareForTriggerAvailableNow(self) -> None:
        note(self.options, "prepared", True)

    def read(self, start: dict) -> tuple[Iterator[tuple], dict]:
        end = {"at": min(start["at"] + 30, int(self.options["last"]))}
        return self.readBetweenOffsets(start, end), end

    def readBetweenOffsets(self, start: dict, end: dict) -> Iterator[tuple]:
        rows = [(number, f"shop {number % 3}") for number in range(start["at"], end["at"])]
        return iter(rows)

    def commit(self, end: dict) -> None:
        note(self.options, "commit", end["at"])


class StandingReader(SimpleReader):
    """Gives rows and stays where it is."""

    def read(self, start: dict) -> tuple[Iterator[tuple], dict]:
        return iter([(1, "shop 1")]), start


class Shops(DataSource):
    """One for all kinds of readers."""

    @classmethod
    def name(cls) -> str:
        return "shops"

    def schema(self) -> str:
        return COLUMNS

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        kinds = {"planned": PlannedReader, "arrow": ArrowReader, "fixed": FixedReader}
        kind = kinds.get(self.options["kind"])
        return super().streamReader(schema) if kind is None else kind(self.options)

    def simpleStreamReader(self, schema: Any) -> SimpleDataSourceStreamReader:
        kinds = {"simple": SimpleReader, "standing": StandingReader}
        kind = kinds.get(self.options["kind"])
        return super().simpleStreamReader(schema) if kind is None else kind(self.options)


@dataclass
class Shelved(WriterCommitMessage):
    """Where the rows of one task are, until they are published."""

    file: str
    rows: int


class ShelfWriter(DataSourceStreamWriter):
    """Writes files aside, and publishes them with the batch: exact, whatever comes twice."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.place = Path(options["path"])

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return self.shelved([(row.number, row.shop) for row in iterator])

    def shelved(self, rows: list[Any]) -> WriterCommitMessage:
        file = f"{uuid.uuid4()}.json"
        (self.place / "aside").mkdir(parents=True, exist_ok=True)
        (self.place / "aside" / file).write_text(json.dumps(rows))
        return Shelved(file, len(rows))

    def commit(self, messages: list[Any], batchId: int) -> None:
        note(self.options, "batch", [batchId, sum(each.rows for each in messages)])
        for each in messages:
            if (self.place / "aside" / each.file).exists():
                os.rename(self.place / "aside" / each.file, self.place / each.file)

    def abort(self, messages: list[Any], batchId: int) -> None:
        note(self.options, "abort", batchId)
        for each in messages:
            (self.place / "aside" / each.file).unlink()


class ArrowShelfWriter(ShelfWriter, DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        rows = [tuple(row.values()) for batch in iterator for row in batch.to_pylist()]
        return self.shelved(rows)


class Talkative(WriterCommitMessage):
    """No dataclass, and it holds what JSON cannot."""

    def __init__(self) -> None:
        self.when = {1, 2}
        self.rows = 0


class TalkativeWriter(ShelfWriter):
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        list(iterator)
        return Talkative()

    def commit(self, messages: list[Any], batchId: int) -> None:
        note(self.options, "batch", [sorted(each.when) for each in messages])


class Shelf(DataSource):
    @classmethod
    def name(cls) -> str:
        return "shelf"

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        kinds = {"rows": ShelfWriter, "arrow": ArrowShelfWriter, "talkative": TalkativeWriter}
        return kinds[self.options["kind"]](self.options)


def on_the_shelf(place: Path) -> list[Any]:
    """The rows that are published."""
    return sorted(row for file in place.glob("*.json") for row in json.loads(file.read_text()))


class NotingRows:
    """For `foreach`."""

    def __init__(self, path: str) -> None:
        self.options = {"notes": path}

    def open(self, partition_id: int, epoch_id: int) -> bool:
        self.at = [partition_id, epoch_id]
        note(self.options, "open", self.at)
        return True

    def process(self, row: Any) -> None:
        note(self.options, "process", [*self.at, row["number"]])

    def close(self, error: Exception | None) -> None:
        note(self.options, "close", [*self.at, error and str(error)])
