"""Texts of flat records as columns, by msgspec: what most streams are made of, in a third of the
time that Arrow's reader takes for a column or two.

It refuses more than Spark does (a number for a string, `NaN`), and what it takes it reads as Spark
does, as far as the texts are UTF-8: texts made of chance are compared with the slow way
(`tests/test_json_texts.py`). One text that it refuses leaves all of them to Arrow.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import pyarrow as pa


def _whole(bits: int) -> Any:
    """Checked by msgspec, also where a later field of the same name takes its place."""
    return Annotated[int, msgspec.Meta(ge=-(1 << (bits - 1)), le=(1 << (bits - 1)) - 1)]


_READ_AS: Mapping[pa.DataType, Any] = {
    pa.string(): str,
    pa.bool_(): bool,
    pa.float64(): float,
    **{type_: _whole(type_.bit_width) for type_ in (pa.int8(), pa.int16(), pa.int32(), pa.int64())},
}


class FlatReader:
    """Reads texts, an object each and one in a line, of one schema."""

    def __init__(self, schema: pa.Schema) -> None:
        """For a schema of which `is_flat` says so."""
        self._schema = schema
        names = [f"field_{at}" for at in range(len(schema))]
        record = msgspec.defstruct(
            "Record",
            [
                (name, _READ_AS[field.type] | None, None)
                for name, field in zip(names, schema, strict=True)
            ],
            rename=dict(zip(names, schema.names, strict=True)),
            gc=False,  # nothing in it can refer to it
        )
        self._records = msgspec.json.Decoder(record)
        self._getters = [attrgetter(name) for name in names]

    def read(self, block: memoryview) -> pa.RecordBatch | None:
        """A row for each line; None: another reader has to tell."""
        try:
            records = self._records.decode_lines(block)
        except (msgspec.MsgspecError, RecursionError):
            return None
        columns = [
            pa.array(list(map(get, records)), field.type)
            for get, field in zip(self._getters, self._schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def is_flat(schema: pa.Schema) -> bool:
    """Whether there are records of it that `FlatReader` reads."""
    names = schema.names
    return len(set(names)) == len(names) > 0 and all(each.type in _READ_AS for each in schema)
