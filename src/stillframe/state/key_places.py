"""Which columns of a snapshot are the key: said in the metadata of its schema.

An operator knows by its own plan where its keys are. Whoever reads a snapshot without the program
(as a DataFrame) does not, so every table says it in its `snapshot_schema`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa

_KEYS = b"keys"


def keyed_by(schema: pa.Schema, places: Sequence[int]) -> pa.Schema:
    """The schema, saying that the columns at these places are the key, in the order of hashing."""
    said = json.dumps(list(places)).encode()
    return schema.with_metadata({**(schema.metadata or {}), _KEYS: said})


def key_places(schema: pa.Schema) -> tuple[int, ...] | None:
    """Where the key's columns are; None where the schema does not say."""
    said = (schema.metadata or {}).get(_KEYS)
    return None if said is None else tuple(json.loads(said))
