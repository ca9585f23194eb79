"""JSON, as a type: what positions, committables and control messages are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Union

JsonValue = Union[None, bool, int, float, str, Sequence["JsonValue"], Mapping[str, "JsonValue"]]
JsonObject = Mapping[str, JsonValue]
