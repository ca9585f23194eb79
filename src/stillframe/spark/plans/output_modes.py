"""What `outputMode` makes of the aggregates that feed the sinks of one job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stillframe.errors import BuildError
from stillframe.graph.finality import given_updates
from stillframe.graph.logical import Aggregate, Node, moved, walk
from stillframe.graph.plan import describe

if TYPE_CHECKING:
    from stillframe.spark.writer import StreamWriter


def refuse_updates_in_chains(last: Node, mode: str) -> None:
    """Spark's words: what an aggregation gives is final only in append mode."""
    if mode == "append":
        return
    for node in given_updates(last):
        raise BuildError(
            "Detected pattern of possible 'correctness' issue due to global watermark. The query"
            " contains stateful operation which can emit rows older than the current watermark plus"
            ' allowed late record delay, which are "late rows" in downstream stateful operations'
            f" and these rows can be discarded: with outputMode {mode!r} the aggregation before"
            f" {describe(node.operator)} gives new values of older rows; say .outputMode('append')"
        )


def with_output_modes(writers: Sequence[StreamWriter], sinks: Sequence[Node]) -> list[Node]:
    """The sinks of one job, fed by aggregates that emit what the writers' output modes ask for.

    All at once: two sinks that share an aggregate must share the one that takes its place.
    """
    modes: dict[int, str] = {}
    for writer in writers:
        for node in writer.aggregates():
            other = modes.setdefault(id(node), writer.output_mode)
            if other != writer.output_mode:
                raise BuildError(
                    f"one aggregation is written both with outputMode {other!r} and with"
                    f" {writer.output_mode!r}, but it is either written once, when its windows are"
                    " closed, or whenever it changes, or as a whole: give the writers one output"
                    " mode, or start two jobs"
                )
    made: dict[int, Node] = {}
    for node in walk(sinks):
        fed = moved(node, made)
        made[id(node)] = _emitting(fed, modes.get(id(node), "update"))
    return [made[id(sink)] for sink in sinks]


def _emitting(node: Node, mode: str) -> Node:
    if not isinstance(node.operator, Aggregate) or mode == "update":
        return node
    appends = mode == "append"
    operator = replace(node.operator, emits_closed=appends, emits_all=not appends)
    return Node(operator, node.schema, node.inputs, node.given_uid, node.parallelism)
