"""Random jobs: a graph, its input, its settings, and what must come out of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

from stillframe.config import JobConfig, StateBackend
from stillframe.graph.logical import Aggregate, MapInArrow, Node, Read, Write
from stillframe.graph.plan import Plan, build_plan
from stillframe.ids import OperatorUid
from stillframe.testing.simulation.limits import Limits
from stillframe.testing.simulation.marked import MarkedOutside, MarkedSink
from stillframe.testing.simulation.outside import (
    NO_RECORDS,
    RECORD_SCHEMA,
    NumbersSource,
    Outside,
    Records,
    TransactionalSink,
)
from stillframe.testing.simulation.shapes import ShapeName, is_passed_on, shaped
from stillframe.testing.simulation.timed import (
    CALLS,
    Sessions,
    Timed,
    Windows,
    by_time,
    marked,
)
from stillframe.testing.simulation.timed_functions import Alarms
from stillframe.testing.simulation.timed_pairs import Distinct, Enriched, Joined
from stillframe.testing.simulation.world import World

SOURCE = OperatorUid("source")
COUNT_SCHEMA = pa.schema([("key", pa.int64()), ("count", pa.int64()), ("total", pa.int64())])
_SHAPES: tuple[ShapeName, ...] = (
    "plain", "plain", "plain", "union", "connect", "broadcast", "loop", "joined-loop",
)  # fmt: skip
_MODES = (
    "exactly-once", "exactly-once", "exactly-once", "unaligned", "unaligned", "unaligned",
    "at-least-once", "at-least-once", "at-most-once", "stop-the-world",
)  # fmt: skip
_BACKENDS: Mapping[tuple[StateBackend, ...], int] = {
    ("fs",): 44,
    ("memory",): 6,
    ("memory", "fs"): 6,
    ("rocksdb",): 4,
    ("rocksdb", "fs"): 2,
    ("memory", "rocksdb"): 2,
}
"""How often jobs keep their state where, of one driver after the other."""
_TIMED: tuple[Timed, ...] = (
    Windows(5, 5), Windows(6, 2), Windows(5, 5, emits_closed=False), Windows(4, 4, outer=8),
    Sessions(2), Sessions(6), Alarms(3), Alarms(2, outer=5),
    Joined("inner", -2, 1), Joined("full", -1, 2), Distinct(4), Distinct(None), Enriched(),
)  # fmt: skip
_AVAILABLE_NOW_CHANCE = 0.5
"""Of sources that discover: how often a driver stops when it has read what was there."""
_MARKED_SHARES = (0.0, 0.0, 0.0, 0.5, 1.0)
"""Of the branches of a job, how many write to a system that takes marks."""
_TIMED_CHANCE = 0.18
_TIMED_PLAIN_CHANCE = 0.7
"""How often they have no other shape, in which event time would hardly go on while they run."""


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
    shape: ShapeName = "plain"
    shape_parallelism: int | None = None
    """Of one of the ways through the shape; None: as many as come in."""
    timed: Timed | None = None
    """What is done by event time; then it does not count in any other way."""

    @property
    def passes_records(self) -> bool:
        """Whether what comes out are the records themselves."""
        return not self.counts and self.timed is None

    @property
    def keeps_pace(self) -> bool:
        """Whether no record is held back on its way, where event time could pass it."""
        return self.shape in ("plain", "union", "broadcast")

    @property
    def has_one_way(self) -> bool:
        """Whether records of a split can reach a writer in one way only, so that order is kept."""
        if self.shape == "connect":  # by key: what was dealt out before meets again there
            return self.parallelism is None and self.shape_parallelism is None
        return not self.shape.endswith("loop")  # in which some take longer than others

    def entering(self, records: Records) -> Records:
        """Those that are not dropped at once."""
        return records[records[:, 0] % self.divisor != 0] if self.divisor else records

    def kept(self, records: Records) -> Records:
        """Those that reach the sink in the end."""
        entering = self.entering(records)
        return entering[is_passed_on(self.shape, entering[:, 0])]


@dataclass(frozen=True, slots=True)
class SimulatedJob:
    """Everything about a job that the seed decides and a restart does not change."""

    source: NumbersSource
    branches: tuple[Branch, ...]
    outside: dict[str, Outside | MarkedOutside]
    config: JobConfig
    backends: tuple[StateBackend, ...]
    """Of one driver after the other, in turns: what one kept, the next takes over."""
    emitted: Counter[int] = field(default_factory=Counter)
    """How often each record has left the source, in all attempts together."""

    def sizes(self) -> dict[str, int]:
        """By the names of `Limits`."""
        return {
            "branches": len(self.branches),
            "splits": len(self.source.lengths),
            "records": max(self.source.lengths),
            "keys": self.source.keys,
        }

    @property
    def is_exact(self) -> bool:
        return self.config.checkpoint_mode in ("exactly-once", "stop-the-world")

    @property
    def marked(self) -> list[MarkedOutside]:
        """The systems that take marks."""
        return [each for each in self.outside.values() if isinstance(each, MarkedOutside)]

    @property
    def has_timers(self) -> bool:
        return any(isinstance(branch.timed, Alarms) for branch in self.branches)

    def config_for(self, driver: int) -> JobConfig:
        backend = self.backends[driver % len(self.backends)]
        return replace(self.config, state_backend=backend, retain_on_cancel=True)

    def plan(self, slots: int) -> Plan:
        read = Node(Read(self.source), RECORD_SCHEMA, given_uid=SOURCE)
        watching = MapInArrow(_Watching(self.emitted), "watch")
        read = Node(watching, RECORD_SCHEMA, (read,), "watch")
        return build_plan(
            "simulated", [self._sink(branch, read) for branch in self.branches], slots, 16
        )

    def records_before(self, positions: Mapping[int, int]) -> Records:
        """Those before a position of each split."""
        parts = [self.source.records(split)[:stop] for split, stop in positions.items()]
        return np.concatenate([NO_RECORDS, *parts])

    def all_records(self) -> Records:
        return self.records_before(dict(enumerate(self.source.lengths)))

    def tells_time_early(self, branch: Branch) -> bool:
        """Whether no record is late that comes in the order of its split."""
        return branch.keeps_pace and self.source.appear_at_seconds is None

    def _sink(self, branch: Branch, read: Node) -> Node:
        is_marked = branch.timed is not None and self.tells_time_early(branch)
        node = marked(read, branch.uid) if is_marked else read
        if branch.divisor or branch.parallelism:
            node = Node(
                MapInArrow(_Dropping(branch.divisor), f"drop-{branch.uid}"),
                RECORD_SCHEMA,
                (node,),
                f"drop-{branch.uid}",
                branch.parallelism,
            )
        node = shaped(branch.shape, node, branch.uid, branch.shape_parallelism)
        schema = RECORD_SCHEMA
        if branch.timed is not None:
            schema = branch.timed.schema
            node = by_time(branch.timed, node, branch.uid, is_marked)
        elif branch.counts:
            schema = COUNT_SCHEMA
            node = Node(Aggregate(("key",), CALLS), schema, (node,), f"count-{branch.uid}")
        outside = self.outside[branch.uid]
        kind = MarkedSink if isinstance(outside, MarkedOutside) else TransactionalSink
        sink = kind(outside, branch.uid, branch.at_coordinator)  # type: ignore[arg-type]
        return Node(Write(sink), schema, (node,), f"write-{branch.uid}")


@dataclass(frozen=True, slots=True)
class _Watching:
    emitted: Counter[int]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.emitted.update(batch.column("id").to_numpy().tolist())
            yield batch


@dataclass(frozen=True, slots=True)
class _Dropping:
    divisor: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if self.divisor:
                ids = batch.column("id").to_numpy()
                batch = batch.filter(pa.array(ids % self.divisor != 0))
            yield batch


def counts_of(records: Records) -> dict[int, tuple[int, int]]:
    """Per key: how many records, and the sum of their ids."""
    ids, keys = records.T
    counts = np.bincount(keys).tolist()
    totals = np.bincount(keys, weights=ids).tolist()  # whole numbers far below 2**53
    return {key: (count, int(totals[key])) for key, count in enumerate(counts) if count}


def _random_appearance(random: Random, splits: int) -> tuple[float, ...] | None:
    """One source in three discovers its splits, the last of them after some seconds."""
    if random.random() > 0.33:
        return None
    return tuple(sorted(random.random() * random.choice([0.0, 4.0, 8.0]) for _ in range(splits)))


def _random_timed(random: Random) -> Timed | None:
    return random.choice(_TIMED) if random.random() < _TIMED_CHANCE else None


def _random_shape(random: Random, timed: Timed | None) -> ShapeName:
    is_plain = timed is not None and random.random() < _TIMED_PLAIN_CHANCE
    return "plain" if is_plain else random.choice(_SHAPES)


def _random_mode(random: Random) -> dict[str, Any]:
    """The settings that go together."""
    mode = random.choice(_MODES)
    if mode == "unaligned":
        timeout_seconds = random.choice([0.0, 0.0, 0.05, 0.5])
        return {
            "unaligned_checkpoints": True,
            "aligned_checkpoint_timeout_seconds": timeout_seconds,
        }
    concurrent = 1 if mode == "stop-the-world" else random.choice([1, 2, 3, 3])
    return {"checkpoint_mode": mode, "max_concurrent_checkpoints": concurrent}


def random_job(world: World, limits: Limits) -> SimulatedJob:
    """Small on purpose: what goes wrong in a large job goes wrong in a small one, sooner."""
    random = world.random
    mode = _random_mode(random)
    # Barriers that overtake need something to overtake.
    hurries = "unaligned_checkpoints" in mode
    batch_rows_max = random.choice([2, 6, 16])
    # In batches, of which each takes about a second: enough to be there when things go wrong.
    batches = [
        random.choice([0, 4, 10, 10, 14]) * (2 if hurries else 1)
        for _ in range(random.randint(1, 4))
    ]
    lengths = [count * (batch_rows_max + 1) // 2 for count in batches]
    source = NumbersSource(
        world,
        lengths=tuple(
            limits.cap("records", length) for length in lengths[: limits.cap("splits", 4)]
        ),
        keys=limits.cap("keys", random.randint(1, 12)),
        batch_rows_max=batch_rows_max,
        pause_chance=random.choice([0.2, 0.0] if hurries else [0.7, 0.7, 0.2]),
        appear_at_seconds=_random_appearance(random, limits.cap("splits", len(lengths))),
    )
    branches = tuple(
        Branch(
            uid=f"b{number}",
            divisor=random.choice([0, 0, 2, 3]),
            counts=(timed := _random_timed(random)) is None and random.random() < 0.6,
            parallelism=random.choice([None, None, 1, 2]),
            at_coordinator=random.random() < 0.5,
            shape=_random_shape(random, timed),
            shape_parallelism=random.choice([None, 1, 2]),
            timed=timed,
        )
        for number in range(random.choice([1, 1, 1, 1, 2, 3]))
    )[: limits.cap("branches", 3)]
    config = JobConfig(
        checkpoint_location="simulated",
        checkpoint_interval_seconds=random.choice([0.2, 0.5, 1.5]),
        checkpoint_timeout_seconds=random.choice([2.0, 6.0, 600.0]),
        checkpoint_min_pause_seconds=random.choice([0.0, 0.5]),
        tolerable_failed_checkpoints=random.choice([math.inf, math.inf, math.inf, 3]),
        checkpoints_retained=random.choice([1, 2, 3]),
        available_now=source.appear_at_seconds is not None
        and world.own_random("available now").random() < _AVAILABLE_NOW_CHANCE,
        **mode,
    )
    drawn = world.own_random("marks")
    share = drawn.choice(_MARKED_SHARES)
    outside = {
        branch.uid: MarkedOutside(world, drawn) if drawn.random() < share else Outside()
        for branch in branches
    }
    drawn = world.own_random("backends")
    (backends,) = drawn.choices(list(_BACKENDS), list(_BACKENDS.values()))
    return SimulatedJob(source, branches, outside, config, backends)
