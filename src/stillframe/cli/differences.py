"""`stillframe diff A B`: what two snapshots have in their states that the other has not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from stillframe.cli.lookup import settings_given
from stillframe.coordinator.located import LocatedSnapshot, locate
from stillframe.errors import StorageError
from stillframe.ids import OperatorUid
from stillframe.runtime.state_differences import StateDifference, differences


def diff(arguments: argparse.Namespace) -> int:
    """1 if they differ, as of files."""
    settings = settings_given(arguments)
    before, after = locate(arguments.before, settings), locate(arguments.after, settings)
    found = list(
        differences(
            (before.store, before.manifest),
            (after.store, after.manifest),
            arguments.rows,
            lambda uid, state: _is_wanted(arguments, uid, state),
        )
    )
    if not found and (arguments.operator or arguments.state):
        raise StorageError(
            "neither snapshot has such a state: leave --operator and --state out to see all"
        )
    if arguments.json:
        print(json.dumps(_as_json(before, after, found), ensure_ascii=False, indent=1, default=str))
    else:
        print("\n".join(_lines(before, after, found)))
    return int(any(not each.is_empty for each in found))


def _is_wanted(arguments: argparse.Namespace, uid: OperatorUid, state: str) -> bool:
    return arguments.operator in (None, uid) and arguments.state in (None, state)


def _as_json(
    before: LocatedSnapshot, after: LocatedSnapshot, found: list[StateDifference]
) -> dict[str, Any]:
    return {
        "a": before.place,
        "b": after.place,
        "states": [
            {
                "uid": each.uid,
                "operator": each.operator,
                "state": each.state,
                "only_in": each.is_only_in,
                "added": each.added,
                "changed": each.changed,
                "gone": each.gone,
                "same": each.same,
                "examples": each.examples,
            }
            for each in found
        ],
    }


def _lines(
    before: LocatedSnapshot, after: LocatedSnapshot, found: list[StateDifference]
) -> Iterator[str]:
    yield f"A: {before.manifest.title} in {before.place}"
    yield f"B: {after.manifest.title} in {after.place}"
    if not found:
        yield "neither has keyed state"
    for each in found:
        yield f"{each.uid} ({each.operator}), state {each.state}: {_in_words(each)}"
        for example in each.examples:
            yield f"  {_SIGNS[example['change']]} {_example(example)}"


_SIGNS = {"added": "+", "changed": "~", "gone": "-"}


def _in_words(found: StateDifference) -> str:
    counts = f"{found.added:,} added, {found.changed:,} changed, {found.gone:,} gone"
    if found.is_only_in is not None:
        return f"only in {found.is_only_in}: {counts}"
    return "the same" if found.is_empty else f"{counts}, {found.same:,} the same"


def _example(example: dict[str, Any]) -> str:
    values = [str(example[side]) for side in ("before", "after") if side in example]
    return f"{example['key']}: {' -> '.join(values)}"
