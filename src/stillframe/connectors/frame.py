"""The rows of a bounded Spark DataFrame, handed to each slot by Spark itself.

Spark evaluates partition p of the DataFrame in the task that is slot p and feeds its rows to the
slot, so the source only counts. A position is a number of rows, which is worth something only
while the DataFrame's plan gives the same rows in the same order each time; the fingerprint that
travels with it says which plan that was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from stillframe.api.sources import BlockingReader, Source, SourceContext, Split
from stillframe.errors import DataError
from stillframe.json_values import JsonObject


@dataclass(frozen=True, init=False)
class FrameSource(Source):
    """A DataFrame's partitions, one to each slot."""

    partitions: int
    fingerprint: str
    """Of the DataFrame's plan: equal for equal rows in equal order."""
    description: str
    _schema: pa.Schema

    def __init__(
        self, schema: pa.Schema, partitions: int, fingerprint: str, description: str
    ) -> None:
        object.__setattr__(self, "partitions", partitions)
        object.__setattr__(self, "fingerprint", fingerprint)
        object.__setattr__(self, "description", description)
        object.__setattr__(self, "_schema", schema)

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def splits(self, parallelism: int) -> list[Split]:
        position: JsonObject = {"rows": 0, "fingerprint": self.fingerprint}
        return [Split(_split_id(p), position) for p in range(self.partitions)]

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        """Which split a slot reads is not free: Spark feeds it the rows of that partition only."""
        own = [_split_id(context.subtask)] if context.subtask < self.partitions else []
        given = [split.id for split in splits]
        assert given == own, f"slot {context.subtask} must read {own}, was given {given}"
        for split in splits:
            self._refuse_other_frame(split)
        return _FeedReader(self._schema, splits, context.feed)

    def _refuse_other_frame(self, split: Split) -> None:
        seen = split.position["fingerprint"]
        if seen != self.fingerprint:
            raise DataError(
                f"the DataFrame {self.description} is another one than the checkpoint was made"
                f" with (fingerprint {self.fingerprint}, in the checkpoint {seen}): give the job"
                " the same DataFrame again, or start it without the checkpoint"
            )

    def describe(self) -> str:
        return self.description


class _FeedReader(BlockingReader):
    def __init__(
        self,
        schema: pa.Schema,
        splits: Sequence[Split],
        feed: Iterator[pa.RecordBatch] | None,
    ) -> None:
        assert feed is not None or not splits, "Spark feeds no rows to this slot"
        self._schema = schema
        self._splits = splits
        self._feed = feed

    def read(self) -> Iterator[tuple[Split, pa.RecordBatch]]:
        for split in self._splits:
            yield from self._read_split(split)

    def _read_split(self, split: Split) -> Iterator[tuple[Split, pa.RecordBatch]]:
        assert self._feed is not None
        done = split.position["rows"]
        assert isinstance(done, int), f"rows of split {split.id} is {done!r}"
        seen = 0
        for batch in self._feed:
            unread = batch.slice(min(batch.num_rows, max(0, done - seen)))
            seen += batch.num_rows
            if unread.num_rows:
                yield Split(split.id, {**split.position, "rows": seen}), self._fitted(unread)
        if seen < done:
            raise DataError(
                f"{split.id} of the DataFrame gave {seen} rows, but the checkpoint had already"
                f" read {done}: its plan does not give the same rows each time; write it to"
                " files once and read those"
            )

    def _fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Spark's batches say less than its schema about what may be null, and have only the
        columns that are read."""
        if batch.schema.equals(self._schema):
            return batch
        if batch.schema.names != self._schema.names:
            self._schema = pa.schema([self._schema.field(name) for name in batch.schema.names])
        return batch.cast(self._schema)

    def close(self) -> None:
        self._feed = None


def _split_id(partition: int) -> str:
    return f"partition-{partition:05d}"
