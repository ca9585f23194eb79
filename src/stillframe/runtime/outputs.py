"""Where a task's records go: one edge, its channels, and which record takes which of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from stillframe.graph.plan import Edge, HashBy
from stillframe.key_groups import hash_columns, key_groups_of, subtask_of_key_group
from stillframe.runtime.channels import OutputChannel
from stillframe.runtime.elements import Marker


class EdgeOutput:
    """The channels of one edge from one subtask, one per subtask of the task it leads to."""

    def __init__(self, edge: Edge, channels: Sequence[OutputChannel], max_parallelism: int) -> None:
        assert len(channels) == edge.target_parallelism
        self._edge = edge
        self._channels = channels
        self._max_parallelism = max_parallelism
        self._turn = 0

    def has_room(self) -> bool:
        return all(channel.has_room() for channel in self._channels)

    def send(self, batch: pa.RecordBatch) -> None:
        if len(self._channels) == 1:
            self._channels[0].send(batch)
        elif isinstance(self._edge.partitioning, HashBy):
            self._send_by_key(batch, self._edge.partitioning.keys)
        else:
            self._channels[self._turn].send(batch)
            self._turn = (self._turn + 1) % len(self._channels)

    def broadcast(self, marker: Marker) -> None:
        for channel in self._channels:
            channel.send(marker)

    def _send_by_key(self, batch: pa.RecordBatch, keys: Sequence[str]) -> None:
        hashes = hash_columns([batch.column(key) for key in keys])
        groups = key_groups_of(hashes, self._max_parallelism)
        targets = subtask_of_key_group(groups, len(self._channels), self._max_parallelism)
        # A stable sort keeps the order of records within each channel.
        order = np.argsort(targets, kind="stable")
        bounds = np.searchsorted(targets[order], np.arange(len(self._channels) + 1))
        for target, channel in enumerate(self._channels):
            start, stop = int(bounds[target]), int(bounds[target + 1])
            if start < stop:
                channel.send(batch.take(pa.array(order[start:stop])))
