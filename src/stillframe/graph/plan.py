"""The physical plan: the graph cut into tasks, and the channels between them. Frozen, picklable.

Theory of operation
-------------------
Operators that can hand batches to each other by a plain call are chained into one *task*: a tree
of operators that starts with a source or an input and fans out to further operators, sinks and
*edges*. An edge leads to another task, from each of its subtasks to each of the other's, by the
hash of keys, in turn or all to all, or from each to its namesake. Subtask i of every task runs in
slot i.

A union is no operator: what reads it has an edge for each of the streams it joins. Neither is the
end of a cycle: it is an edge that leads back to the cycle's head, the only kind that leads back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.errors import BuildError
from stillframe.graph.logical import (
    Aggregate,
    CloseLoop,
    Connect,
    DropDuplicates,
    Enrich,
    Join,
    Late,
    Lookup,
    LoopHead,
    MapInArrow,
    Node,
    Operator,
    Process,
    ProcessStream,
    Project,
    Read,
    Transform,
    Union,
    WithWatermark,
    Write,
    keys_of,
    late_readers,
    notes_on,
    walk,
    without_twins,
)
from stillframe.graph.places import (
    fed_by,
    feeding,
    refuse_functions_alike,
    sources_behind,
    told_apart,
    traits_of,
)
from stillframe.graph.pruning import (
    columns_grouped_by,
    columns_read,
    with_columns_wanted,
    with_fields_read,
)
from stillframe.ids import OperatorUid, SubtaskIndex


@dataclass(frozen=True, slots=True)
class Rebalance:
    """Whole batches go to the subtasks in turn."""


@dataclass(frozen=True, slots=True)
class Forward:
    """All goes to the subtask of the same number: its channels never leave a slot."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Every subtask gets everything."""


@dataclass(frozen=True, slots=True)
class HashBy:
    """Each record goes to the subtask that owns its key group."""

    keys: tuple[str, ...]


Partitioning = Forward | Rebalance | Broadcast | HashBy


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
    traits: str | None = None
    """By what it is known again, with what feeds it; None: by its uid alone, which was given."""
    fed_by: tuple[tuple[OperatorUid, ...], ...] = ()


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
    name: str
    """By the uids at its ends, so that channel state finds its edge again in a changed plan."""
    source_task: int
    target_task: int
    partitioning: Partitioning
    schema: pa.Schema
    source_parallelism: int
    target_parallelism: int
    first_channel: int
    input: int = 0
    """Which input of the target's first operator it feeds."""
    is_feedback: bool = False
    """Whether it closes a cycle."""
    loops: tuple[int, ...] = ()
    """The cycles it is a part of, each by the task that is its head."""
    combines: Aggregate | None = None
    """What the target task does with the records: they may be combined for it before they leave."""

    def targets_of(self, source: SubtaskIndex) -> list[SubtaskIndex]:
        if isinstance(self.partitioning, Forward):
            return [source]
        return [SubtaskIndex(i) for i in range(self.target_parallelism)]

    def sources_of(self, target: SubtaskIndex) -> list[SubtaskIndex]:
        if isinstance(self.partitioning, Forward):
            return [target]
        return [SubtaskIndex(i) for i in range(self.source_parallelism)]

    def channel_id(self, source: SubtaskIndex, target: SubtaskIndex) -> int:
        if isinstance(self.partitioning, Forward):
            return self.first_channel + source
        return self.first_channel + source * self.target_parallelism + target

    @property
    def channels(self) -> int:
        if isinstance(self.partitioning, Forward):
            return self.source_parallelism
        return self.source_parallelism * self.target_parallelism


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

    def timed_edges(self) -> frozenset[int]:
        """Those with a `withWatermark` somewhere in front of them: event time comes on them."""
        timed: set[int] = set()
        before = -1
        while len(timed) > before:  # edges of cycles lead back
            before = len(timed)
            for task in self.tasks:
                timed.update(_timed_edges_of(task, bool(timed.intersection(task.input_edges))))
        return frozenset(timed)

    def explain(self) -> str:
        """The plan as text, for people."""
        plural = "" if self.slots == 1 else "s"
        lines = [f"{self.job}: {self.slots} slot{plural}, {self.max_parallelism} key groups"]
        for task in self.tasks:
            lines.append(f"task {task.index} x{task.parallelism}: {task.name}")
            for planned in task.operators:
                fanout = [self.edges[index] for index in planned.edges]
                lines.append(f"    {describe(planned.operator)}  [{planned.uid}]")
                lines += [f"      {note}" for note in notes_on(planned.operator)]
                lines += [
                    f"      --{_in_words(edge.partitioning)}--> task {edge.target_task}"
                    + (" (back)" if edge.is_feedback else "")
                    for edge in fanout
                ]
        return "\n".join(lines)


