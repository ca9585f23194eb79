"""Where in the user's program something of a plan was written, as far as Spark has noted it.

Spark keeps the file and line of each function of columns, and of SQL the line in its text. Of other
steps, such as a join without a condition, it keeps nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JError

from stillframe.errors import BuildError
from stillframe.spark.steps import children, sequence


class Placed(BuildError):
    """One whose sentence says where in the program the mistake is."""


def placed(sentence: str, parts: Iterable[JavaObject]) -> BuildError:
    """The error, with the first place that is known of these expressions or of what is in them."""
    place = next((found for part in parts for found in _places_in(part)), None)
    return BuildError(sentence) if place is None else Placed(f"{sentence} ({place})")


def parts_of(plan: JavaObject) -> list[JavaObject]:
    """The expressions of a node, without those below it."""
    return sequence(plan.expressions())


def _places_in(node: JavaObject) -> Iterator[str]:
    place = _place_of(node)
    if place is not None:
        yield place
    for child in children(node):
        yield from _places_in(child)


def _place_of(node: JavaObject) -> str | None:
    try:
        origin = node.origin()
        called = origin.pysparkErrorContext()
        if called.isDefined():
            return _in_words(str(called.get()._2()))
        line, column = origin.line(), origin.startPosition()
        # Of some expressions Spark says where the whole text begins.
        if line.isEmpty() or (line.get(), column.get()) == (1, 0):
            return None
        return f"line {line.get()} of the SQL text"
    except Py4JError:
        return None  # it would only have helped


def _in_words(call_site: str) -> str | None:
    """Spark says `/home/ann/job.py:12`; in a notebook `line 3 in cell [7]`."""
    first = call_site.partition("\n")[0]
    file, colon, line = first.rpartition(":")
    if colon and line.isdigit():
        return f"{os.path.basename(file)}, line {line}"
    return first or None
