"""What flows in a channel: batches, and the markers that keep their place among them.

Between two markers, batches may be split or merged freely; nothing else is reordered within a
channel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from stillframe.ids import CheckpointId


@dataclass(frozen=True, slots=True)
class Barrier:
    """Splits the stream: what is before belongs to this checkpoint, what is after to the next."""

    checkpoint_id: CheckpointId
    triggered_at_ms: int


@dataclass(frozen=True, slots=True)
class CancelBarrier:
    """This checkpoint was given up; do not wait for its barrier here."""

    checkpoint_id: CheckpointId


@dataclass(frozen=True, slots=True)
class EndOfRecords:
    """No more batches will come; barriers still will."""


@dataclass(frozen=True, slots=True)
class EndOfChannel:
    """Nothing at all will come any more."""


Marker = Barrier | CancelBarrier | EndOfRecords | EndOfChannel
Element: TypeAlias = pa.RecordBatch | Marker
