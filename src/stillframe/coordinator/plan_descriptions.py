"""A plan in the words of `protocol/`, which knows no graphs: its operators and its edges."""

from __future__ import annotations

from stillframe.graph.plan import (
    Broadcast,
    Forward,
    HashBy,
    Partitioning,
    Plan,
    Rebalance,
    Task,
    describe,
)
from stillframe.protocol.manifests import OperatorDescription, Place
from stillframe.protocol.restore import ChannelKind, EdgeDescription
from stillframe.protocol.statistics import TaskShape, vertex_id


def vertex_of(task: Task) -> str:
    """The id of a task in Flink's paths."""
    return vertex_id(task.operators[0].uid)


def shapes_of(plan: Plan) -> tuple[TaskShape, ...]:
    """The tasks as figures of checkpoints name them."""
    return tuple(TaskShape(vertex_of(task), task.name, task.parallelism) for task in plan.tasks)


def describe_operators(plan: Plan) -> tuple[OperatorDescription, ...]:
    """The operators as metadata names them."""
    return tuple(
        OperatorDescription(
            planned.uid,
            type(planned.operator).__name__.lower(),
            describe(planned.operator),
            task.parallelism,
            Place(planned.traits, planned.fed_by) if planned.traits is not None else None,
        )
        for task, planned in plan.operators()
    )


def describe_edges(plan: Plan) -> list[EdgeDescription]:
    """The edges, as far as records under way are concerned."""
    return [
        EdgeDescription(
            edge.name,
            _channel_kind(edge.partitioning),
            plan.tasks[edge.target_task].operators[0].uid,
            edge.target_parallelism,
        )
        for edge in plan.edges
    ]


def _channel_kind(partitioning: Partitioning) -> ChannelKind:
    match partitioning:
        case Forward():
            return "forward"
        case Rebalance():
            return "rebalance"
        case Broadcast():
            return "broadcast"
        case HashBy():
            return "hash"