def _timed_edges_of(task: Task, is_timed: bool) -> Iterator[int]:
    timed = {0} if is_timed else set()
    for position, planned in enumerate(task.operators):  # what is chained stands behind
        if isinstance(planned.operator, WithWatermark):
            timed.add(position)
        if position in timed:
            timed.update(planned.chained)
            yield from planned.edges


def build_plan(job: str, sinks: Sequence[Node], slots: int, max_parallelism: int = 128) -> Plan:
    """Cut the graph that leads to these sinks into tasks for this many slots."""
    if not sinks:
        raise BuildError(f"job {job!r} has no sink: start it from a writeStream")
    _refuse_open_cycles(walk(sinks))
    nodes = walk(told_apart(without_twins(sinks)))
    _refuse_ambiguous_uids(nodes)
    refuse_functions_alike(nodes)
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


def _refuse_open_cycles(nodes: Sequence[Node]) -> None:
    heads = {id(node): node for node in nodes if isinstance(node.operator, LoopHead)}
    closed = {id(node.operator.head) for node in nodes if isinstance(node.operator, CloseLoop)}
    for place, head in heads.items():
        if place not in closed:
            raise BuildError(
                f"nothing is sent back to the head of the cycle {head.uid!r}: close the cycle and"
                " write what leaves it there, or leave the cycle out"
            )
    if not closed <= heads.keys():
        raise BuildError(
            "a cycle is closed whose head does not feed what is sent back: make both streams that"
            " close it from the one that opens it"
        )


def _refuse_wrong_cycles(tasks: Sequence[Task], edges: Sequence[Edge]) -> None:
    for edge in edges:
        source = tasks[edge.source_task].name
        if edge.is_feedback and not edge.loops:
            raise BuildError(
                f"{source} is sent back in a cycle that it does not come from: send back only what"
                " was in the cycle, and union the rest with what enters it"
            )
        if len(edge.loops) > 1:
            heads = " and ".join(tasks[loop].operators[0].uid for loop in edge.loops)
            raise BuildError(
                f"{source} is in two cycles ({heads}), but a cycle cannot stand within another:"
                " close the one before the other begins, or make one of both"
            )


def _is_stateful(node: Node) -> bool:
    stateful = Read | WithWatermark | Connect | ProcessStream | LoopHead | Write
    return isinstance(node.operator, stateful) or keys_of(node.operator) is not None


_IN_PASSING = (Union, CloseLoop)
"""What is an edge, or several, rather than an operator."""


