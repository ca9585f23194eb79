"""The gap of a session, in microseconds: one for all records, or computed for each.

Theory of operation: Spark's plan adds the gap to the event time. An interval is no number: a month
and a day are as long as they are at a certain moment. So a gap is what the sum is later than the
event time. Where it is the same at every moment, that is a constant; where it is not, it is
computed by adding and subtracting. A gap may also be chosen among several, row by row, or made of
numbers.

Rules of this file:
- a gap that is text, row by row, is refused: Spark would parse each;
- a null gap, and one that is not positive, is right row by row: such records are in no session. As
  a constant it is a mistake, and refused.
"""

from __future__ import annotations

import pyarrow as pa
from py4j.java_gateway import JavaObject
from pyarrow import types

from stillframe.errors import BuildError
from stillframe.graph.expressions import Call, Expression, Literal
from stillframe.spark.expressions.nodes import constant_of, refused, text_literal, zone_of
from stillframe.spark.expressions.rules import Translating
from stillframe.spark.expressions.time_rules import DAY_MICROS, interval_parts
from stillframe.spark.expressions.windows import FoundSession
from stillframe.spark.steps import children, class_name
from stillframe.spark.types import TIMESTAMP_NTZ


def gap_of(translator: Translating, adding: JavaObject) -> Expression:
    """By how many microseconds this makes a moment later; null where it makes it null."""
    moments, _ = children(adding)
    return _Gaps(translator, adding, translator.translate(moments)).of(adding.children(), 1)


def positive_gap(found: FoundSession, gap: Literal) -> int:
    """The gap that all records have, which must be one with which there are sessions."""
    gap_us = gap.value.as_py()
    if gap_us is None or gap_us <= 0:
        raise BuildError(
            f"session_window has the gap {children(found.adding)[1].sql()}, with which no record is"
            " in a session: give a positive one, such as '5 minutes'"
        )
    return int(gap_us)


class _Gaps:
    """Intervals in microseconds: constants, chosen among such row by row, or made of numbers."""

    def __init__(self, translator: Translating, adding: JavaObject, moments: Expression) -> None:
        self._translator = translator
        self._adding = adding
        self._moments = moments

    def of(self, nodes: JavaObject, place: int, cast: JavaObject | None = None) -> Expression:
        """Of one of these nodes; `cast` is what makes an interval of it, which is a text then."""
        node = nodes.apply(place)
        whole = node if cast is None else cast.withNewChildren(nodes.slice(place, place + 1))
        if (interval := constant_of(whole)) is not None:
            return self._constant(interval[0])
        match class_name(node):
            case "Cast" if cast is None:
                return self.of(node.children(), 0, node)
            case "CaseWhen" | "If":
                return self._chosen(node.children(), cast)
            case "Coalesce":
                parts = node.children()
                gaps = (self.of(parts, place, cast) for place in range(parts.size()))
                return Call("coalesce", tuple(gaps), pa.int64())
            case "MakeInterval":
                return self._made(children(node))
        raise refused(
            node,
            "is no gap that a stream can compute (say a text, such as '5 minutes', choose among"
            " such with when(...).otherwise(...), or say make_interval(...) of whole numbers)",
        )

    def _constant(self, interval: JavaObject | None) -> Expression:
        if interval is None:
            return Literal(pa.scalar(None, pa.int64()))
        months, days, micros = interval_parts(interval)
        zone = zone_of(self._adding)
        if self._moments.type == TIMESTAMP_NTZ:  # whose days have 24 hours everywhere
            zone = text_literal("UTC")
        if not months and (not days or zone.value.as_py() == "UTC"):
            return Literal(pa.scalar(days * DAY_MICROS + micros, pa.int64()))
        # A day may have 23 hours, and a month has as many days as it has.
        parts = [Literal(pa.scalar(part, pa.int64())) for part in (months, days, micros)]
        later = Call("add_interval", (self._moments, *parts, zone), self._moments.type)
        times = (Call("unix_micros", (each,), pa.int64()) for each in (later, self._moments))
        return Call("subtract", tuple(times), pa.int64())

    def _chosen(self, parts: JavaObject, cast: JavaObject | None) -> Expression:
        """Conditions and values take turns; at the end there may be a value for all others."""
        count = parts.size()
        chosen = [
            self.of(parts, place, cast)
            if place % 2 or place == count - 1
            else self._translator.translate(parts.apply(place))
            for place in range(count)
        ]
        if count % 2 == 0:
            chosen.append(Literal(pa.scalar(None, pa.int64())))
        return Call("case", tuple(chosen), pa.int64())

    def _made(self, parts: list[JavaObject]) -> Expression:
        *calendar, hours, minutes, seconds = parts
        if any(constant_of(part) != [0] for part in calendar):
            raise refused(self._adding, "adds what is longer than hours, row by row")
        units = ((hours, 3_600_000_000), (minutes, 60_000_000), (seconds, 1_000_000))
        first, *rest = (self._times(part, micros) for part, micros in units)
        for product in rest:
            first = Call("add", (first, product), pa.int64())
        return first

    def _times(self, part: JavaObject, micros: int) -> Expression:
        if class_name(part) == "Cast":  # seconds are decimals
            part = part.child()
        number = self._translator.translate(part)
        if isinstance(number, Literal):
            value = number.value.as_py()
            micros_made = None if value is None else int(value * micros)
            return Literal(pa.scalar(micros_made, pa.int64()))
        if not types.is_integer(number.type):
            raise refused(part, "is not a whole number, and a gap is made of such in a stream")
        if number.type != pa.int64():
            number = Call("cast", (number, text_literal("UTC")), pa.int64())
        return Call("multiply", (number, Literal(pa.scalar(micros, pa.int64()))), pa.int64())
