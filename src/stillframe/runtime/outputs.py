"""Where a task's records go: one edge, its channels, and which record takes which of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from stillframe.graph.plan import Edge, HashBy
from stillframe.key_groups import hash_columns, key_groups_of, subtask_of_key_group
from stillframe.runtime.channels import OutputChannel
from stillframe.runtime.elements import Marker
from stillframe.state.partials import PartialAggregates


class EdgeOutput:
    """The channels of one edge from one subtask, one per subtask of the task it leads to."""

    def __init__(
        self,
        edge: Edge,
        channels: Sequence[OutputChannel],
        max_parallelism: int,
        combiner: PartialAggregates | None = None,
    ) -> None:
        assert len(channels) == edge.target_parallelism
        self._edge = edge
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

    def has_room(self) -> bool:
        return all(channel.has_room() for channel in self._channels)

    def send(self, batch: pa.RecordBatch) -> None:
        if self._combiner is not None:
            # One channel or many: the receiver has less to do.
            batch = self._combiner.combine(batch)
        if len(self._channels) == 1:
            self._channels[0].send(batch)
        elif isinstance(self._edge.partitioning, HashBy):
            self._send_by_key(batch, self._key_columns(batch, self._edge.partitioning.keys))
        else:
            self._channels[self._turn].send(batch)
            self._turn = (self._turn + 1) % len(self._channels)

    def broadcast(self, marker: Marker) -> None:
        for channel in self._channels:
            channel.send(marker)

    def _key_columns(self, batch: pa.RecordBatch, keys: Sequence[str]) -> list[pa.Array]:
        if self._combiner is None:
            return [batch.column(key) for key in keys]
        # By place: an aggregate may have the name of a key.
        return list(batch.columns[: len(keys)])

    def _send_by_key(self, batch: pa.RecordBatch, keys: Sequence[pa.Array]) -> None:
        hashes = hash_columns(keys)
        targets = self._channel_of_group.take(key_groups_of(hashes, self._max_parallelism))
        # A stable sort keeps the order of records within each channel.
        order = np.argsort(targets, kind="stable")
        bounds = np.searchsorted(targets.take(order), np.arange(len(self._channels) + 1))
        by_target = batch.take(pa.array(order))
        for channel, start, stop in zip(
            self._channels, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True
        ):
            if start < stop:
                channel.send(by_target.slice(start, stop - start))
