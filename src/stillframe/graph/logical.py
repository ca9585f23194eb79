"""The logical graph: operators and what feeds them. Frozen, picklable, free of Spark.

A `Node` is an operator in its place: it knows its inputs, its uid and its parallelism. The session
in `spark/`, the tests and the simulator build nodes directly; `graph/plan.py` makes them runnable.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.api.functions import KeyedFunction, TwoInputFunction
from stillframe.api.programs import KeyedProgram
from stillframe.api.sinks import Sink
from stillframe.api.sources import Source
from stillframe.api.stream_functions import StreamFunction
from stillframe.api.windows import WINDOW as WINDOW
from stillframe.api.windows import SessionWindow as SessionWindow
from stillframe.api.windows import Window as Window
from stillframe.errors import BuildError
from stillframe.graph.expressions import (
    Expression,
    Named,
    SparkAggregate,
    SparkResult,
    StartValue,
    all_parts,
    by_chance,
    spark_results,
)
from stillframe.ids import OperatorUid


@dataclass(frozen=True, slots=True)
class Read:
    """Emit the records of a source."""

    source: Source
    columns: tuple[str, ...] | None = None
    """Those that somebody reads, as the plan finds out; None: all."""
    grouped_by: tuple[str, ...] = ()
    """Those of them that records are only grouped by."""


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


@runtime_checkable
class Selective(Protocol):
    """A function of `MapInArrow` that knows which columns it needs for those that are wanted."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterable[pa.RecordBatch]: ...

    def reads(self, wanted: Collection[str]) -> set[str]:
        """The columns that it looks at where somebody looks at these of its own."""

    def emitting(self, wanted: Collection[str]) -> Selective:
        """The same function, whose other columns may be null."""


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
    window: Window | SessionWindow | None = None
    """Per window as well as per key; a window that event time has passed is dropped."""
    emits_closed: bool = False
    """Emit the values of a window once, when event time has passed it (output mode append)."""
    emits_all: bool = False
    """Emit all values at each barrier; no window is dropped, and nothing is late (complete)."""


@dataclass(frozen=True, slots=True)
class Connect:
    """Call the user's function with the batches of two inputs."""

    make: Callable[[], TwoInputFunction]
    name: str
    keys: tuple[str, ...] | None
    """By which both inputs are parted; None: the second input goes to every subtask whole."""


@dataclass(frozen=True, slots=True)
class Process:
    """Call the user's function with the batches of one input, parted by key."""

    make: Callable[[], KeyedFunction]
    name: str
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProcessStream:
    """Call the user's function with the batches of one input, in whatever subtask they come to."""

    make: Callable[[], StreamFunction]
    name: str
    other_schema: Callable[[Any], pa.Schema] | None = None
    """The Arrow schema of one that is given to a state and is neither DDL nor Arrow's."""


TimeMode = Literal["none", "processingTime", "eventTime", "both"]
"""Which clocks a program's timers go by: in Spark's words, where it has no word for both."""


@dataclass(frozen=True, slots=True, eq=False)
class Transform:
    """Call the user's program with the rows of one key after the other; it has states by name."""

    make: Callable[[], KeyedProgram]
    name: str
    keys: tuple[str, ...]
    time_mode: TimeMode = "none"
    time: str | None = None
    """The event time: a record that is not after the watermark is late. None: nothing is."""
    initial: pa.Table | TableAtStart | None = None
    """What the program is told before the first rows; where a plan is run it has been read."""
    initial_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DropDuplicates:
    """Pass on the first record of each key."""

    keys: tuple[str, ...]
    time: str | None = None
    """The event time: a record that is not after the watermark is late. None: nothing is."""
    keep_us: int | None = None
    """How long after its event time a key is remembered; None: for ever."""


JoinKind = Literal["inner", "left", "right", "full", "semi"]


@dataclass(frozen=True, slots=True)
class JoinSide:
    """One input of a join."""

    keys: tuple[str, ...]
    time: str | None
    """Its event time; None where the join has no bound in time."""


@dataclass(frozen=True, slots=True)
class Join:
    """Pair the records of two inputs that have the same keys and meet the condition.

    It emits the columns of the left input, then those of the right one; of a semi join the left
    ones alone. No two have one name.
    """

    how: JoinKind
    left: JoinSide
    right: JoinSide
    earliest_us: int | None = None
    """The least that a right record's event time may be after the left one's; None: no limit."""
    latest_us: int | None = None
    """The most; None: no limit."""
    condition: Expression | None = None
    """What else must hold, over the columns of both; the bounds in time are part of it."""


class TableAtStart(Protocol):
    """A table that is read when the job starts, and is the same for all its attempts."""

    def read(self) -> pa.Table: ...


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """Pair records with the rows of a table that was read before.

    Emits the columns of the input, then those of the table; of a semi or anti join the former.
    """

    table: pa.Table | TableAtStart
    """Where a plan is run it has been read."""
    how: Literal["inner", "left", "semi", "anti"]
    keys: tuple[str, ...]
    table_keys: tuple[str, ...]
    condition: Expression | None = None
    refresh_seconds: float | None = None
    """How often the driver reads the table again; None: never."""


