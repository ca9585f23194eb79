"""Functions of a job that hang once, at one record; for `mapInArrow` and `map_rows`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from stillframe.testing.sources import Gate

LONG_SECONDS = 1_000


def sleep_for_long(value: int) -> None:
    """Lets other threads of the interpreter run."""
    time.sleep(LONG_SECONDS)


def match_for_long(value: int) -> None:
    """Lets no other thread of the interpreter run."""
    re.match(r"(a+)+$", "a" * 60 + "b")


@dataclass(frozen=True, slots=True)
class HangingAt:
    """Passes batches on; hangs at one value of `id` unless the gate is open, which it opens."""

    value: int
    gate: Gate
    hang: Callable[[int], None] = sleep_for_long

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if self.value in batch.column("id").to_pylist() and not self.gate.is_open:
                self.gate.open()
                self.hang(self.value)
            yield batch

    def row(self, row: Any) -> Any:
        if row.id == self.value and not self.gate.is_open:
            self.gate.open()
            self.hang(self.value)
        return row
