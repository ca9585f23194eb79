"""What a rule is, by which an expression of Spark's is translated, and what all rules share.

A rule is known by the class of Spark's node. It gets the node and who translates what is below it,
and answers the expression; or it refuses. Most rules are made by a function that is given the name
that our slots know the function by: `simple` for those that mean the same with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from py4j.java_gateway import JavaObject

from stillframe.graph.expressions import Call, Expression, Literal
from stillframe.spark.expressions.nodes import refused, type_of, zone_of


class Translating(Protocol):
    """Who translates nodes, as rules see it."""

    def translate(self, node: JavaObject) -> Expression: ...

    def children(self, node: JavaObject) -> tuple[Expression, ...]:
        """Those of the node, translated."""


Rule = Callable[[Translating, JavaObject], Expression]


def simple(function: str) -> Rule:
    """The same function of the same arguments."""

    def rule(translator: Translating, node: JavaObject) -> Expression:
        return Call(function, translator.children(node), type_of(node))

    return rule


def in_zone(function: str) -> Rule:
    """The same function; the time zone is its last argument."""

    def rule(translator: Translating, node: JavaObject) -> Expression:
        arguments = (*translator.children(node), zone_of(node))
        return Call(function, arguments, type_of(node))

    return rule


def literal_arguments(node: JavaObject, arguments: Iterable[Expression]) -> list[Any]:
    """The values of arguments that Arrow takes only as constants."""
    values = []
    for argument in arguments:
        if not isinstance(argument, Literal) or not argument.value.is_valid:
            raise refused(node, "needs constants here to be evaluated in a stream")
        values.append(argument.value.as_py())
    return values
