"""The parts a simulated job is put together from: what becomes of records on their way.

Every shape answers the records it gets, each once, whatever way they take: two ways that are
joined again, a function that holds one record of each key back, one that listens to a broadcast
stream, or a cycle that records go round a few times, some of which join it on the way. So one
checker does for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stillframe.api.functions import TwoInputFunction
from stillframe.graph.logical import CloseLoop, Connect, LoopHead, MapInArrow, Node, Union
from stillframe.testing.simulation.outside import RECORD_SCHEMA

ShapeName = Literal["plain", "union", "connect", "broadcast", "loop", "joined-loop"]
Ids = npt.NDArray[np.int64]
Chosen = npt.NDArray[np.bool_]

_ROUND = 1_000_000_000
"""A record in a cycle carries in its id how often it has gone round."""
_CONTROL_EVERY = 5
"""One record in so many is told to everybody instead of passed on."""


def ids_of(batch: pa.RecordBatch) -> Ids:
    """The ids of records, without what a cycle has added to them."""
    found: Ids = batch.column("id").to_numpy() % _ROUND
    return found


def is_passed_on(shape: ShapeName, ids: Ids) -> Chosen:
    """Which records leave the shape in the end."""
    return ~_control(ids) if shape == "broadcast" else _all(ids)


def is_on_edge(edge: str, ids: Ids) -> Chosen:
    """Which records of those under way on an edge are not dropped at its end.

    The ways of a shape begin with a function that drops what goes the other way.
    """
    keeps = {"even": _even, "odd": _odd, "control": _control}
    target = edge.split(">")[1].split("-")[0]
    return keeps.get(target, _all)(ids)


def shaped(shape: ShapeName, node: Node, uid: str, parallelism: int | None) -> Node:
    """The records of this node, having gone through the shape."""
    match shape:
        case "plain":
            return node
        case "union":
            ways = (_kept(node, f"even-{uid}", _even, None), _kept(node, f"odd-{uid}", _odd, None))
            return Node(Union(), RECORD_SCHEMA, ways)
        case "connect":
            ways = (
                _kept(node, f"even-{uid}", _even, parallelism),
                _kept(node, f"odd-{uid}", _odd, None),
            )
            held = Connect(HoldOneBack, "hold-one-back", ("key",))
            return Node(held, RECORD_SCHEMA, ways, f"hold-{uid}")
        case "broadcast":
            control = _kept(node, f"control-{uid}", _control, parallelism)
            return Node(Connect(Listen, "listen", None), RECORD_SCHEMA, (node, control),
                        f"listen-{uid}")  # fmt: skip
        case "loop":
            head = Node(LoopHead(), RECORD_SCHEMA, (node,), f"head-{uid}")
            return _loop(head, head, uid, parallelism)
        case "joined-loop":
            even = _kept(node, f"even-{uid}", _even, None)
            head = Node(LoopHead(), RECORD_SCHEMA, (even,), f"head-{uid}")
            odd = _kept(node, f"odd-{uid}", _odd, None)
            return _loop(head, Node(Union(), RECORD_SCHEMA, (head, odd)), uid, parallelism)


def _kept(node: Node, uid: str, keeps: Callable[[Ids], Chosen], parallelism: int | None) -> Node:
    return Node(
        MapInArrow(partial(_filtered, keeps), uid), RECORD_SCHEMA, (node,), uid, parallelism
    )


def _filtered(
    keeps: Callable[[Ids], Chosen], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.filter(pa.array(keeps(batch.column("id").to_numpy())))


def _all(ids: Ids) -> Chosen:
    return np.ones(len(ids), dtype=np.bool_)


def _even(ids: Ids) -> Chosen:
    return np.equal(ids % 2, 0)


def _odd(ids: Ids) -> Chosen:
    return np.equal(ids % 2, 1)


def _control(ids: Ids) -> Chosen:
    return np.equal(ids % _CONTROL_EVERY, 0)


# --- a cycle ---------------------------------------------------------------------------------


def _loop(head: Node, entering: Node, uid: str, parallelism: int | None) -> Node:
    turn = MapInArrow(_turned, "turn")
    turned = Node(turn, RECORD_SCHEMA, (entering,), f"turn-{uid}", parallelism)
    back = _kept(turned, f"back-{uid}", _goes_back, None)
    left = Node(MapInArrow(_left, "leave"), RECORD_SCHEMA, (turned,), f"leave-{uid}")
    return Node(CloseLoop(head), RECORD_SCHEMA, (left, back))


def _goes_back(ids: Ids) -> Chosen:
    return np.less_equal(ids // _ROUND, (ids % _ROUND) % 3)


def _turned(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield _with_ids(batch, batch.column("id").to_numpy() + _ROUND)


def _left(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        leaving = batch.filter(pa.array(~_goes_back(batch.column("id").to_numpy())))
        yield _with_ids(leaving, ids_of(leaving))


def _with_ids(batch: pa.RecordBatch, ids: Ids) -> pa.RecordBatch:
    return pa.record_batch([pa.array(ids), batch.column("key")], RECORD_SCHEMA)


# --- functions over two streams --------------------------------------------------------------


class HoldOneBack(TwoInputFunction):
    """Answers, for each record, the one before it with the same key; the last ones at the end."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}

    def process_first(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        ids, keys = (column.to_numpy().tolist() for column in batch.columns)
        made = []
        for record, key in zip(ids, keys, strict=True):
            if key in self._held:
                made.append((self._held[key], key))
            self._held[key] = record
        yield _records(made)

    process_second = process_first

    def finish(self) -> Iterator[pa.RecordBatch]:
        yield _records([(record, key) for key, record in self._held.items()])

    def snapshot(self) -> pa.RecordBatch:
        return _records([(record, key) for key, record in self._held.items()])

    def restore(self, batch: pa.RecordBatch) -> None:
        ids, keys = (column.to_numpy().tolist() for column in batch.columns)
        self._held.update(zip(keys, ids, strict=True))


class Listen(TwoInputFunction):
    """Passes records on, and remembers which ids it was told."""

    def __init__(self) -> None:
        self._told: list[int] = []

    def process_first(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield batch.filter(pa.array(batch.column("id").to_numpy() % _CONTROL_EVERY != 0))

    def process_second(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        self._told += batch.column("id").to_numpy().tolist()
        return ()

    def snapshot(self) -> pa.RecordBatch:
        return _records([(told, 0) for told in self._told])

    def restore(self, batch: pa.RecordBatch) -> None:
        self._told += batch.column("id").to_numpy().tolist()


def told_by(ids: Ids) -> list[int]:
    """What a listener has been told when it has heard all of these records."""
    return sorted(ids[ids % _CONTROL_EVERY == 0].tolist())


def _records(rows: list[tuple[int, int]]) -> pa.RecordBatch:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    return pa.record_batch([pa.array(column.copy()) for column in columns], RECORD_SCHEMA)
