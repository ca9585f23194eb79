"""Whether the rows of a stream are final, or new values of older ones: decided here for all.

Theory of operation: an aggregate that is asked for changes sends a row for a key again and again.
What looks at one row at a time passes such rows on as what they are. What remembers rows, or counts
them, would take each new value for one more row: it takes final rows only, and so sends only such.
Where event time ends its groups, an aggregate can wait and send each row once. Which of the two it
does is said by the output mode, when the job is started; until then it is known what it can do.
"""

from __future__ import annotations

from stillframe.graph.logical import (
    Aggregate,
    DropDuplicates,
    Enrich,
    Join,
    Late,
    LoopHead,
    Node,
    Process,
    Transform,
    Union,
    WithWatermark,
    walk,
)

_TAKES_FINAL_ROWS = (Aggregate, DropDuplicates, Join, LoopHead, Process, Transform, Union)


def has_watermark(node: Node) -> bool:
    """Whether event time comes to it from somewhere; what came too late has none."""
    nodes = walk([node], through_late=False)
    return any(isinstance(each.operator, WithWatermark) for each in nodes)


def can_close(aggregate: Node) -> bool:
    """Whether event time comes to an end of each of its groups."""
    operator = aggregate.operator
    assert isinstance(operator, Aggregate), operator
    return operator.window is not None and has_watermark(aggregate)


def sends_updates(node: Node) -> bool:
    """Whether a row of it may be a new value of an older one, as its aggregates are now."""
    return any(not _emits_closed(each) for each in _passed_on(node))


def can_be_final(node: Node) -> bool:
    """Whether there is an output mode in which each of its rows is final."""
    return all(can_close(each) for each in _passed_on(node))


def given_updates(last: Node) -> list[Node]:
    """What stands before the last node and is given new values of older rows, as it is now."""
    return [
        node
        for node in walk([last])
        if isinstance(node.operator, _TAKES_FINAL_ROWS) and any(map(sends_updates, node.inputs))
    ]


def _emits_closed(aggregate: Node) -> bool:
    assert isinstance(aggregate.operator, Aggregate)
    return aggregate.operator.emits_closed


def _passed_on(node: Node) -> list[Node]:
    """The aggregates whose rows come out of the node as they left them, one by one."""
    match node.operator:
        case Aggregate():
            return [node]
        case Late():
            return []
        case operator if isinstance(operator, _TAKES_FINAL_ROWS):
            return []
        case Enrich():  # a new value of the second input makes no row
            return _passed_on(node.inputs[0])
        case _:
            return [each for upstream in node.inputs for each in _passed_on(upstream)]
