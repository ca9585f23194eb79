"""What may be computed per group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

AggregateFunction = Literal[
    "count",
    "sum",
    "min",
    "max",
    "avg",
    "var_pop",
    "var_samp",
    "stddev_pop",
    "stddev_samp",
    "squares",
    "skewness",
    "kurtosis",
    "covar_pop",
    "covar_samp",
    "corr",
    "regr_r2",
    "regr_sxy",
    "regr_slope",
    "regr_intercept",
    "bit_and",
    "bit_or",
    "bit_xor",
    "first",
    "last",
    "min_by",
    "max_by",
    "collect_list",
    "collect_set",
    "listagg",
    "approx_count_distinct",
    "percentile",
    "percentile_disc",
    "percentile_approx",
    "mode",
    "by_spark",
]

WRAPS = "wraps"
"""The parameter of a sum of integers that begins again at the other end of 64 bits."""


@dataclass(frozen=True, slots=True)
class AggregateCall:
    """One aggregate of a group: its function, the column it reads, and the column it makes."""

    function: AggregateFunction
    input: str | None
    """None counts records; a column counts its non-null values. A function of two columns reads one
    of structs with both."""
    name: str
    type: pa.DataType
    parameters: tuple[Any, ...] = ()
    """What the function was given besides, the same for all records."""
    is_distinct: bool = False
    """Whether equal values count once."""
