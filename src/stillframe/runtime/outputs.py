"""Where a task's records go: one edge, its channels, and which record takes which of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from stillframe.graph.plan import Broadcast, Edge, HashBy
from stillframe.ids import CheckpointId, SubtaskIndex
from stillframe.key_groups import hash_columns, key_groups_of, subtask_of_key_group
from stillframe.runtime.channels import OutputChannel
from stillframe.runtime.elements import Barrier, Marker, Watermark
from stillframe.state.known_keys import KnownKeys, Numbers
from stillframe.state.partials import is_partial


class Combiner(Protocol):
    """Makes of a batch what the receiver needs of it, with the keys as its first columns."""

    def combine(self, batch: pa.RecordBatch) -> pa.RecordBatch: ...

    def on_watermark(self, time_us: int) -> None:
        """The receiver knows, before the next batch, that event time has come this far here."""


class EdgeOutput:
    """The channels of one edge from one subtask, one per subtask of the task it leads to."""

    def __init__(
        self,
        edge: Edge,
        source: SubtaskIndex,
        channels: Sequence[OutputChannel],
        max_parallelism: int,
        combiner: Combiner | None = None,
    ) -> None:
        self.edge = edge
        self._targets = edge.targets_of(source)
        assert len(channels) == len(self._targets)
        self._channels = channels
        self._max_parallelism = max_parallelism
        self._combiner = combiner
        self._turn = 0
        # 16 bits, because such numbers are sorted by radix.
        narrow = np.uint16 if len(channels) <= 1 << 16 else np.int64
        groups = np.arange(max_parallelism)
        self._channel_of_group = subtask_of_key_group(
            groups, len(channels), max_parallelism
        ).astype(narrow)
        self._known = KnownKeys(self._targets_of)

    def sent(self) -> tuple[int, int]:
        rows = sum(channel.rows_sent for channel in self._channels)
        return rows, sum(channel.bytes_sent for channel in self._channels)

    def has_room(self) -> bool:
        return all(channel.has_room() for channel in self._channels)

    def send(self, batch: pa.RecordBatch) -> None:
        if self._combiner is not None:
            # One channel or many: the receiver has less to do.
            batch = self._combiner.combine(batch)
        if len(self._channels) == 1:
            self._channels[0].send(batch)
            return
        match self.edge.partitioning:
            case HashBy(keys):
                self._send_by_key(batch, key_columns(batch, keys))
            case Broadcast():
                for channel in self._channels:
                    channel.send(batch)
            case _:
                self._channels[self._turn].send(batch)
                self._turn = (self._turn + 1) % len(self._channels)

    def broadcast(self, marker: Marker) -> None:
        if self._combiner is not None and isinstance(marker, Watermark):
            self._combiner.on_watermark(marker.time_us)
        for channel in self._channels:
            channel.send(marker)

    def send_to(self, place: int, marker: Marker) -> None:
        """To one channel alone."""
        self._channels[place % len(self._channels)].send(marker)

    def overtake(self, barrier: Barrier) -> Iterator[tuple[SubtaskIndex, list[pa.RecordBatch]]]:
        """Send the barrier ahead of all that has not left; what it overtook, by receiver."""
        for target, channel in zip(self._targets, self._channels, strict=True):
            yield target, channel.overtake(barrier)

    def hasten(
        self, checkpoint_id: CheckpointId
    ) -> Iterator[tuple[SubtaskIndex, list[pa.RecordBatch]]]:
        for target, channel in zip(self._targets, self._channels, strict=True):
            yield target, channel.hasten(checkpoint_id) or []

    def holds(self, checkpoint_id: CheckpointId) -> bool:
        return any(channel.holds(checkpoint_id) for channel in self._channels)

    def _send_by_key(self, batch: pa.RecordBatch, keys: Sequence[pa.Array]) -> None:
        targets = self._known.numbers_of(keys)
        # A stable sort keeps the order of records within each channel.
        order = np.argsort(targets, kind="stable")
        bounds = np.searchsorted(targets.take(order), np.arange(len(self._channels) + 1))
        by_target = batch.take(pa.array(order))
        for channel, start, stop in zip(
            self._channels, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True
        ):
            if start < stop:
                channel.send(by_target.slice(start, stop - start))

    def _targets_of(self, keys: Sequence[pa.Array]) -> Numbers:
        groups = key_groups_of(hash_columns(keys), self._max_parallelism)
        return self._channel_of_group.take(groups)


def key_columns(batch: pa.RecordBatch, keys: Sequence[str]) -> list[pa.Array]:
    """The columns by which a batch is parted, whether it holds records or partial aggregates."""
    if is_partial(batch):
        return list(batch.columns[: len(keys)])  # by place: an aggregate may have a key's name
    return [batch.column(key) for key in keys]
