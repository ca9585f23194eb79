"""The Parquet files that every engine reads with its own reader: written once, and kept."""

from __future__ import annotations

import shutil
import uuid
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


def page_views(home: Path, records: int, files: int = _FILES) -> Path:
    """A directory of so many page views, in files of the same size."""
    directory = home / f"page-views-{records}-in-{files}"
    if not directory.is_dir():
        home.mkdir(parents=True, exist_ok=True)
        scratch = home / f".page-views-{uuid.uuid4().hex}"
        scratch.mkdir()
        try:
            for part in range(files):
                _write(scratch / f"part-{part:05d}.parquet", records, files, part)
            scratch.rename(directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _write(path: Path, records: int, files: int, part: int) -> None:
    source = ClickSource(records=records, partitions=files, skew=1)
    rows = len(range(part, records, files))
    with pq.ParquetWriter(path, SCHEMA) as writer:
        for start in range(0, rows, _ROW_GROUP_ROWS):
            stop = min(rows, start + _ROW_GROUP_ROWS)
            writer.write_batch(views(source, part, start, stop), _ROW_GROUP_ROWS)


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
