"""What the position of a split must be, so that a checkpoint can keep it."""

from __future__ import annotations

from stillframe.json_values import json_flaw

POSITION_BYTES_MAX = 1 << 20
"""Of one split, as JSON. Every checkpoint's metadata and a message hold those of all splits."""


def split_flaw(split_id: object, position: object) -> str | None:
    """What is wrong with a split, and what to do, in words; None: nothing."""
    if not isinstance(split_id, str) or not split_id:
        return f"a split has the id {split_id!r}: give it a text that is not empty"
    if not isinstance(position, dict):
        return (
            f"the position of split {split_id!r} is of type {type(position).__name__}: make it a"
            ' dict, such as {"offset": 12}'
        )
    flaw = json_flaw(position, POSITION_BYTES_MAX)
    if flaw is None:
        return None
    return f"the position of split {split_id!r} {flaw}"