class _Planner:
    def __init__(self, job: str, nodes: Sequence[Node], slots: int, max_parallelism: int) -> None:
        self._job = job
        self._all_nodes = nodes
        self._nodes = [node for node in nodes if not isinstance(node.operator, _IN_PASSING)]
        self._slots = slots
        self._max_parallelism = max_parallelism
        self._parallelism: dict[int, int] = {}
        for node in nodes:
            self._parallelism[id(node)] = self._parallelism_of(node)
        self._heads = [node for node in self._nodes if not self._is_chained(node)]
        self._task_of = self._assign_tasks()
        self._edges: list[Edge] = []
        self._edges_from: dict[int, list[int]] = {}

    def plan(self) -> Plan:
        self._connect()
        self._edges = _with_loops(self._edges)
        tasks = tuple(self._task(index, head) for index, head in enumerate(self._heads))
        _refuse_wrong_cycles(tasks, self._edges)
        return Plan(self._job, tasks, tuple(self._edges), self._max_parallelism)

    def _parallelism_of(self, node: Node) -> int:
        """A source or a keyed operator spreads over all slots; the others stay with their input."""
        if node.parallelism is not None:
            wanted = node.parallelism
        elif keys_of(node.operator) == ():
            wanted = 1
        elif isinstance(node.operator, Read) or keys_of(node.operator):
            wanted = self._slots
        elif isinstance(node.operator, Connect | CloseLoop):
            wanted = self._parallelism[id(node.inputs[0])]
        else:
            wanted = max(self._parallelism[id(upstream)] for upstream in node.inputs)
        if keys_of(node.operator) == () and wanted > 1:
            raise BuildError(
                f"{describe(node.operator)} has parallelism {wanted}, but an aggregate without keys"
                " is one value and runs once: leave its parallelism out, or group by something"
            )
        if wanted > self._max_parallelism and keys_of(node.operator) is not None:
            raise BuildError(
                f"{describe(node.operator)} has parallelism {wanted}, but the job has only"
                f" {self._max_parallelism} key groups: lower it or raise maxParallelism"
            )
        return wanted

    def _is_chained(self, node: Node) -> bool:
        """Not by whether the numbers happen to agree: edges must not come and go with the slots,
        or records under way on one could not be restored."""
        return (
            len(feeding(node)) == 1
            and node.parallelism is None
            and keys_of(node.operator) is None
            and not isinstance(node.operator, Connect | LoopHead)
        )

    def _assign_tasks(self) -> dict[int, int]:
        task_of: dict[int, int] = {id(head): index for index, head in enumerate(self._heads)}
        for node in self._nodes:
            if id(node) not in task_of:
                task_of[id(node)] = task_of[id(feeding(node)[0][1])]
        return task_of

    def _connect(self) -> None:
        for target in self._heads:
            for place, source in feeding(target):
                self._add_edge(source, target, place, is_feedback=False)
        for node in self._all_nodes:
            if isinstance(node.operator, CloseLoop):
                for source in sources_behind(node.inputs[1]):
                    self._add_edge(source, node.operator.head, 0, is_feedback=True)

    def _add_edge(self, source: Node, target: Node, place: int, is_feedback: bool) -> None:
        last = self._edges[-1] if self._edges else None
        edge = Edge(
            index=len(self._edges),
            name=self._edge_name(source, target, place),
            source_task=self._task_of[id(source)],
            target_task=self._task_of[id(target)],
            partitioning=self._partitioning(source, target, place),
            schema=source.schema,
            source_parallelism=self._parallelism[id(source)],
            target_parallelism=self._parallelism[id(target)],
            first_channel=last.first_channel + last.channels if last else 0,
            input=place,
            is_feedback=is_feedback,
            combines=self._combined_for(target),
        )
        assert not isinstance(target.operator, Late), "late records leave where they are noticed"
        self._edges.append(edge)
        self._edges_from.setdefault(id(source), []).append(edge.index)

    def _combined_for(self, target: Node) -> Aggregate | None:
        """Of records that are combined nothing is left to be read where they come too late."""
        if not isinstance(target.operator, Aggregate) or late_readers(target, self._all_nodes):
            return None
        return target.operator

    def _edge_name(self, source: Node, target: Node, place: int) -> str:
        name = f"{source.uid}>{target.uid}" + (f"/{place}" if place else "")
        taken = {edge.name for edge in self._edges}
        if name not in taken:
            return name
        # A stream in a union with itself.
        return next(again for n in count(1) if (again := f"{name}#{n}") not in taken)

    def _partitioning(self, source: Node, target: Node, place: int) -> Partitioning:
        keys = keys_of(target.operator, place)
        if keys is not None:
            return HashBy(keys)
        if isinstance(target.operator, Connect) and place == 1:
            return Broadcast()
        same = self._parallelism[id(source)] == self._parallelism[id(target)]
        return Forward() if same else Rebalance()

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
                    if reader is not head and feeding(reader)[0][1] is node
                ),
                edges=tuple(self._edges_from.get(id(node), ())),
                traits=traits_of(node),
                fed_by=fed_by(node),
            )
            for node in members
        )
        name = " -> ".join(describe(node.operator) for node in members)
        input_edges = tuple(e.index for e in self._edges if e.target_task == index)
        return Task(index, name, operators, self._parallelism[id(head)], input_edges)

    def _operator(self, node: Node) -> Operator:
        nodes = self._all_nodes
        if isinstance(node.operator, Project):
            return with_fields_read(node, node.operator, nodes)
        if isinstance(node.operator, MapInArrow):
            return with_columns_wanted(node, node.operator, nodes)
        if isinstance(node.operator, Read):
            columns, grouped_by = columns_read(node, nodes), columns_grouped_by(node, nodes)
            return Read(node.operator.source, columns, grouped_by)
        return node.operator


