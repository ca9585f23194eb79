"""What tasks, edges and subtasks did in the last seconds, as rows of numbers.

The names of the columns are told once, at the beginning of a stream; a row is then a list. Rates
are the difference of two reports of a slot, some seconds apart, over the time between them. What is
not known is null, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from stillframe.graph.plan import Edge, Plan
from stillframe.ids import SlotIndex
from stillframe.json_values import JsonObject, JsonValue
from stillframe.protocol.measures import ChannelMeasures, Measured, SubtaskMeasures

Spans: TypeAlias = Mapping[SlotIndex, tuple[Measured, Measured]]
"""Of each slot two reports, some seconds apart."""

_RATES = ("records_in", "records_out", "bytes_in", "bytes_out")
_SHARES = ("working", "turn", "backpressured", "held", "idle")
_MEASURES = (*(f"{name}_per_second" for name in _RATES), *_SHARES)
_LAST = (
    "queued_bytes", "watermark", "records_late", "state_rows", "state_bytes", "lag_records",
    "lag_ms",
)  # fmt: skip

TASK_COLUMNS = ("task", *_MEASURES, "busiest", "busiest_subtask", *_LAST)
EDGE_COLUMNS = ("edge", "records_per_second", "bytes_per_second", "fill", "held")
RING_COLUMNS = (*_MEASURES, "queued_bytes")
"""Of a task: what is remembered of the last minutes."""
CHANNEL_COLUMNS = ("edge", "source", "subtask", "records_per_second", "queued_bytes", "held")
CHANNELS_MAX = 1_024
SUBTASK_COLUMNS = ("subtask", "slot", *_MEASURES, *_LAST)


@dataclass(frozen=True, slots=True)
class SubtaskRates:
    """One subtask between two reports."""

    subtask: int
    slot: int
    rates: tuple[float, ...]
    """A second, in the order of `_RATES`."""
    shares: tuple[float, ...]
    """Of its time, in the order of `_SHARES`; together they are 1."""
    now: SubtaskMeasures
    channels: tuple[ChannelRates, ...] = ()
    """To it, while somebody watches its task."""


@dataclass(frozen=True, slots=True)
class ChannelRates:
    """One channel between two reports."""

    records_per_second: float | None
    """None: it was not watched at the earlier one."""
    now: ChannelMeasures


Rates: TypeAlias = Mapping[int, Sequence[SubtaskRates]]
"""By task."""


def rates_of(spans: Spans) -> dict[int, list[SubtaskRates]]:
    """By task: of those subtasks of which there are two reports with time between them."""
    found: dict[int, list[SubtaskRates]] = {}
    for slot, (earlier, later) in sorted(spans.items()):
        before = {(each.task, each.subtask): each for each in earlier.subtasks}
        for each in later.subtasks:
            first = before.get((each.task, each.subtask))
            if first is not None and (spent := each.shares.since(first.shares)).total > 0:
                seconds = spent.total / 1e9
                rates = tuple(
                    (getattr(each, name) - getattr(first, name)) / seconds for name in _RATES
                )
                shares = tuple(getattr(spent, name) / spent.total for name in _SHARES)
                channels = _channel_rates(first.channels, each.channels, seconds)
                found.setdefault(each.task, []).append(
                    SubtaskRates(each.subtask, slot, rates, shares, each, channels)
                )
    return found


def _channel_rates(
    first: Sequence[ChannelMeasures], last: Sequence[ChannelMeasures], seconds: float
) -> tuple[ChannelRates, ...]:
    before = {(each.edge, each.source): each.records for each in first}

    def rate(each: ChannelMeasures) -> float | None:
        records = before.get((each.edge, each.source))
        return None if records is None else (each.records - records) / seconds

    return tuple(ChannelRates(rate(each), each) for each in last)


def task_rows(rates: Rates) -> list[list[JsonValue]]:
    """Of tasks of which something is known, in their order."""
    return [_task_row(task, subtasks) for task, subtasks in sorted(rates.items())]


def ring_rows(rates: Rates) -> dict[int, list[float | None]]:
    """By task; numbers all of them."""
    places = [TASK_COLUMNS.index(name) for name in RING_COLUMNS]
    return {
        task: [cast(float | None, row[place]) for place in places]
        for task, subtasks in rates.items()
        for row in (_task_row(task, subtasks),)
    }


def _task_row(task: int, subtasks: Sequence[SubtaskRates]) -> list[JsonValue]:
    busiest = max(subtasks, key=lambda each: each.shares[0])
    means = (sum(each.shares[i] for each in subtasks) / len(subtasks) for i in range(len(_SHARES)))
    times_us = [each.now.watermark_us for each in subtasks if each.now.watermark_us is not None]
    return [
        task,
        *(_total(subtasks, i) for i in range(len(_RATES))),
        *(round(mean, 3) for mean in means),
        round(busiest.shares[0], 3),
        busiest.subtask,
        sum(each.now.queued_bytes for each in subtasks),
        min(times_us) // 1000 if times_us else None,
        sum(each.now.records_late for each in subtasks),
        _sum_if_known([each.now.state_rows for each in subtasks]),
        _sum_if_known([each.now.state_bytes for each in subtasks]),
        _sum_if_known([each.now.lag_records for each in subtasks]),
        max((each.now.lag_ms for each in subtasks if each.now.lag_ms is not None), default=None),
    ]


def _sum_if_known(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _total(subtasks: Sequence[SubtaskRates], rate: int) -> int:
    return round(sum(each.rates[rate] for each in subtasks))


def sent_per_second(subtasks: Sequence[SubtaskRates]) -> int:
    """Records, to channels and to sinks."""
    return _total(subtasks, _RATES.index("records_out"))


def subtask_rows(subtasks: Sequence[SubtaskRates]) -> list[list[JsonValue]]:
    """Of one task, the one that somebody watches."""
    return [
        [
            each.subtask,
            each.slot,
            *map(round, each.rates),
            *(round(share, 3) for share in each.shares),
            each.now.queued_bytes,
            None if each.now.watermark_us is None else each.now.watermark_us // 1000,
            each.now.records_late,
            each.now.state_rows,
            each.now.state_bytes,
            each.now.lag_records,
            each.now.lag_ms,
        ]
        for each in subtasks
    ]


def channel_rows(plan: Plan, subtasks: Sequence[SubtaskRates]) -> list[list[JsonValue]]:
    """Of the task that somebody watches; of very many those where most waits."""
    edges = {edge.name: edge.index for edge in plan.edges}
    found = [(each, channel) for each in subtasks for channel in each.channels]
    found.sort(key=lambda both: (both[1].now.is_held, both[1].now.queued_bytes), reverse=True)
    return [
        [
            edges[channel.now.edge],
            channel.now.source,
            each.subtask,
            None if channel.records_per_second is None else round(channel.records_per_second),
            channel.now.queued_bytes,
            int(channel.now.is_held),
        ]
        for each, channel in found[:CHANNELS_MAX]
    ]


def edge_rows(plan: Plan, rates: Rates, buffer_bytes: int) -> list[list[JsonValue]]:
    """`buffer_bytes`: what a channel may hold."""
    outputs = Counter(edge.source_task for edge in plan.edges)
    outputs.update(task.index for task in plan.tasks if task.has_sinks)
    inputs = Counter(edge.target_task for edge in plan.edges)
    rows: list[list[JsonValue]] = []
    for edge in plan.edges:
        sending, taking = rates.get(edge.source_task), rates.get(edge.target_task)
        # Counted task by task: which of several edges it came over is not known.
        if taking and inputs[edge.target_task] == 1:
            flow: list[JsonValue] = [_total(taking, 0), _total(taking, 2)]
            flow += [_fill(edge, taking, buffer_bytes), _held(taking)]
        elif sending and outputs[edge.source_task] == 1:
            flow = [_total(sending, 1), _total(sending, 3), None, None]
        else:
            flow = [None, None, None, None]
        rows.append([edge.index, *flow])
    return rows


def _held(taking: Sequence[SubtaskRates]) -> int:
    """Channels whose barrier has come, and those of others have not."""
    return sum(each.now.aligning.arrived for each in taking if each.now.aligning is not None)


def alignments(rates: Rates) -> list[JsonObject]:
    """Which subtasks wait for barriers, since when, and where from."""
    return [
        {
            "task": task,
            "subtask": each.subtask,
            "checkpoint": waits.checkpoint,
            "arrived": waits.arrived,
            "channels": waits.channels,
            "since": waits.since_ms,
            "missing": [list(place) for place in waits.missing],
        }
        for task, subtasks in sorted(rates.items())
        for each in subtasks
        if (waits := each.now.aligning) is not None
    ]


def _fill(edge: Edge, taking: Sequence[SubtaskRates], buffer_bytes: int) -> float:
    """Of the subtask in front of which most waits: how much of the room there is full."""
    most = max(each.now.queued_bytes for each in taking)
    room = max(1, edge.channels // edge.target_parallelism) * buffer_bytes
    return round(min(1.0, most / room), 3)
