"""Random jobs: a graph, its input, its settings, and what must come out of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from stillframe.api.aggregates import AggregateCall
from stillframe.config import JobConfig
from stillframe.graph.logical import Aggregate, MapInArrow, Node, Read, Write
from stillframe.graph.plan import Plan, build_plan
from stillframe.ids import OperatorUid
from stillframe.testing.simulation.outside import (
    RECORD_SCHEMA,
    NumbersSource,
    Outside,
    Row,
    TransactionalSink,
    record,
)
from stillframe.testing.simulation.world import World

SOURCE = OperatorUid("source")
COUNT_SCHEMA = pa.schema([("key", pa.int64()), ("count", pa.int64()), ("total", pa.int64())])
_CALLS = (
    AggregateCall("count", None, "count", pa.int64()),
    AggregateCall("sum", "id", "total", pa.int64()),
)


@dataclass(frozen=True, slots=True)
class Branch:
    """One way from the source to a sink, and what is dropped on it."""

    uid: str
    divisor: int
    """Keeps the records whose id it does not divide; 0 keeps all."""
    counts: bool
    parallelism: int | None
    """Of a stage in between; None: there is none."""
    at_coordinator: bool

    def keeps(self, row: Row) -> bool:
        return self.divisor == 0 or row[0] % self.divisor != 0


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """Everything about a job that the seed decides and a restart does not change."""

    source: NumbersSource
    branches: tuple[Branch, ...]
    outside: dict[str, Outside]
    config: JobConfig

    def plan(self, slots: int) -> Plan:
        read = Node(Read(self.source), RECORD_SCHEMA, given_uid=SOURCE)
        return build_plan(
            "simulated", [self._sink(branch, read) for branch in self.branches], slots, 16
        )

    def records_before(self, positions: dict[str, int]) -> Iterator[Row]:
        for name, stop in positions.items():
            split = int(name.removeprefix("split-"))
            for index in range(stop):
                yield record(split, index, self.source.keys)

    def all_records(self) -> list[Row]:
        ends = {f"split-{index:03d}": length for index, length in enumerate(self.source.lengths)}
        return list(self.records_before(ends))

    def _sink(self, branch: Branch, read: Node) -> Node:
        node = read
        if branch.divisor or branch.parallelism:
            node = Node(
                MapInArrow(_Dropping(branch.divisor), f"drop-{branch.uid}"),
                RECORD_SCHEMA,
                (node,),
                f"drop-{branch.uid}",
                branch.parallelism,
            )
        schema = RECORD_SCHEMA
        if branch.counts:
            schema = COUNT_SCHEMA
            node = Node(Aggregate(("key",), _CALLS), schema, (node,), f"count-{branch.uid}")
        sink = TransactionalSink(self.outside[branch.uid], branch.uid, branch.at_coordinator)
        return Node(Write(sink), schema, (node,), f"write-{branch.uid}")


@dataclass(frozen=True, slots=True)
class _Dropping:
    divisor: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if self.divisor:
                ids = batch.column("id")
                kept = pc.not_equal(ids, pc.multiply(pc.divide(ids, self.divisor), self.divisor))
                batch = batch.filter(kept)
            yield batch


def counts_of(rows: Iterable[Row]) -> dict[int, tuple[int, int]]:
    """Per key: how many records, and the sum of their ids."""
    rows = list(rows)
    counts = Counter(row[1] for row in rows)
    totals: Counter[int] = Counter()
    for row in rows:
        totals[row[1]] += row[0]
    return {key: (count, totals[key]) for key, count in counts.items()}


def random_job(world: World) -> SimulatedJob:
    """Small on purpose: what goes wrong in a large job goes wrong in a small one, sooner."""
    random = world.random
    splits = random.randint(1, 4)
    source = NumbersSource(
        world,
        lengths=tuple(random.choice([0, 20, 80, 150]) for _ in range(splits)),
        keys=random.randint(1, 12),
        batch_rows_max=random.choice([2, 8, 20]),
    )
    branches = tuple(
        Branch(
            uid=f"b{number}",
            divisor=random.choice([0, 0, 2, 3]),
            counts=number == 0 or random.random() < 0.5,
            parallelism=random.choice([None, None, 1, 2]),
            at_coordinator=random.random() < 0.3,
        )
        for number in range(random.randint(1, 3))
    )
    config = JobConfig(
        checkpoint_location="simulated",
        checkpoint_interval_seconds=random.choice([0.2, 0.5, 1.5]),
        checkpoint_timeout_seconds=random.choice([2.0, 6.0, 600.0]),
        checkpoint_mode="at-least-once" if random.random() < 0.25 else "exactly-once",
        checkpoint_min_pause_seconds=random.choice([0.0, 0.5]),
        checkpoints_retained=random.choice([1, 2, 3]),
    )
    return SimulatedJob(source, branches, {branch.uid: Outside() for branch in branches}, config)