def _with_loops(edges: Sequence[Edge]) -> list[Edge]:
    """An edge belongs to a cycle if it can be reached from its head and the head from it."""
    heads = sorted({edge.target_task for edge in edges if edge.is_feedback})
    ahead = {head: _reachable(head, edges) for head in heads}
    return [
        replace(
            edge,
            loops=tuple(
                head
                for head in heads
                if edge.source_task in ahead[head] and head in _reachable(edge.target_task, edges)
            ),
        )
        for edge in edges
    ]


def _reachable(task: int, edges: Sequence[Edge]) -> set[int]:
    found = {task}
    waiting = [task]
    while waiting:
        here = waiting.pop()
        ahead = {edge.target_task for edge in edges if edge.source_task == here} - found
        found |= ahead
        waiting += ahead
    return found


def _in_words(partitioning: Partitioning) -> str:
    match partitioning:
        case Forward():
            return "forward"
        case Rebalance():
            return "rebalance"
        case Broadcast():
            return "broadcast"
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
        case Connect(name=name, keys=keys):
            return f"connect {name}" + (f" by {', '.join(keys)}" if keys else "")
        case ProcessStream(name=name):
            return f"process {name}"
        case Process(name=name, keys=keys):
            return f"process {name} by {', '.join(keys)}"
        case Transform(name=name, keys=keys):
            return f"transform {name} by {', '.join(keys)}"
        case DropDuplicates(keys):
            return f"drop duplicates of {', '.join(keys)}"
        case Join(how, left, right):
            pairs = zip(left.keys, right.keys, strict=True)
            return f"{how} join on {', '.join(f'{a} = {b}' for a, b in pairs)}"
        case Lookup(how=how, keys=keys):
            return f"{how} join with a table on {', '.join(keys)}"
        case Enrich(keys=keys):
            return f"join with the newest row by {', '.join(keys)}"
        case WithWatermark(time, delay_us):
            return f"watermark {time} - {delay_us / 1e6:g} s"
        case LoopHead():
            return "head of a cycle"
        case Late():
            return "what came too late"
        case Aggregate(keys, calls):
            made = ", ".join(map(_described_call, calls))
            return f"aggregate {made} by {', '.join(keys)}" if keys else f"aggregate {made}"
        case _:
            return type(operator).__name__.lower()


def _described_call(call: AggregateCall) -> str:
    return f"{call.function}({'DISTINCT ' * call.is_distinct}{call.input or '*'})"
