"""JSON, as a type: what positions, committables and control messages are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

JsonValue: TypeAlias = (
    "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
)
JsonObject: TypeAlias = Mapping[str, JsonValue]

_SHOWN_CHARACTERS_MAX = 120


def json_flaw(value: object, bytes_max: int) -> str | None:
    """Why this cannot be kept as JSON, and what to do, to go on with after its name; None: it can.

    What is kept must read back as it was: a tuple would come back as a list, a number that is a key
    as a text.
    """
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"is not JSON ({error}): use texts, numbers, booleans, None, lists and dicts"
    if len(text) > bytes_max:
        return (
            f"takes {len(text)} bytes, more than the {bytes_max} allowed: keep only what is needed"
            " to go on from there"
        )
    if json.loads(text) != value:
        return (
            f"reads back from JSON as another value ({text[:_SHOWN_CHARACTERS_MAX]}): use lists"
            " instead of tuples, and texts as keys of dicts"
        )
    return None


def built(*kinds: object) -> None:
    """What msgspec needs to convert to these, made now, by the thread that imports the module.

    It is otherwise made at the first conversion, and a second thread that comes meanwhile finds it
    half made: the process dies by a segmentation fault (msgspec 0.22).
    """
    for kind in kinds:
        msgspec.json.Decoder(kind)
