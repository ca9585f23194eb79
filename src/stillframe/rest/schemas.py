"""JSON Schema: the few words of it that requests and answers are described with, and the check.

What a request may hold is said once, as a schema: the OpenAPI document shows it, and `checked`
holds requests to it, so that the two cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from stillframe.rest.refusals import Refused

Schema: TypeAlias = Mapping[str, Any]

ID_PATTERN = "^[0-9a-fA-F]{32}$"
_SHOWN_CHARACTERS_MAX = 80

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
ID: Schema = {"type": "string", "pattern": ID_PATTERN}
"""32 hexadecimal digits."""


def record(
    fields: Mapping[str, Schema], optional: Collection[str] = (), description: str = ""
) -> dict[str, Any]:
    """An object with these fields and no others."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": dict(fields),
        "required": [name for name in fields if name not in optional],
        "additionalProperties": False,
    }
    return {**schema, "description": description} if description else schema


def required_if(flag: str, name: str) -> dict[str, Any]:
    """Of a record: where the flag is true, the field `name` is needed too."""
    is_set = {"properties": {flag: {"const": True}}, "required": [flag]}
    return {"if": is_set, "then": {"required": [name]}}


def listing(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def mapping(values: Schema) -> Schema:
    """An object with any names."""
    return {"type": "object", "additionalProperties": values}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*names: str) -> Schema:
    return {"type": "string", "enum": list(names)}


def described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def parsed(text: str, schema: Schema, what: str) -> str | int:
    """A part of a path, or a parameter, as what its schema says it is."""
    if schema["type"] != "integer":
        checked(text, schema, what)
        return text
    # Longer numbers than this are no numbers of anything here.
    if not re.fullmatch(r"[0-9]{1,18}", text, re.ASCII):
        raise Refused(400, f"{what} is a whole number, not {_shown(text)}")
    checked(int(text), schema, what)
    return int(text)


def checked(value: object, schema: Schema, what: str) -> None:
    """Refuse what does not fit; `what` names it in the sentence."""
    match schema["type"]:
        case "object":
            _check_object(value, schema, what)
        case "boolean":
            if not isinstance(value, bool):
                raise Refused(400, f"{what} is true or false, not {_shown(value)}")
        case "integer":
            _check_integer(value, schema, what)
        case "string":
            _check_text(value, schema, what)
        case other:  # pragma: no cover - a mistake in the table
            raise AssertionError(f"requests are not made of {other!r}")


def _check_object(value: object, schema: Schema, what: str) -> None:
    if not isinstance(value, dict):
        raise Refused(400, f"{what} is a JSON object, not {_shown(value)}")
    fields = schema["properties"]
    for name in value:
        if name not in fields:
            known = f"it may have {', '.join(fields)}" if fields else "it has none"
            raise Refused(400, f"{what} has no field {_shown(name)}: {known}")
    for name in schema["required"]:
        if name not in value:
            raise Refused(400, f"{what} lacks {name}: {fields[name]['description']}")
    for name, each in value.items():
        checked(each, fields[name], f"{name} of {what}")
    for flag in schema.get("if", {}).get("required", ()):
        for name in schema["then"]["required"]:
            if value.get(flag) is True and name not in value:
                raise Refused(400, f"{flag} of {what} wants {name} too")


def _check_integer(value: object, schema: Schema, what: str) -> None:
    least, most = schema.get("minimum"), schema.get("maximum")
    # 7.0 is a whole number of JSON too.
    is_whole = isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
    if not is_whole or not _is_between(value, least, most):
        bounds = f" of at least {least}" if most is None else f" from {least} to {most}"
        raise Refused(400, f"{what} is a whole number{bounds}, not {_shown(value)}")


def _is_between(value: Any, least: int | None, most: int | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)


def _check_text(value: object, schema: Schema, what: str) -> None:
    if not isinstance(value, str):
        raise Refused(400, f"{what} is a text, not {_shown(value)}")
    names: Sequence[str] | None = schema.get("enum")
    if names is not None and value not in names:
        raise Refused(400, f"{what} is {' or '.join(names)}, not {_shown(value)}")
    if not _is_unicode(value):
        raise Refused(400, f"{what} is not valid Unicode: {_shown(value)}")
    pattern = schema.get("pattern")
    fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value))
    if not fits or (pattern and not re.fullmatch(pattern, value)):
        expected = schema.get("description", f"it has to match {pattern}")
        raise Refused(400, f"{what} is {_shown(value)}: {expected}")


def _is_unicode(text: str) -> bool:
    """Half of a pair of surrogates can be written in JSON, but neither in a path nor in UTF-8."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def _shown(value: object) -> str:
    text = ascii(value) if isinstance(value, str) and not _is_unicode(value) else repr(value)
    cut = _SHOWN_CHARACTERS_MAX
    return text if len(text) <= cut else f"{text[:cut]}…"
