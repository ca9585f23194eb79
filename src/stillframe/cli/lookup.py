"""`stillframe inspect PATH --key K`: the rows of one state, or of one key in it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from stillframe.coordinator.history import format_bytes
from stillframe.coordinator.located import LocatedSnapshot, locate
from stillframe.runtime.state_lookup import look_up
from stillframe.runtime.stored_states import StatePart, state_parts

_ROWS_USUAL = 20


def wants_rows(arguments: argparse.Namespace) -> bool:
    wanted = (arguments.operator, arguments.state, arguments.key)
    return arguments.states or any(each is not None for each in wanted)


def inspect_rows(arguments: argparse.Namespace) -> int:
    """Nothing is verified but what is read."""
    found = locate(arguments.path, settings_given(arguments))
    if arguments.states:
        return _list_states(found, as_json=arguments.json)
    rows = look_up(
        found.store,
        found.manifest,
        arguments.operator,
        arguments.state,
        arguments.key,
        arguments.rows or _ROWS_USUAL,
    )
    if arguments.json:
        document = {
            "checkpoint": found.manifest.checkpoint_id,
            "uid": rows.uid,
            "operator": rows.operator,
            "state": rows.state,
            "key": arguments.key,
            "key_group": rows.key_group,
            "subtask": rows.subtask,
            "rows": rows.rows,
            "more": rows.is_more,
        }
        print(json.dumps(document, ensure_ascii=False, indent=1))
        return 0
    where = "" if rows.key_group is None else f", key group {rows.key_group}"
    where += "" if rows.subtask is None else f", subtask {rows.subtask}"
    print(f"{found.manifest.title}, {rows.uid} ({rows.operator}), state {rows.state}{where}:")
    for row in rows.rows:
        print(f"  {json.dumps(row, ensure_ascii=False)}")
    if rows.is_more:
        print("  … and more")
    elif not rows.rows:
        print("  no row" if arguments.key is None else "  this key is not in it")
    return 0


def _list_states(found: LocatedSnapshot, *, as_json: bool) -> int:
    states: list[dict[str, Any]] = [
        {
            "uid": described.uid,
            "operator": described.name,
            "state": name,
            "rows": None if any(part.rows is None for part in parts) else _sum_of_rows(parts),
            "bytes": sum(part.length_bytes for part in parts),
        }
        for described in found.manifest.operators
        for name, parts in state_parts(found.store, found.manifest, described.uid).items()
    ]
    if as_json:
        number = found.manifest.checkpoint_id
        print(json.dumps({"checkpoint": number, "states": states}, ensure_ascii=False, indent=1))
        return 0
    for each in states:
        rows = "" if each["rows"] is None else f"{each['rows']:,} rows, "
        size = format_bytes(each["bytes"])
        print(f"{each['uid']} ({each['operator']}), state {each['state']}: {rows}{size}")
    if not states:
        print("no keyed state")
    return 0


def _sum_of_rows(parts: list[StatePart]) -> int:
    return sum(part.rows or 0 for part in parts)


def settings_given(arguments: argparse.Namespace) -> Mapping[str, str] | None:
    """How the storage is reached, where a driver says it: not in words that others can see."""
    return json.load(sys.stdin) if arguments.settings_on_stdin else None
