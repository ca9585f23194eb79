"""The physical plan: the graph cut into tasks, and the channels between them. Frozen, picklable.

Theory of operation
-------------------
Operators that can hand batches to each other by a plain call are chained into one *task*: a tree
of operators that starts with a source or an input and fans out to further operators, sinks and
*edges*. An edge leads to another task, from each of its subtasks to each of the other's, by the
hash of keys or in turn. Subtask i of every task runs in slot i.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from stillframe.errors import BuildError
from stillframe.graph.logical import Aggregate, MapInArrow, Node, Operator, Read, Write, walk
from stillframe.graph.pruning import columns_read
from stillframe.ids import OperatorUid, SubtaskIndex


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Whole batches go to the subtasks in turn."""


@dataclass(frozen=True, slots=True)
class HashBy:
    """Each record goes to the subtask that owns its key group."""

    keys: tuple[str, ...]


Partitioning = Rebalance | HashBy


class SubtaskRef(NamedTuple):
    """One subtask of one task, for the whole job."""

    task: int
    subtask: SubtaskIndex


@dataclass(frozen=True, slots=True)
class PlannedOperator:
    """An operator of a task; `chained` are positions in the task, `edges` positions in the plan."""

    uid: OperatorUid
    operator: Operator
    input_schema: pa.Schema
    schema: pa.Schema
    chained: tuple[int, ...]
    edges: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """A tree of chained operators; the first one takes the input."""

    index: int
    name: str
    operators: tuple[PlannedOperator, ...]
    parallelism: int
    input_edges: tuple[int, ...]

    @property
    def has_sinks(self) -> bool:
        return any(isinstance(planned.operator, Write) for planned in self.operators)

    def subtasks(self) -> Iterator[SubtaskRef]:
        return (SubtaskRef(self.index, SubtaskIndex(i)) for i in range(self.parallelism))


@dataclass(frozen=True, slots=True)
class Edge:
    """All channels from one operator to one task; their ids start at `first_channel`."""

    index: int
    source_task: int
    target_task: int
    partitioning: Partitioning
    schema: pa.Schema
    source_parallelism: int
    target_parallelism: int
    first_channel: int
    combines: Aggregate | None = None
    """What the target task does with the records: they may be combined for it before they leave."""

    def targets(self) -> list[SubtaskIndex]:
        return [SubtaskIndex(i) for i in range(self.target_parallelism)]

    def sources(self) -> list[SubtaskIndex]:
        return [SubtaskIndex(i) for i in range(self.source_parallelism)]

    def channel_id(self, source: SubtaskIndex, target: SubtaskIndex) -> int:
        return self.first_channel + source * self.target_parallelism + target


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a slot needs to know about the job's shape."""

    job: str
    tasks: tuple[Task, ...]
    edges: tuple[Edge, ...]
    max_parallelism: int

    @property
    def slots(self) -> int:
        return max(task.parallelism for task in self.tasks)

    def subtasks(self) -> frozenset[SubtaskRef]:
        return frozenset(ref for task in self.tasks for ref in task.subtasks())

    def operators(self) -> Iterator[tuple[Task, PlannedOperator]]:
        return ((task, planned) for task in self.tasks for planned in task.operators)

    def explain(self) -> str:
        """The plan as text, for people."""
        plural = "" if self.slots == 1 else "s"
        lines = [f"{self.job}: {self.slots} slot{plural}, {self.max_parallelism} key groups"]
        for task in self.tasks:
            lines.append(f"task {task.index} x{task.parallelism}: {task.name}")
            for planned in task.operators:
                fanout = [self.edges[index] for index in planned.edges]
                lines.append(f"    {describe(planned.operator)}  [{planned.uid}]")
                lines += [
                    f"      --{_in_words(edge.partitioning)}--> task {edge.target_task}"
                    for edge in fanout
                ]
        return "\n".join(lines)


def build_plan(job: str, sinks: Sequence[Node], slots: int, max_parallelism: int = 128) -> Plan:
    """Cut the graph that leads to these sinks into tasks for this many slots."""
    if not sinks:
        raise BuildError(f"job {job!r} has no sink: start it from a writeStream")
    nodes = walk(sinks)
    _refuse_ambiguous_uids(nodes)
    return _Planner(job, nodes, slots, max_parallelism).plan()


def _refuse_ambiguous_uids(nodes: Sequence[Node]) -> None:
    seen: dict[str, Node] = {}
    for node in nodes:
        other = seen.setdefault(node.uid, node)
        if other is node or not (_is_stateful(node) or node.given_uid):
            continue
        if node.given_uid:
            raise BuildError(
                f"two operators have the uid {node.uid!r} ({describe(other.operator)} and"
                f" {describe(node.operator)}): give each its own"
            )
        raise BuildError(
            f"two operators of the same kind stand in the same place ({describe(node.operator)}),"
            " so their state could be mixed up on restore: give each its own .uid(...)"
        )


def _is_stateful(node: Node) -> bool:
    return isinstance(node.operator, Read | Aggregate | Write)


