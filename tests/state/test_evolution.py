"""State of another program: taken where it fits, refused with both schemas."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stillframe.errors import StartRefused
from stillframe.state.backends import Declared, Kind
from stillframe.state.evolution import fitted_to
from stillframe.state.rows import RowType


def test_the_same_keys_in_another_order_are_refused_because_they_hash_otherwise():
    declared = Declared("seen", Kind.VALUE, RowType(pa.schema([("n", pa.int64())])))
    keys = pa.schema([("a", pa.string()), ("b", pa.string())])
    turned = pa.schema([("b", pa.string()), ("a", pa.string())])
    schema = declared.snapshot_schema(keys)
    batch = pa.RecordBatch.from_pylist([{"a": "x", "b": "y", "__value": {"n": 1}}], schema)

    assert fitted_to(declared, batch, keys) is batch
    with pytest.raises(StartRefused, match="group by the same keys in the same order"):
        fitted_to(declared, batch, turned)
