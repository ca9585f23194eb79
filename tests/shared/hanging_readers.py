"""A source whose blocking reader hangs in the middle, once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from stillframe import BlockingReader, Source, SourceContext, Split
from stillframe.testing.sources import Gate

SCHEMA = pa.schema([("id", pa.int64()), ("app_id", pa.string())])


@dataclass(frozen=True)
class HangingLog(Source):
    records: int
    reached: Gate
    """Opened by the one that hangs; whoever finds it open does not."""
    let_go: Gate
    takes_splits: bool

    @property
    def schema(self) -> pa.Schema:
        return SCHEMA

    def splits(self, parallelism: int) -> list[Split]:
        return [Split("log", {"next": 0})]

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return HangingReader(self, splits)

    def describe(self) -> str:
        return "hanging log"


class HangingReader(BlockingReader):
    def __init__(self, source: HangingLog, splits: Sequence[Split]) -> None:
        self.takes_splits = source.takes_splits
        self._source = source
        self._splits = splits

    def read(self) -> Iterator:
        for split in self._splits:
            for number in range(split.position["next"], self._source.records):
                if number == self._source.records // 2 and not self._source.reached.is_open:
                    self._source.reached.open()
                    self._source.let_go.await_open(1_000)
                batch = pa.record_batch([[number], [f"app-{number % 17}"]], schema=SCHEMA)
                yield Split(split.id, {"next": number + 1}), batch

    def close(self) -> None:
        pass
