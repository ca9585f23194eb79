"""By what an operator without a given uid is known again in a changed job.

Its uid is derived from all that stands in front of it, so a filter more makes another one of it.
What it keeps state by, and the operators with state that feed it, stay the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from stillframe.errors import BuildError
from stillframe.graph.logical import (
    Aggregate,
    CloseLoop,
    DropDuplicates,
    Filter,
    Join,
    Lookup,
    MapInArrow,
    Node,
    Operator,
    Project,
    Read,
    SessionWindow,
    Union,
    WithWatermark,
    Write,
    keys_of,
    moved,
    walk,
)
from stillframe.ids import OperatorUid

_SEEN_THROUGH = (Project, Filter, MapInArrow, Lookup)
"""Steps that keep nothing. (What comes too late for an operator is not what it emits.)"""


def feeding(node: Node) -> list[tuple[int, Node]]:
    """The operators whose records a node gets, each with the input it gets them on."""
    return [
        (place, source)
        for place, upstream in enumerate(node.inputs)
        for source in sources_behind(upstream)
    ]


def sources_behind(node: Node) -> list[Node]:
    """The operators that emit the records of this node: a union or the end of a cycle is none."""
    match node.operator:
        case Union():
            return [source for upstream in node.inputs for source in sources_behind(upstream)]
        case CloseLoop():
            return sources_behind(node.inputs[0])
        case _:
            return [node]


def traits_of(node: Node) -> str | None:
    """What is the operator's own, in words; None if its uid was given."""
    if node.given_uid is not None:
        return None
    match node.operator:
        case Read(source):
            return source.tied_to
        case Write(sink):
            return sink.tied_to or ""
        case WithWatermark(time):
            return f"of {time}"
        case operator if isinstance(operator, _SEEN_THROUGH):
            return _steps(node)
        case operator:
            return _kept_by(operator)


def fed_by(node: Node) -> tuple[tuple[OperatorUid, ...], ...]:
    """Of each input: the operators that feed it, seen through steps that keep nothing.

    Not told of what has a given uid, nor of what is tied to something outside of the job: that is
    enough to know it by.
    """
    is_tied = isinstance(node.operator, Write) and node.operator.sink.tied_to is not None
    if node.given_uid is not None or is_tied:
        return ()
    return tuple(_seen_from(upstream) for upstream in node.inputs)


def told_apart(sinks: Sequence[Node]) -> list[Node]:
    """The same graph, in which operators of one kind in one place have uids by what they do too.

    Never by their order: what takes another's place must show as a mismatch on restore.
    """
    alike: dict[str, dict[int, str]] = {}
    for node in walk(sinks):
        what = _does(node.operator)
        if what is not None and node.given_uid is None:
            alike.setdefault(node.uid, {})[id(node)] = what
    several = {
        place: hashlib.blake2b(what.encode(), digest_size=3).hexdigest()
        for each in alike.values()
        if len(set(each.values())) == len(each) > 1
        for place, what in each.items()
    }
    made: dict[int, Node] = {}
    for node in walk(sinks):
        here = moved(node, made)
        if id(node) in several:
            here = here.with_uid(f"{here.uid}-{several[id(node)]}")
        made[id(node)] = here
    return [made[id(sink)] for sink in sinks]


def _does(operator: Operator) -> str | None:
    """What it does, in words that are the same in every process; None: its function says it."""
    match operator:
        case Aggregate(keys, calls, window):
            return repr((keys, calls, window))
        case DropDuplicates() | Join() | WithWatermark():
            return repr(operator)
        case _:
            return None


def refuse_functions_alike(nodes: Iterable[Node]) -> None:
    """Nothing tells two functions on one stream apart but their names, which may change."""
    by_stream: dict[tuple[tuple[OperatorUid, ...], ...], list[Node]] = {}
    for node in nodes:
        if isinstance(node.operator, Write) and traits_of(node) == "":
            by_stream.setdefault(fed_by(node), []).append(node)
    for alike in by_stream.values():
        if len(alike) > 1:
            names = " and ".join(_sink_name(node) for node in alike)
            lines = " and ".join(f'.uid("{node.uid}")' for node in alike)
            raise BuildError(
                f"{names} take the records of one stream, so what one has not committed could go"
                f" to the other after a change of the job: add {lines} to their writeStream, in"
                " this order, or uids of your own for a new job"
            )


def _seen_from(node: Node) -> tuple[OperatorUid, ...]:
    found: dict[OperatorUid, None] = {}
    for source in sources_behind(node):
        is_step = isinstance(source.operator, _SEEN_THROUGH)
        uids = _seen_from(source.inputs[0]) if is_step else (source.uid,)
        found |= dict.fromkeys(uids)
    return tuple(found)


def _steps(node: Node) -> str:
    """The way from what feeds it: several steps between the same two operators differ in it."""
    names = [type(node.operator).__name__.lower()]
    sources = sources_behind(node.inputs[0])
    while len(sources) == 1 and isinstance(sources[0].operator, _SEEN_THROUGH):
        names.append(type(sources[0].operator).__name__.lower())
        sources = sources_behind(sources[0].inputs[0])
    return " after ".join(names)


def _kept_by(operator: Operator) -> str:
    match operator:
        case Join(left=left, right=right):
            return f"{_by(left.keys)} and {_by(right.keys)}"
        case Aggregate(keys=keys, window=SessionWindow(time=time)):
            return f"{_by(keys)} in sessions of {time}"
        case Aggregate(keys=keys, window=window) if window is not None:
            assert not isinstance(window, SessionWindow)
            size, slide, start = (
                f"{us / 1e6:g} s" for us in (window.size_us, window.slide_us, window.start_us)
            )
            return f"{_by(keys)} in windows of {size} every {slide} from {start} of {window.time}"
        case _:
            return _by(keys_of(operator) or ())


def _by(keys: Sequence[str]) -> str:
    return f"by {', '.join(keys)}" if keys else "as one"


def _sink_name(node: Node) -> str:
    assert isinstance(node.operator, Write)
    return node.operator.sink.describe()
