"""The rows of one state in a snapshot: the first ones, or those of one key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from stillframe.errors import BuildError, StorageError
from stillframe.ids import OperatorUid
from stillframe.key_groups import hash_row, key_groups_of, subtask_of_key_group
from stillframe.protocol.manifests import Manifest
from stillframe.runtime.stored_states import StatePart, batches_of, schema_of, state_parts
from stillframe.state.shapes import KEY, LIST_INDEX, Shape
from stillframe.storage.store import Store

_TEXT_CHARACTERS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class RowsFound:
    uid: OperatorUid
    operator: str
    state: str
    rows: list[dict[str, Any]]
    """As reading the snapshot as a DataFrame shows them; ready for JSON."""
    is_more: bool
    key_group: int | None
    """Of the key that was looked up."""
    subtask: int | None
    """That has the key."""


def look_up(
    store: Store,
    manifest: Manifest,
    uid: str | None,
    state: str | None,
    key: str | None,
    rows_max: int,
) -> RowsFound:
    """`uid` and `state` may be left out where there is one; without a key, the first rows.

    A key of one column is its value as text; of several, a JSON list or object of them.
    """
    operator, parts = _chosen(store, manifest, uid, state)
    shape = Shape(schema_of(store, parts[0]))
    wanted = None if key is None else _parsed(key, shape.key_fields)
    group = None if wanted is None else _group_of(wanted, shape.key_fields, manifest)
    rows: list[dict[str, Any]] = []
    for row in _rows(store, parts, manifest.max_parallelism, group):
        if wanted is None or row.get(KEY) == wanted:
            row.pop(LIST_INDEX, None)
            rows.append({name: _plain(value) for name, value in row.items()})
            if len(rows) > rows_max:
                break
    subtasks = {each.uid: each.parallelism for each in manifest.operators}
    return RowsFound(
        parts[0].uid,
        operator,
        parts[0].name,
        rows[:rows_max],
        len(rows) > rows_max,
        group,
        None
        if group is None
        else subtask_of_key_group(group, subtasks[parts[0].uid], manifest.max_parallelism),
    )


def _chosen(
    store: Store, manifest: Manifest, uid: str | None, state: str | None
) -> tuple[str, list[StatePart]]:
    found = {
        (each.uid, name): (each.name, parts)
        for each in manifest.operators
        if uid in (None, each.uid)
        for name, parts in state_parts(store, manifest, each.uid).items()
        if state in (None, name)
    }
    if len(found) == 1:
        return next(iter(found.values()))
    there = [
        f"{name} of {each.uid}"
        for each in manifest.operators
        for name in state_parts(store, manifest, each.uid)
    ]
    asked = "several states fit" if found else "there is no such state"
    raise StorageError(
        f"{asked}: say which with the operator's uid and the state's name; {manifest.title} has"
        f" {', '.join(there) or 'none'}"
    )


def _rows(
    store: Store, parts: Sequence[StatePart], max_parallelism: int, wanted: int | None
) -> Iterator[dict[str, Any]]:
    for part in parts:
        shape = Shape(schema_of(store, part))
        for group, batch in batches_of(store, part, max_parallelism, wanted):
            for piece in _pieces(shape.show(batch, group)):
                yield from piece.to_pylist()


def _pieces(batch: pa.RecordBatch, rows: int = 4_096) -> Iterator[pa.RecordBatch]:
    return (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


def _parsed(key: str, fields: Sequence[pa.Field]) -> dict[str, Any]:
    """As the rows have it."""
    if not fields:
        raise BuildError("this state has no key: leave the key out to see its rows")
    values: list[Any] = [key]
    if len(fields) > 1:
        names = [field.name for field in fields]
        try:
            given = json.loads(key)
            values = [given[name] for name in names] if isinstance(given, dict) else list(given)
        except (ValueError, TypeError, KeyError) as error:
            raise BuildError(
                f"the key {key!r} is no JSON list or object of {', '.join(names)}: {error}"
            ) from error
        if len(values) != len(fields):
            raise BuildError(f"the key {key!r} has {len(values)} parts, not {', '.join(names)}")
    return {field.name: _value(value, field) for field, value in zip(fields, values, strict=True)}


def _value(value: Any, field: pa.Field) -> Any:
    if value is None or (value == "null" and not pa.types.is_string(field.type)):
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        return pa.scalar(text).cast(field.type).as_py()
    except (pa.ArrowException, ValueError) as error:
        raise BuildError(f"{field.name} of the key is a {field.type}, not {text!r}") from error


def _group_of(key: dict[str, Any], fields: Sequence[pa.Field], manifest: Manifest) -> int | None:
    """None: it can only be found by looking at all."""
    try:
        hashed = hash_row(list(key.values()), [field.type for field in fields])
    except (TypeError, ValueError, AssertionError, StorageError):
        return None
    return int(key_groups_of(np.array([hashed], np.uint64), manifest.max_parallelism)[0])


def _plain(value: Any) -> Any:
    """As JSON can hold it, and not too long."""
    match value:
        case dict():
            return {name: _plain(each) for name, each in value.items()}
        case list():
            return [_plain(each) for each in value[:100]]
        case bool() | int() | float() | None:
            return value
        case _:
            text = value if isinstance(value, str) else str(value)
            return text if len(text) <= _TEXT_CHARACTERS_MAX else f"{text[:_TEXT_CHARACTERS_MAX]}…"
