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
    alignment_timeout_ms: int | None = None
    """How long tasks wait for each other's barriers before it overtakes the records in its way;
    None: for ever. One that has been waited for long enough is sent on with 0."""
    savepoint: str | None = None
    """The address everything goes to, if it is a savepoint; it never overtakes anything."""
    holds: bool = False
    """Whether whoever has taken its snapshot stands still behind it, until it is given up: only
    further barriers pass. It never overtakes anything either."""

    @property
    def is_overtaking(self) -> bool:
        return self.alignment_timeout_ms == 0


@dataclass(frozen=True, slots=True)
class CancelBarrier:
    """This checkpoint was given up; do not wait for its barrier here."""

    checkpoint_id: CheckpointId


@dataclass(frozen=True, slots=True)
class EndOfRecords:
    """No more batches will come; barriers still will."""


@dataclass(frozen=True, slots=True)
class Lap:
    """Goes once round a cycle whose inputs have ended, to find out whether it is empty."""

    loop: int
    """The task that is the cycle's head."""
    number: int
    is_quiet: bool
    """Whether nothing can have entered the cycle since the lap before, as far as it has come."""


@dataclass(frozen=True, slots=True)
class Watermark:
    """Event time has come this far here; what is older is late."""

    time_us: int


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing comes here for a while: this channel does not hold event time back."""


@dataclass(frozen=True, slots=True)
class LatencyMarker:
    """Goes the way of records from a source, to find out how long they take to each task."""

    source_task: int
    sent_at_ms: int
    """When the source was to send it: that there was no room for it is part of the way."""


Marker = Barrier | CancelBarrier | EndOfRecords | Lap | Watermark | Idle | LatencyMarker
Element: TypeAlias = pa.RecordBatch | Marker
