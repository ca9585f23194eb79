"""The logical graph: operators and what feeds them. Frozen, picklable, free of Spark.

A `Node` is an operator in its place: it knows its inputs, its uid and its parallelism. The session
in `spark/`, the tests and the simulator build nodes directly; `graph/plan.py` makes them runnable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.api.functions import TwoInputFunction
from stillframe.api.sinks import Sink
from stillframe.api.sources import Source
from stillframe.api.windows import WINDOW as WINDOW
from stillframe.api.windows import Window as Window
from stillframe.errors import BuildError
from stillframe.graph.expressions import Expression, Named
from stillframe.ids import OperatorUid


@dataclass(frozen=True, slots=True)
class Read:
    """Emit the records of a source."""

    source: Source
    columns: tuple[str, ...] | None = None
    """Those that somebody reads, as the plan finds out; None: all."""


@dataclass(frozen=True, slots=True)
class Project:
    """Compute new columns from the old ones."""

    columns: tuple[Named, ...]


@dataclass(frozen=True, slots=True)
class Filter:
    """Keep the records for which the condition is true."""

    condition: Expression


@dataclass(frozen=True, slots=True)
class MapInArrow:
    """Call the user's function with an iterator over one batch; emit what it yields."""

    function: Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]
    name: str


@dataclass(frozen=True, slots=True)
class WithWatermark:
    """Say how far event time has come: as far as the newest record, less a delay."""

    time: str
    """The column with the event time, a timestamp in microseconds."""
    delay_us: int


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Keep running aggregates per key; emit, per batch, the new values of each key it touched."""

    keys: tuple[str, ...]
    calls: tuple[AggregateCall, ...]
    window: Window | None = None
    """Per window as well as per key; a window that event time has passed is dropped."""
    emits_closed: bool = False
    """Emit the values of a window once, when event time has passed it (output mode append)."""


@dataclass(frozen=True, slots=True)
class Connect:
    """Call the user's function with the batches of two inputs."""

    make: Callable[[], TwoInputFunction]
    name: str
    keys: tuple[str, ...] | None
    """By which both inputs are parted; None: the second input goes to every subtask whole."""


@dataclass(frozen=True, slots=True)
class Union:
    """Whatever any of the inputs emits. Not a step of its own: its reader has several inputs."""


@dataclass(frozen=True, slots=True)
class LoopHead:
    """Where the records of a cycle come back to, among those that enter it."""


@dataclass(frozen=True, slots=True)
class CloseLoop:
    """The first input leaves the cycle; the second goes back to its head."""

    head: Node


@dataclass(frozen=True, slots=True)
class Write:
    """Hand the records to a sink."""

    sink: Sink


Operator = (
    Read
    | Project
    | Filter
    | MapInArrow
    | Aggregate
    | WithWatermark
    | Connect
    | Union
    | LoopHead
    | CloseLoop
    | Write
)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """An operator in its place in the graph."""

    operator: Operator
    schema: pa.Schema
    """Of what it emits; of what it takes, for a sink."""
    inputs: tuple[Node, ...] = ()
    given_uid: str | None = None
    parallelism: int | None = None
    """None: as many subtasks as the job has slots."""
    uid: OperatorUid = field(init=False)

    def __post_init__(self) -> None:
        if self.parallelism is not None and self.parallelism < 1:
            raise BuildError(
                f"parallelism must be at least 1, not {self.parallelism}: give a positive number"
            )
        uid = self.given_uid or _derived_uid(self.operator, self.inputs)
        object.__setattr__(self, "uid", OperatorUid(uid))

    @property
    def kind(self) -> str:
        return type(self.operator).__name__.lower()

    def with_uid(self, uid: str) -> Node:
        return Node(self.operator, self.schema, self.inputs, uid, self.parallelism)

    def with_parallelism(self, parallelism: int) -> Node:
        return Node(self.operator, self.schema, self.inputs, self.given_uid, parallelism)


def _derived_uid(operator: Operator, inputs: tuple[Node, ...]) -> str:
    """A uid that follows from the kind and from what is upstream.

    Never from a running index: inserting an operator must show as a mismatch on restore and not
    silently give one operator's state to another.
    """
    kind = type(operator).__name__.lower()
    described = "|".join([kind, _place_outside(operator), *(node.uid for node in inputs)])
    return f"{kind}-{hashlib.blake2b(described.encode(), digest_size=6).hexdigest()}"


def _place_outside(operator: Operator) -> str:
    """Several sources, or several sinks on one stream, are told apart by what they are tied to."""
    match operator:
        case Read(source):
            return source.describe()
        case Write(sink):
            return sink.describe()
        case _:
            return ""


def moved(node: Node, new: Mapping[int, Node]) -> Node:
    """The same operator, fed by what stands in `new` for its inputs; itself if that is the same.

    `new` is by the identity of the old nodes.
    """
    inputs = tuple(new[id(upstream)] for upstream in node.inputs)
    operator = node.operator
    if isinstance(operator, CloseLoop):
        operator = CloseLoop(new[id(operator.head)])
    if inputs == node.inputs and operator == node.operator:
        return node
    return Node(operator, node.schema, inputs, node.given_uid, node.parallelism)


def replaced(last: Node, old: Node, new: Node) -> Node:
    """The graph that ends in `last`, with `new` in the place of `old`."""
    made = {id(old): new}
    for node in walk([last]):
        if node is not old:
            made[id(node)] = moved(node, made)
    return made[id(last)]


def walk(sinks: Iterable[Node]) -> list[Node]:
    """Every node from which a sink can be reached, inputs before what they feed."""
    ordered: dict[int, Node] = {}

    def visit(node: Node) -> None:
        if id(node) in ordered:
            return
        for upstream in node.inputs:
            visit(upstream)
        ordered[id(node)] = node

    for sink in sinks:
        visit(sink)
    return list(ordered.values())
