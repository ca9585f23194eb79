"""What may be computed per group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

AggregateFunction = Literal[
    "count", "sum", "min", "max", "avg", "var_pop", "var_samp", "stddev_pop", "stddev_samp"
]


@dataclass(frozen=True, slots=True)
class AggregateCall:
    """One aggregate of a group: its function, the column it reads, and the column it makes."""

    function: AggregateFunction
    input: str | None
    """None counts records; a column counts its non-null values."""
    name: str
    type: pa.DataType
