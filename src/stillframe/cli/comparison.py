"""The demo's proof: what the page-view job left behind, compared with a recount by Spark SQL.

Three questions, each answered from files and not from what the job says of itself:

1. Are the clicks that passed through the same multiset of rows as the input? The input is made
   again by Spark, in other pieces and another order than the job read it.
2. Is the last count of each app what Spark counts in the input, and did the count of each app only
   ever grow from one row of the output to the next?
3. Does the last checkpoint's state hold the same counts?
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from stillframe.clock import SystemClock
from stillframe.connectors.generate import ClickSource, clicks_table
from stillframe.coordinator.job_log import JobLog
from stillframe.coordinator.snapshots import Snapshots
from stillframe.errors import StorageError
from stillframe.runtime.restoring import read_file
from stillframe.spark.session import Still
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.paths import job_directory
from stillframe.storage.store import open_store

_CHUNK_ROWS = 100_000
_CLICKS = "id bigint, app_id string, user_id bigint, at timestamp"
_COUNTS_FILE = "-([0-9]+)-[0-9]+-[0-9]+-[0-9a-f]+-[0-9]+[.]parquet$"
"""Checkpoint, subtask, attempt, a token and a number at the end of a file's name."""
_SHOWN_MAX = 5
"""How many examples of one kind of difference are told."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How the clicks of the output differ from those of the input."""

    lost: int
    duplicated: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    records: int
    """Of the input, as Spark counts them."""
    apps: int
    lost: int
    duplicated: int
    differences: tuple[str, ...]
    """One sentence each; none: the output is exact."""

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.duplicated or self.differences)


def compare(still: Still, source: ClickSource, output: Path, job: str) -> Comparison:
    """Compare all that the job wrote below `output` with the input it was given."""
    expected = recount(still, source)
    clicks = compare_clicks(still, source, output / "clicks")
    last, shrinking = read_counts(still, output / "counts")
    differences = [
        *clicks.examples,
        *compare_counts(expected, last, "the last count written"),
        *shrinking,
        *_compare_state(expected, output / "checkpoints", job),
    ]
    records = sum(expected.values())
    if records != source.records:
        differences.append(f"Spark counts {records} records in an input of {source.records}")
    return Comparison(records, len(expected), clicks.lost, clicks.duplicated, tuple(differences))


def recount(still: Still, source: ClickSource) -> dict[str, int]:
    """How often each app was clicked, counted by Spark."""
    _see_input(still, source)
    rows = still.spark.sql("SELECT app_id, count(*) AS views FROM demo_input GROUP BY app_id")
    return {row["app_id"]: row["views"] for row in rows.collect()}


def compare_clicks(still: Still, source: ClickSource, path: Path) -> Difference:
    """Input and output as multisets of whole rows: an altered click is one lost and one extra."""
    _see_input(still, source)
    _read_files(still, path, _CLICKS).createOrReplaceTempView("demo_output")
    still.spark.sql(
        """
        SELECT id, app_id, user_id, at, sum(n) AS surplus
        FROM (SELECT *, -1 AS n FROM demo_input UNION ALL SELECT *, 1 AS n FROM demo_output)
        GROUP BY id, app_id, user_id, at
        HAVING sum(n) <> 0
        """
    ).createOrReplaceTempView("demo_difference")
    found = still.spark.sql(
        f"""
        SELECT id, app_id, user_id, at, surplus,
          sum(greatest(-surplus, 0)) OVER () AS lost,
          sum(greatest(surplus, 0)) OVER () AS duplicated
        FROM demo_difference ORDER BY id, surplus LIMIT {_SHOWN_MAX}
        """
    ).collect()
    if not found:
        return Difference(0, 0, ())
    examples = tuple(_describe_click(row.asDict()) for row in found)
    return Difference(found[0]["lost"], found[0]["duplicated"], examples)


def _describe_click(row: Mapping[str, Any]) -> str:
    surplus = row["surplus"]
    what = "is missing in the output" if surplus < 0 else "is too much in the output"
    often = "" if abs(surplus) == 1 else f", {abs(surplus)} times"
    return f"click {row['id']} ({row['app_id']}, user {row['user_id']}, {row['at']}) {what}{often}"


