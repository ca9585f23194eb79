"""The files that every engine reads with its own reader: written once, and kept."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stillframe.connectors.generate import ClickSource, clicks_table

_FILES = 16
_ROW_GROUP_ROWS = 1 << 20
_READ_BYTES = 8 << 20
SCHEMA = pa.schema([("app_id", pa.string()), ("user_id", pa.int64()), ("url", pa.string())])
PRICES = pa.schema(
    [
        ("at", pa.timestamp("us", tz="UTC")),
        ("app_id", pa.string()),
        ("price", pa.decimal128(12, 2)),
    ]
)
_PRIMES = (1, 3, 7, 31, 127, 709, 5_381, 7_919)


def page_views(home: Path, records: int, files: int = _FILES) -> Path:
    """A directory of so many page views, in files of the same size."""
    return _written(home, "page-views", "parquet", records, files, _parquet_of(SCHEMA, views))


def json_lines(home: Path, records: int) -> Path:
    """Page views as lines of JSON with five fields."""
    return _written(home, "json-lines", "txt", records, _FILES, _lines_of(_as_json))


def word_lines(home: Path, records: int) -> Path:
    """Lines of words, which are the same for a number of records."""
    return _written(home, "word-lines", "txt", records, _FILES, _lines_of(_as_words))


def prices(home: Path, records: int) -> Path:
    """A hundred prices in each second, of a thousand apps."""
    return _written(home, "prices", "parquet", records, _FILES, _parquet_of(PRICES, _priced))


WRITERS = {"json_counts": json_lines, "words": word_lines, "decimals": prices, "distinct": prices}
"""Of workloads that read other files than page views."""

Rows = Callable[[ClickSource, int, int, int], pa.RecordBatch]
"""Of a source, the rows of a part from one place to another."""
Write = Callable[[Path, ClickSource, int, int], None]
"""Into a file, of a source, so many rows of a part."""


def _written(home: Path, name: str, suffix: str, records: int, files: int, write: Write) -> Path:
    directory = home / f"{name}-{records}-in-{files}"
    if not directory.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        scratch = home / f".{name}-{uuid.uuid4().hex}"
        scratch.mkdir()
        source = ClickSource(records=records, partitions=files, skew=1)
        try:
            for part in range(files):
                rows = len(range(part, records, files))
                write(scratch / f"part-{part:05d}.{suffix}", source, part, rows)
            scratch.rename(directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _batches(rows_of: Rows, source: ClickSource, part: int, rows: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, rows, _ROW_GROUP_ROWS):
        yield rows_of(source, part, start, min(rows, start + _ROW_GROUP_ROWS))


def _parquet_of(schema: pa.Schema, rows_of: Rows) -> Write:
    def write(path: Path, source: ClickSource, part: int, rows: int) -> None:
        with pq.ParquetWriter(path, schema) as writer:
            for batch in _batches(rows_of, source, part, rows):
                writer.write_batch(batch, _ROW_GROUP_ROWS)

    return write


def _lines_of(rows_of: Rows) -> Write:
    def write(path: Path, source: ClickSource, part: int, rows: int) -> None:
        with open(path, "w", encoding="utf-8") as file:
            for batch in _batches(rows_of, source, part, rows):
                file.write("\n".join(batch.column(0).to_pylist()) + "\n")

    return write


def _as_json(source: ClickSource, part: int, start: int, stop: int) -> pa.RecordBatch:
    made = views(source, part, start, stop)
    app, user, url = made.columns
    texts = ['{"app_id": "', app, '", "user_id": ', user.cast(pa.string()), ', "url": "', url]
    texts += ['", "at": ', _numbers(start, stop).cast(pa.string()), ', "referrer": "', url, '"}']
    return pa.record_batch([pc.binary_join_element_wise(*texts, "")], ["line"])


def _as_words(source: ClickSource, part: int, start: int, stop: int) -> pa.RecordBatch:
    numbers = _numbers(start, stop).to_numpy()
    words = [
        pc.binary_join_element_wise("w", pa.array(numbers * prime % 9_973).cast(pa.string()), "")
        for prime in _PRIMES
    ]
    return pa.record_batch([pc.binary_join_element_wise(*words, " ")], ["line"])


def _priced(source: ClickSource, part: int, start: int, stop: int) -> pa.RecordBatch:
    app = views(source, part, start, stop).column("app_id")
    numbers = _numbers(start, stop).to_numpy()
    at = pa.array(numbers * 10_000 + 1_700_000_000_000_000, PRICES.field("at").type)
    cents = pa.array((numbers * 7_919 % 1_000_000).astype(np.int32)).cast(pa.decimal128(10, 0))
    price = pc.multiply(cents, pa.scalar(Decimal("0.01"), pa.decimal128(3, 2)))
    return pa.RecordBatch.from_arrays([at, app, price.cast(pa.decimal128(12, 2))], schema=PRICES)


def _numbers(start: int, stop: int) -> pa.Array:
    return pa.array(np.arange(start, stop, dtype=np.int64))


def views(source: ClickSource, part: int, start: int, stop: int) -> pa.RecordBatch:
    clicks = clicks_table(source, part, start, stop, ("id", "app_id", "user_id"))
    site, user = clicks.column("app_id"), clicks.column("user_id")
    page = pa.array(clicks.column("id").to_numpy() % np.int64(1000)).cast(pa.string())
    visitor = pa.array(user.to_numpy() % np.int64(1000)).cast(pa.string())
    url = pc.binary_join_element_wise("https://", site, ".example.org/p/", page, "?u=", visitor, "")
    return pa.RecordBatch.from_arrays([site, user, url], schema=SCHEMA)


def bring_into_memory(directory: Path) -> None:
    """Read every byte once, so that the first engine does not pay for the disk."""
    for path in sorted(directory.iterdir()):
        with open(path, "rb") as file:
            while file.read(_READ_BYTES):
                pass
