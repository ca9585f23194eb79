"""Event time in simulated jobs: records that meet others, or that are the same as others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stillframe.graph.logical import DropDuplicates, Enrich, Join, JoinSide, MapInArrow, Node
from stillframe.testing.simulation.outside import Records
from stillframe.testing.simulation.timed import (
    SECOND_US,
    TIMED_SCHEMA,
    Place,
    Results,
    Timed,
    moment_of,
    seconds,
    times,
)

_NOBODY = -1
_PAIR_SCHEMA = pa.schema([("left", pa.int64()), ("right", pa.int64())])
_RIGHT_SCHEMA = pa.schema([field.with_name(f"right_{field.name}") for field in TIMED_SCHEMA])
_BOTH_SCHEMA = pa.schema([*TIMED_SCHEMA, *_RIGHT_SCHEMA])


def _is_left(ids: Records) -> Records:
    """Two on the left, two on the right, so that dropping every second leaves some of each."""
    left: Records = np.equal(ids // 2 % 2, 0)
    return left


def _sides(node: Node, uid: str) -> tuple[Node, Node]:
    left, right = (
        Node(MapInArrow(partial(_of_side, is_left), side), schema, (node,), f"{side}-{uid}")
        for is_left, side, schema in ((True, "left", TIMED_SCHEMA), (False, "right", _RIGHT_SCHEMA))
    )
    return left, right


def _of_side(is_left: bool, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    schema = TIMED_SCHEMA if is_left else _RIGHT_SCHEMA
    for batch in batches:
        kept = batch.filter(pa.array(_is_left(batch.column("id").to_numpy()) == is_left))
        yield pa.record_batch(kept.columns, schema)


@dataclass(frozen=True, slots=True)
class Joined(Timed):
    """Pairs records of one key whose moments are near each other."""

    name = "joined"
    schema = _PAIR_SCHEMA
    places = 2

    how: Literal["inner", "full"]
    earliest: int
    latest: int

    def built(self, node: Node, uid: str) -> Node:
        sides = (JoinSide(("key",), "at"), JoinSide(("right_key",), "right_at"))
        join = Join(self.how, *sides, self.earliest * SECOND_US, self.latest * SECOND_US)
        node = Node(join, _BOTH_SCHEMA, _sides(node, uid), f"join-{uid}")
        return Node(MapInArrow(_pairs, "pairs"), _PAIR_SCHEMA, (node,), f"pairs-{uid}")

    def expected(self, records: Records) -> Results:
        there: dict[tuple[int, int], list[int]] = {}
        is_left = _is_left(records[:, 0])
        for number, key in records[~is_left].tolist():
            there.setdefault((key, moment_of(number)), []).append(number)
        pairs: list[Place] = [
            (number, other)
            for number, key in records[is_left].tolist()
            for moment in range(self.earliest, self.latest + 1)
            for other in there.get((key, moment_of(number) + moment), ())
        ]
        if self.how == "full":
            met = {number for pair in pairs for number in pair}
            alone = [number for number in records[:, 0].tolist() if number not in met]
            pairs += [_alone(number) for number in alone]
        return dict.fromkeys(pairs, ())

    def is_of_fewer(self, found: Results, expected: Results) -> bool:
        """No pair that would not have been; alone may be who lost all that it was to meet."""
        known = {_alone(number) for pair in expected for number in pair if number != _NOBODY}
        alone = {place for place in found if _NOBODY in place}
        may_be = known if self.how == "full" else set[Place]()
        return alone <= may_be and found.keys() - alone <= expected.keys()


def _alone(number: int) -> Place:
    return (number, _NOBODY) if _is_left(np.array(number)) else (_NOBODY, number)


def _pairs(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        ids = [pc.fill_null(batch.column(name), _NOBODY) for name in ("id", "right_id")]
        yield pa.record_batch(ids, _PAIR_SCHEMA)


@dataclass(frozen=True, slots=True)
class Enriched(Timed):
    """Left records beside the newest right one of their key, which depends on the schedule.

    So all that is claimed is that each comes out, once, and with none of another key; and that in
    the end the newest are known.
    """

    name = "enriched"
    schema = _PAIR_SCHEMA
    places = 2

    def built(self, node: Node, uid: str) -> Node:
        enrich = Enrich("left", ("key",), ("right_key",), "right_at")
        node = Node(enrich, _BOTH_SCHEMA, _sides(node, uid), f"enrich-{uid}")
        return Node(MapInArrow(_found, "found"), _PAIR_SCHEMA, (node,), f"found-{uid}")

    def expected(self, records: Records) -> Results:
        left = records[_is_left(records[:, 0])]
        return dict.fromkeys(map(tuple, left.tolist()), ())

    def newest(self, records: Records) -> dict[int, int]:
        """By key, the last moment on the right."""
        right = records[~_is_left(records[:, 0])]
        moments = [(moment_of(number), key) for number, key in right.tolist()]
        return {key: moment for moment, key in sorted(moments)}


def _found(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        key = pc.fill_null(batch.column("right_key"), batch.column("key"))
        yield pa.record_batch([batch.column("id"), key], _PAIR_SCHEMA)


@dataclass(frozen=True, slots=True)
class Distinct(Timed):
    """One record of each key and span of time, by which keys are forgotten; or of each key."""

    name = "distinct"
    schema = pa.schema([("until", pa.int64()), ("key", pa.int64())])
    places = 2

    span: int | None

    def built(self, node: Node, uid: str) -> Node:
        rounded = MapInArrow(partial(_rounded, self.span), "round")
        node = Node(rounded, TIMED_SCHEMA, (node,), f"round-{uid}")
        drop = DropDuplicates(("key",))
        if self.span is not None:
            drop = DropDuplicates(("key", "at"), "at", keep_us=0)
        node = Node(drop, TIMED_SCHEMA, (node,), f"distinct-{uid}")
        return Node(MapInArrow(_until, "until"), self.schema, (node,), f"until-{uid}")

    def expected(self, records: Records) -> Results:
        span = self.span
        return {
            (-(-moment_of(number) // span) * span if span is not None else 0, key): ()
            for number, key in records.tolist()
        }


def _rounded(span: int | None, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Up, so that no record becomes late by it."""
    for batch in batches:
        at = batch.column("at").cast(pa.int64()).to_numpy()
        span_us = None if span is None else span * SECOND_US
        until = np.zeros_like(at) if span_us is None else -(-at // span_us) * span_us
        yield pa.record_batch([*batch.columns[:2], times(until)], TIMED_SCHEMA)


def _until(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.record_batch([seconds(batch.column("at")), batch.column("key")], Distinct.schema)
