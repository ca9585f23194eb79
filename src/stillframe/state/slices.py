"""Rows on their way into a snapshot: columns of values are made slice by slice, all else at once.

Theory of operation
-------------------
A snapshot is written beside a slot's loop, and both need Python's lock. Values become columns in
calls that hold it from their beginning to their end, so they are made of a slice at a time: within
a millisecond. The objects of a slice are gone before those of the next are made, in the same
memory; fresh memory for all rows of a batch costs more than what is done in it (measured: rows of
1 KB are decoded in 0.3 µs this way, and in 1 µs the other way).

Nor should a slice be small. Calls into Arrow or numpy give the lock away, and a busy loop gives it
back only when its turn is over, half a millisecond later. So what is not needed to let go of the
objects, key columns above all, waits for the batch.

Batches are bounded in rows and bytes: nobody holds more of a state than that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

SLICE_ENTRIES_MAX = 1024
SLICE_BYTES_MAX = 1 << 20
BATCH_ROWS_MAX = 1 << 16
BATCH_BYTES_MAX = 16 << 20
_FIRST_ENTRIES = 32
"""So many are tried while nobody knows how large they are."""


class Slice(NamedTuple):
    """Some keys and their rows, one key after the other."""

    keys: Sequence[Any]
    """As whoever keeps the state calls them."""
    counts: Sequence[int]
    """How many rows each of the keys has."""
    values: pa.Array
    expires: Sequence[int | None] = ()
    """When each row does, where rows expire."""
    user_keys: pa.Array | None = None
    """Of each row, where they are known already."""
    keys_bytes: int = 0
    """What the keys occupy, roughly, if not next to nothing."""

    @property
    def size_bytes(self) -> int:
        user_keys_bytes = 0 if self.user_keys is None else self.user_keys.nbytes
        return int(self.values.nbytes + user_keys_bytes + self.keys_bytes)


class Pace:
    """How many entries make a slice, as those before them did; where their sizes are not known."""

    def __init__(self) -> None:
        self.entries = _FIRST_ENTRIES

    def saw(self, made: Slice) -> None:
        """What was made of so many entries."""
        rows, size_bytes = len(made.values), made.size_bytes
        fullness = max(rows / SLICE_ENTRIES_MAX, size_bytes / SLICE_BYTES_MAX, 0.25)
        self.entries = min(max(1, int(self.entries / fullness)), SLICE_ENTRIES_MAX)


def batches_of(
    slices: Iterable[Slice], batch_of: Callable[[Slice], pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """The rows in batches that are as large as they may be; none is empty."""
    found: list[Slice] = []
    rows = size_bytes = 0
    for each in slices:
        found.append(each)
        rows += len(each.values)
        size_bytes += each.size_bytes
        if rows >= BATCH_ROWS_MAX or size_bytes >= BATCH_BYTES_MAX:
            yield from _unless_empty(batch_of(_joined(found)))
            rows = size_bytes = 0
    if found:
        yield from _unless_empty(batch_of(_joined(found)))


def _unless_empty(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if batch.num_rows:
        yield batch


def _joined(found: list[Slice]) -> Slice:
    """All of them as one; the list is empty then, so that none lives as long as the batch."""
    slices, found[:] = found.copy(), []
    if len(slices) == 1:
        return slices[0]
    keys, counts, values, expires, user_keys, keys_bytes = zip(*slices, strict=True)
    return Slice(
        keys=_one_after_the_other(keys),
        counts=_one_after_the_other(counts),
        values=pa.concat_arrays(values),
        expires=_one_after_the_other(expires),
        user_keys=None if user_keys[0] is None else pa.concat_arrays(user_keys),
        keys_bytes=sum(keys_bytes),
    )


def _one_after_the_other(parts: Iterable[Sequence[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(parts))
