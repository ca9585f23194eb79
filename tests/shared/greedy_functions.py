"""A function that takes all the memory it can get, in a cgroup of its own with little of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from stillframe.testing.sources import Gate


@dataclass(frozen=True, slots=True)
class GreedyAt:
    """Passes batches on; at one value of `id` it takes memory until it is killed, once."""

    value: int
    cgroup: str
    gate: Gate

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if self.value in batch.column("id").to_pylist() and not self.gate.is_open:
                self.gate.open()
                (Path(self.cgroup) / "cgroup.procs").write_text(str(os.getpid()))
                taken = []
                while True:
                    taken.append(bytearray(10_000_000))
            yield batch
