"""The tables of a linked database, read without the program, in the layout all backends share.

The directory is opened anew for each look and nothing in it changes: whoever uploads its files may
do so meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from stillframe.state.disk import Disk, DiskMemory
from stillframe.state.disk_entries import row_tables
from stillframe.state.disk_layout import Layout, layout_of
from stillframe.state.disk_reductions import paged_tables
from stillframe.state.pages import page_tables

_READ_BYTES_MAX = 16 << 20


class DiskTable(Protocol):
    """One table of a database: a `FrozenRows` with a name."""

    @property
    def name(self) -> str: ...

    @property
    def snapshot_schema(self) -> pa.Schema: ...

    def batches_by_key_group(
        self, wanted: range | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of the wanted key groups, or of all, in their order; each batch is of one."""


def tables_in(directory: Path) -> list[DiskTable]:
    """The tables of the database in this directory, by name."""
    disk = Disk.open_to_read(directory, DiskMemory(_READ_BYTES_MAX))
    try:
        layout = layout_of(disk)
        if layout is None:
            return []
        if layout is Layout.ROWS:
            found: list[DiskTable] = [
                *row_tables(disk, _opened_anew),
                *paged_tables(disk, _opened_anew),
            ]
            return sorted(found, key=lambda table: table.name)
        return list(page_tables(disk, _opened_anew))
    finally:
        disk.close()


def _opened_anew(directory: Path) -> Disk:
    return Disk.open_to_read(directory, DiskMemory(_READ_BYTES_MAX))
