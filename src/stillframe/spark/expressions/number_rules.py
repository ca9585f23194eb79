"""Conditions, comparisons, numbers and casts: how Spark's become ours.

Rules of this file: Spark's result or none. Arrow differs from Spark in what is larger than all
numbers (NaN), in how many digits a decimal may have on the way, and in what happens to a number
that is too large; where it does, the expression is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from py4j.java_gateway import JavaObject
from pyarrow import types

from stillframe.graph.expressions import Call, Expression, Literal
from stillframe.runtime import casts
from stillframe.spark.expressions.nodes import mode_of, refused, refused_mode, type_of, zone_of
from stillframe.spark.expressions.rules import Rule, Translating, literal_arguments, simple


def _case(translator: Translating, node: JavaObject) -> Expression:
    parts = translator.children(node)
    type_ = type_of(node)
    if len(parts) % 2 == 0:
        parts = (*parts, Literal(pa.scalar(None, type_)))
    return Call("case", parts, type_)


def _nanvl(translator: Translating, node: JavaObject) -> Expression:
    value, otherwise = translator.children(node)
    return Call("case", (Call("is_nan", (value,), pa.bool_()), otherwise, value), value.type)


def _comparison(function: str) -> Rule:
    def rule(translator: Translating, node: JavaObject) -> Expression:
        arguments = translator.children(node)
        if types.is_nested(arguments[0].type):
            raise refused(node)
        return Call(function, arguments, pa.bool_())

    return rule


def _in(translator: Translating, node: JavaObject) -> Expression:
    arguments = translator.children(node)
    if types.is_nested(arguments[0].type) or node.legacyNullInEmptyBehavior():
        raise refused(node)
    return Call("in", arguments, pa.bool_())


def _extreme(function: str) -> Rule:
    def rule(translator: Translating, node: JavaObject) -> Expression:
        type_ = type_of(node)
        # Spark takes NaN for the largest number, Arrow for none.
        if types.is_floating(type_) or types.is_nested(type_) or types.is_boolean(type_):
            raise refused(node)
        return Call(function, translator.children(node), type_)

    return rule


def _arithmetic(function: str) -> Rule:
    def rule(translator: Translating, node: JavaObject) -> Expression:
        arguments = translator.children(node)
        type_ = type_of(node)
        _refuse_unless_numeric(node, type_, arguments)
        mode = mode_of(node)
        if types.is_floating(type_) or mode == "ANSI":
            return Call(function, arguments, type_)
        if mode == "LEGACY" and types.is_integer(type_):
            return Call(f"{function}_wrapping", arguments, type_)
        raise refused_mode(node, mode)

    return rule


def _refuse_unless_numeric(
    node: JavaObject, type_: pa.DataType, arguments: Iterable[Expression]
) -> None:
    if types.is_decimal(type_):
        # Arrow computes with at most 76 digits, and rounding needs one of them.
        if sum(argument.type.precision for argument in arguments) < 75:
            return
    elif types.is_integer(type_) or types.is_floating(type_):
        return
    raise refused(node)


def _division(function: str) -> Rule:
    def rule(translator: Translating, node: JavaObject) -> Expression:
        dividend, divisor = translator.children(node)
        type_ = type_of(node)
        if any(types.is_decimal(argument.type) for argument in (dividend, divisor)):
            raise refused(node)
        mode = mode_of(node)
        if mode == "LEGACY":
            divisor = Call("null_if_zero", (divisor,), divisor.type)
        elif mode != "ANSI":
            raise refused_mode(node, mode)
        return Call(function, (dividend, divisor), type_)

    return rule


def _whole(function: str) -> Rule:
    def rule(translator: Translating, node: JavaObject) -> Expression:
        (argument,) = translator.children(node)
        if types.is_integer(argument.type):
            return argument
        if not types.is_float64(argument.type) or mode_of(node) != "ANSI":
            raise refused(node)
        return Call(function, (argument,), type_of(node))

    return rule


def _round(translator: Translating, node: JavaObject) -> Expression:
    argument, given = translator.children(node)
    (scale,) = literal_arguments(node, [given])
    type_ = type_of(node)
    if types.is_integer(type_) and scale >= 0:
        return argument
    if not types.is_decimal(type_) or scale < 0:
        raise refused(node)
    return Call("round_decimal", (argument,), type_)


def _cast(translator: Translating, node: JavaObject) -> Expression:
    argument = translator.translate(node.child())
    type_ = type_of(node)
    if argument.type == type_:
        return argument
    if not casts.castable(argument.type, type_):
        raise refused(node)
    mode = mode_of(node)
    if mode != "ANSI" and not casts.cannot_fail(argument.type, type_):
        raise refused_mode(node, mode)
    return Call("cast", (argument, zone_of(node)), type_)


NUMBER_RULES: dict[str, Rule] = {
    "Add": _arithmetic("add"),
    "Subtract": _arithmetic("subtract"),
    "Multiply": _arithmetic("multiply"),
    "UnaryMinus": _arithmetic("negate"),
    "Abs": _arithmetic("abs"),
    "UnaryPositive": lambda translator, node: translator.translate(node.child()),
    "Divide": _division("divide"),
    "IntegralDivide": _division("integral_divide"),
    "Remainder": _division("remainder"),
    "Pmod": _division("pmod"),
    "Floor": _whole("floor"),
    "Ceil": _whole("ceil"),
    "Round": _round,
    "Greatest": _extreme("greatest"),
    "Least": _extreme("least"),
    "EqualTo": _comparison("equal"),
    "EqualNullSafe": _comparison("null_safe_equal"),
    "LessThan": _comparison("less"),
    "LessThanOrEqual": _comparison("less_equal"),
    "GreaterThan": _comparison("greater"),
    "GreaterThanOrEqual": _comparison("greater_equal"),
    "In": _in,
    "And": simple("and"),
    "Or": simple("or"),
    "Not": simple("not"),
    "IsNull": simple("is_null"),
    "IsNotNull": simple("is_not_null"),
    "IsNaN": simple("is_nan"),
    "NaNvl": _nanvl,
    "Coalesce": simple("coalesce"),
    "CaseWhen": _case,
    "If": _case,
    "Cast": _cast,
}