@dataclass(frozen=True, slots=True)
class Enrich:
    """Pair each record of the first input with the newest one of the second that has its keys.

    Emits the columns of the first, then those of the second.
    """

    how: Literal["inner", "left"]
    keys: tuple[str, ...]
    newest_keys: tuple[str, ...]
    newest_time: str | None
    """The event time by which the second's records are newer or older; None: as they come."""


@dataclass(frozen=True, slots=True)
class Late:
    """The records that came too late for its input, which is an operator of event time."""


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
    | Process
    | ProcessStream
    | Transform
    | DropDuplicates
    | Join
    | Lookup
    | Enrich
    | Late
    | Union
    | LoopHead
    | CloseLoop
    | Write
)


def expressions_in(operator: Operator) -> list[Expression]:
    """Those that the operator evaluates."""
    match operator:
        case Project(columns):
            return [column.expression for column in columns]
        case Filter(condition):
            return [condition]
        case Join(condition=condition) | Lookup(condition=condition) if condition is not None:
            return [condition]
        case _:
            return []


def evaluated_by_spark(operator: Operator) -> list[SparkResult]:
    """What of the operator's expressions and aggregates Spark's own evaluator computes."""
    if isinstance(operator, Aggregate):
        return [
            SparkResult(crossing, 0, call.type, given.sql)
            for call in operator.calls
            for given in call.parameters
            if isinstance(given, SparkAggregate)
            for crossing in given.crossings
        ]
    return spark_results(*expressions_in(operator))


def read_at_start(operator: Operator) -> list[StartValue]:
    """The subqueries among the operator's expressions."""
    return [each for each in all_parts(*expressions_in(operator)) if isinstance(each, StartValue)]


def notes_on(operator: Operator) -> list[str]:
    """What `explain` says below an operator, beside where its records go."""
    chance = by_chance(*expressions_in(operator))
    by_spark = dict.fromkeys(each.sql for each in evaluated_by_spark(operator))
    return [
        *(f"in Spark's evaluator: {each}" for each in by_spark),
        *(f"once at the start: {each.sql}" for each in read_at_start(operator)),
        *([f"{_how_often(operator)}: the table"] if isinstance(operator, Lookup) else []),
        *(f"another value after a recovery: {each}" for each in chance),
    ]


def _how_often(operator: Lookup) -> str:
    if operator.refresh_seconds is None:
        return "once at the start"
    return f"at the start and every {operator.refresh_seconds:g} s"


def keys_of(operator: Operator, place: int = 0) -> tuple[str, ...] | None:
    """The columns of an input by which the operator's state is parted; None: it is not."""
    match operator:
        case Aggregate(keys) | Process(keys=keys) | Transform(keys=keys) | DropDuplicates(keys):
            return keys
        case Connect(keys=keys):
            return keys
        case Join(left=left, right=right):
            return left.keys if place == 0 else right.keys
        case Enrich(keys=keys, newest_keys=newest_keys):
            return keys if place == 0 else newest_keys
        case _:
            return None


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


def without_twins(sinks: Sequence[Node]) -> list[Node]:
    """The same graph, in which operators that do the same with the same rows are one.

    Not those that have been given a name, which is wanted; nor sinks and cycles.
    """
    made: dict[int, Node] = {}
    known: dict[OperatorUid, list[Node]] = {}
    for node in walk(sinks):
        here = moved(node, made)
        alike = known.setdefault(here.uid, [])
        twin = next((each for each in alike if _are_twins(each, here)), None)
        if twin is None:
            alike.append(here)
        made[id(node)] = twin or here
    return [made[id(sink)] for sink in sinks]


def _are_twins(one: Node, other: Node) -> bool:
    return (
        not isinstance(one.operator, Write | LoopHead | CloseLoop | Late)
        and one.given_uid is None
        and other.given_uid is None
        and one.parallelism == other.parallelism
        and len(one.inputs) == len(other.inputs)
        and all(a is b for a, b in zip(one.inputs, other.inputs, strict=True))
        and one.operator == other.operator
    )


def late_readers(node: Node, nodes: Iterable[Node]) -> list[Node]:
    """Those of `nodes` that read what comes too late for this one."""
    return [each for each in nodes if isinstance(each.operator, Late) and each.inputs[0] is node]


def walk(sinks: Iterable[Node], *, through_late: bool = True) -> list[Node]:
    """Every node from which a sink can be reached, inputs before what they feed.

    Not `through_late`: without those of which only what comes too late reaches one.
    """
    ordered: dict[int, Node] = {}

    def visit(node: Node) -> None:
        if id(node) in ordered:
            return
        for upstream in node.inputs if through_late or not isinstance(node.operator, Late) else ():
            visit(upstream)
        ordered[id(node)] = node

    for sink in sinks:
        visit(sink)
    return list(ordered.values())