class _Planner:
    def __init__(self, job: str, nodes: Sequence[Node], slots: int, max_parallelism: int) -> None:
        self._job = job
        self._nodes = nodes
        self._slots = slots
        self._max_parallelism = max_parallelism
        self._parallelism: dict[int, int] = {}
        for node in nodes:
            self._parallelism[id(node)] = self._parallelism_of(node)
        self._heads = [node for node in nodes if not self._is_chained(node)]
        self._task_of = self._assign_tasks()
        self._edges: list[Edge] = []

    def plan(self) -> Plan:
        self._connect()
        tasks = tuple(self._task(index, head) for index, head in enumerate(self._heads))
        return Plan(self._job, tasks, tuple(self._edges), self._max_parallelism)

    def _parallelism_of(self, node: Node) -> int:
        """A source or a keyed operator spreads over all slots; the others stay with their input."""
        if node.parallelism is not None:
            wanted = node.parallelism
        elif isinstance(node.operator, Aggregate) and not node.operator.keys:
            wanted = 1
        elif isinstance(node.operator, Read | Aggregate):
            wanted = self._slots
        else:
            wanted = max(self._parallelism[id(upstream)] for upstream in node.inputs)
        if isinstance(node.operator, Aggregate) and not node.operator.keys and wanted > 1:
            raise BuildError(
                f"{describe(node.operator)} has parallelism {wanted}, but an aggregate without keys"
                " is one value and runs once: leave its parallelism out, or group by something"
            )
        if wanted > self._max_parallelism and isinstance(node.operator, Aggregate):
            raise BuildError(
                f"{describe(node.operator)} has parallelism {wanted}, but the job has only"
                f" {self._max_parallelism} key groups: lower it or raise maxParallelism"
            )
        return wanted

    def _is_chained(self, node: Node) -> bool:
        return (
            len(node.inputs) == 1
            and not isinstance(node.operator, Aggregate)
            and self._parallelism[id(node)] == self._parallelism[id(node.inputs[0])]
        )

    def _assign_tasks(self) -> dict[int, int]:
        task_of: dict[int, int] = {id(head): index for index, head in enumerate(self._heads)}
        for node in self._nodes:
            if id(node) not in task_of:
                task_of[id(node)] = task_of[id(node.inputs[0])]
        return task_of

    def _connect(self) -> None:
        first_channel = 0
        for target in self._heads:
            for source in target.inputs:
                edge = Edge(
                    index=len(self._edges),
                    source_task=self._task_of[id(source)],
                    target_task=self._task_of[id(target)],
                    partitioning=_partitioning(target),
                    schema=source.schema,
                    source_parallelism=self._parallelism[id(source)],
                    target_parallelism=self._parallelism[id(target)],
                    first_channel=first_channel,
                    combines=target.operator if isinstance(target.operator, Aggregate) else None,
                )
                first_channel += edge.source_parallelism * edge.target_parallelism
                self._edges.append(edge)

    def _task(self, index: int, head: Node) -> Task:
        members = [node for node in self._nodes if self._task_of[id(node)] == index]
        position = {id(node): place for place, node in enumerate(members)}
        assert position[id(head)] == 0, "a task begins with its head"
        operators = tuple(
            PlannedOperator(
                uid=node.uid,
                operator=self._operator(node),
                input_schema=node.inputs[0].schema if node.inputs else node.schema,
                schema=node.schema,
                chained=tuple(
                    position[id(reader)]
                    for reader in members
                    if reader is not head and reader.inputs[0] is node
                ),
                edges=tuple(self._edges_from(node)),
            )
            for node in members
        )
        name = " -> ".join(describe(node.operator) for node in members)
        input_edges = tuple(e.index for e in self._edges if e.target_task == index)
        return Task(index, name, operators, self._parallelism[id(head)], input_edges)

    def _operator(self, node: Node) -> Operator:
        if isinstance(node.operator, Read):
            return Read(node.operator.source, columns_read(node, self._nodes))
        return node.operator

    def _edges_from(self, node: Node) -> Iterator[int]:
        edges = iter(self._edges)
        for target in self._heads:
            for source in target.inputs:
                edge = next(edges)
                if source is node:
                    yield edge.index


def _partitioning(target: Node) -> Partitioning:
    if isinstance(target.operator, Aggregate):
        return HashBy(target.operator.keys)
    return Rebalance()


def _in_words(partitioning: Partitioning) -> str:
    match partitioning:
        case Rebalance():
            return "rebalance"
        case HashBy(keys):
            return f"hash({', '.join(keys)})"


def describe(operator: Operator) -> str:
    """An operator in a few words, for plans, logs and errors."""
    match operator:
        case Read(source):
            return f"read {source.describe()}"
        case Write(sink):
            return f"write {sink.describe()}"
        case MapInArrow(name=name):
            return f"map {name}"
        case Aggregate(keys, calls):
            made = ", ".join(f"{call.function}({call.input or '*'})" for call in calls)
            return f"aggregate {made} by {', '.join(keys)}" if keys else f"aggregate {made}"
        case _:
            return type(operator).__name__.lower()