def read_counts(still: Still, path: Path) -> tuple[dict[str, int], list[str]]:
    """The last count of each app, and where a count did not grow.

    A file's rows are in the order in which they were emitted, and of one checkpoint all counts of
    an app are in one file, because they come from one subtask.
    """
    _read_files(still, path, "app_id string, count bigint").selectExpr(
        "app_id",
        "count",
        "_metadata.row_index AS row_index",
        f"CAST(regexp_extract(_metadata.file_name, '{_COUNTS_FILE}', 1) AS BIGINT) AS checkpoint",
    ).createOrReplaceTempView("demo_counts")
    still.spark.sql(
        """
        SELECT *,
          lag(count) OVER (PARTITION BY app_id ORDER BY checkpoint, row_index) AS before,
          lead(count) OVER (PARTITION BY app_id ORDER BY checkpoint, row_index) IS NULL AS is_last
        FROM demo_counts
        """
    ).createOrReplaceTempView("demo_steps")
    steps = still.spark.sql(
        "SELECT * FROM demo_steps WHERE is_last OR count <= before ORDER BY checkpoint, row_index"
    ).collect()
    last = {row["app_id"]: row["count"] for row in steps if row["is_last"]}
    shrinking = [
        f"{row['app_id']} is written as {row['count']} in checkpoint {row['checkpoint']} after"
        f" {row['before']}"
        for row in steps
        if row["before"] is not None and row["count"] <= row["before"]
    ]
    return last, _shortened(shrinking)


def compare_counts(expected: Mapping[str, int], found: Mapping[str, int], what: str) -> list[str]:
    wrong = [
        f"{what} for {app} is {found.get(app, 'missing')} where Spark counts"
        f" {expected.get(app, 'none')}"
        for app in sorted({*expected, *found})
        if expected.get(app) != found.get(app)
    ]
    return _shortened(wrong)


def read_state(location: Path, job: str) -> dict[str, int]:
    """The counts in the newest completed checkpoint, read from its files alone."""
    store = open_store(str(location)).below(job_directory(job))
    record = JobLog(store, job, SystemClock()).read()
    if record is None or record.newest is None:
        raise StorageError(f"job {job!r} has no completed checkpoint in {location}")
    manifest = Snapshots(store).read_manifest(record.newest)
    counts: dict[str, int] = {}
    for snapshot in manifest.snapshots:
        for state in snapshot.keyed:
            data = read_file(store, state.file)
            batches = read_keyed_snapshot(data, state.key_groups, range(manifest.max_parallelism))
            for app, count in _pairs(batches):
                if app in counts:
                    raise StorageError(f"{app} is in two places of checkpoint state")
                counts[app] = count
    return counts


def _pairs(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[str, int]]:
    """The key is the first column and the count the last."""
    for batch in batches:
        yield from zip(batch.column(0).to_pylist(), batch.columns[-1].to_pylist(), strict=True)


def _compare_state(expected: Mapping[str, int], location: Path, job: str) -> list[str]:
    try:
        found = read_state(location, job)
    except StorageError as error:
        return [str(error)]
    return compare_counts(expected, found, "the count in the last checkpoint")


def _see_input(still: Still, source: ClickSource) -> None:
    """The input as Spark makes it: chunk by chunk, each wherever Spark likes to."""
    assert source.records is not None, "only a bounded input can be recounted"
    chunks_per_partition = -(-source.records // (source.partitions * _CHUNK_ROWS)) or 1
    chunks = still.spark.range(chunks_per_partition * source.partitions)
    frame = chunks.mapInArrow(partial(_make_chunks, source), _CLICKS)
    frame.createOrReplaceTempView("demo_input")


def _make_chunks(
    source: ClickSource, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Runs on executors: the clicks of each chunk number."""
    assert source.records is not None
    for batch in batches:
        for number in batch.column(0).to_pylist():
            chunk, partition = divmod(number, source.partitions)
            rows = max(0, -((partition - source.records) // source.partitions))
            start, stop = chunk * _CHUNK_ROWS, min((chunk + 1) * _CHUNK_ROWS, rows)
            if start < stop:
                yield clicks_table(source, partition, start, stop)


def _read_files(still: Still, path: Path, schema: str) -> Any:
    # A job without records leaves no directory, and Spark would refuse to read nothing.
    path.mkdir(parents=True, exist_ok=True)
    return still.spark.read.schema(schema).parquet(str(path))


def _shortened(sentences: list[str]) -> list[str]:
    if len(sentences) <= _SHOWN_MAX:
        return sentences
    return [*sentences[:_SHOWN_MAX], f"… and {len(sentences) - _SHOWN_MAX} more of this kind"]
