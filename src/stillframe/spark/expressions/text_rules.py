"""Strings and patterns: how Spark's become ours.

Rules of this file: Arrow takes the details of most functions of strings, what to pad with, what to
look for, only once for a whole column. So they must be constants here. A pattern is translated into
the dialect of the library that matches it, or refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import pyarrow as pa
import pyarrow.compute as pc
from py4j.java_gateway import JavaObject
from pyarrow import types

from stillframe.connectors.json_lines import rules_from_options
from stillframe.errors import BuildError
from stillframe.graph.expressions import Call, Expression, Literal
from stillframe.json_texts.records import refuse_unreadable
from stillframe.spark.expressions.nodes import refused, text_literal, type_of
from stillframe.spark.expressions.patterns import UnknownPattern, like_to_re2, rlike_to_re2
from stillframe.spark.expressions.rules import Rule, Translating, literal_arguments, simple


def _with_constants(function: str) -> Rule:
    """The first argument a column of strings, the others constants."""

    def rule(translator: Translating, node: JavaObject) -> Expression:
        arguments = translator.children(node)
        literal_arguments(node, arguments[1:])
        if not types.is_string(arguments[0].type):
            raise refused(node)
        return Call(function, arguments, type_of(node))

    return rule


def _strings(function: str) -> Rule:
    def rule(translator: Translating, node: JavaObject) -> Expression:
        arguments = translator.children(node)
        if not all(types.is_string(argument.type) for argument in arguments):
            raise refused(node)
        return Call(function, arguments, type_of(node))

    return rule


def _concat(translator: Translating, node: JavaObject) -> Expression:
    type_ = type_of(node)
    if types.is_nested(type_):
        raise refused(node)
    return Call("concat", translator.children(node), type_)


def _trim(function: str) -> Rule:
    def rule(translator: Translating, node: JavaObject) -> Expression:
        text, *given = translator.children(node)
        literal_arguments(node, given)
        characters = given[0] if given else text_literal(" ")
        return Call(function, (text, characters), pa.string())

    return rule


def _pad(function: str) -> Rule:
    def rule(translator: Translating, node: JavaObject) -> Expression:
        arguments = translator.children(node)
        _, by = literal_arguments(node, arguments[1:])
        if len(by) > 1 or not types.is_string(arguments[0].type):
            raise refused(node, "can pad with one character only in a stream")
        return Call(function, arguments, pa.string())

    return rule


def _replace(translator: Translating, node: JavaObject) -> Expression:
    arguments = translator.children(node)
    search, _ = literal_arguments(node, arguments[1:])
    return Call("replace", arguments, pa.string()) if search else arguments[0]


def _concat_ws(translator: Translating, node: JavaObject) -> Expression:
    separator, *parts = translator.children(node)
    literal_arguments(node, [separator])
    parts = [part for part in parts if not _is_null_literal(part)]
    if not parts or not all(types.is_string(part.type) for part in parts):
        raise refused(node)
    return Call("concat_ws", (separator, *parts), pa.string())


def _is_null_literal(expression: Expression) -> bool:
    return isinstance(expression, Literal) and not expression.value.is_valid


def _like(translator: Translating, node: JavaObject) -> Expression:
    escape = str(node.escapeChar())
    return _matching(translator, node, lambda pattern: like_to_re2(pattern, escape))


def _rlike(translator: Translating, node: JavaObject) -> Expression:
    return _matching(translator, node, rlike_to_re2)


def _matching(
    translator: Translating, node: JavaObject, to_re2: Callable[[str], str]
) -> Expression:
    text, given = translator.children(node)
    (pattern,) = literal_arguments(node, [given])
    try:
        re2 = to_re2(pattern)
        pc.match_substring_regex(pa.array([""]), re2)
    except (UnknownPattern, pa.ArrowInvalid):
        raise _unlike(node) from None
    return Call("matches", (text, text_literal(re2)), pa.bool_())


_META = set("\\.$|()[]{}^?*+")


def _split(translator: Translating, node: JavaObject) -> Expression:
    """By a pattern without choices: where two could match, the libraries might choose otherwise.
    One that matches nothing at all splits between characters in Java only."""
    text, given, limit = translator.children(node)
    pattern, _ = literal_arguments(node, [given, limit])
    if pattern and not set(pattern) & _META:  # it is what it matches
        return Call("split_by_text", (text, text_literal(pattern), limit), type_of(node))
    try:
        re2 = rlike_to_re2(pattern)
        matches_nothing = pc.match_substring_regex(pa.array([""]), re2)[0].as_py()
    except (UnknownPattern, pa.ArrowInvalid):
        raise _unlike(node) from None
    if matches_nothing or set("|()^$") & set(pattern):
        raise _unlike(node)
    return Call("split", (text, text_literal(re2), limit), type_of(node))


def _from_json(translator: Translating, node: JavaObject) -> Expression:
    type_ = type_of(node)
    if not types.is_struct(type_):
        raise refused(node, "gives no struct, which is what a stream reads JSON into")
    options, each = {}, node.options().iterator()
    while each.hasNext():
        pair = each.next()
        options[str(pair._1())] = str(pair._2())
    zone = node.timeZoneId()
    session = {"timeZone": "UTC" if zone.isEmpty() else str(zone.get())}
    rules = replace(rules_from_options({**session, **options}, "from_json"), as_written=False)
    if rules.mode == "DROPMALFORMED":
        raise refused(node, "says DROPMALFORMED, which from_json does not do in Spark either")
    refuse_unreadable(pa.schema(list(type_)), rules)
    text = translator.translate(node.child())
    return Call("from_json", (text, text_literal(json.dumps(asdict(rules)))), type_)


def _unlike(node: JavaObject) -> BuildError:
    return refused(node, "has a pattern that a stream cannot match as Spark does")


TEXT_RULES: dict[str, Rule] = {
    "Length": simple("length"),
    "Upper": _strings("upper"),
    "Lower": _strings("lower"),
    "StringTrim": _trim("trim"),
    "StringTrimLeft": _trim("ltrim"),
    "StringTrimRight": _trim("rtrim"),
    "Substring": _with_constants("substring"),
    "Concat": _concat,
    "ConcatWs": _concat_ws,
    "StartsWith": _with_constants("starts_with"),
    "EndsWith": _with_constants("ends_with"),
    "Contains": _with_constants("contains"),
    "Like": _like,
    "RLike": _rlike,
    "JsonToStructs": _from_json,
    "StringSplit": _split,
    "StringReplace": _replace,
    "StringLPad": _pad("lpad"),
    "StringRPad": _pad("rpad"),
}
