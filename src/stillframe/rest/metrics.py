"""What Prometheus is told of a driver's jobs: one look at them for each time it asks.

Counts of tasks begin again with every attempt, which Prometheus understands as a restart of what it
watches. The label is `job_name`: `job` is what every scrape sets itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from itertools import accumulate

from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from stillframe.protocol.checkpointing import BUCKETS_SECONDS, Spent
from stillframe.protocol.measures import (
    LATENCY_BOUNDS_MS,
    Latency,
    SubtaskMeasures,
    TimeShares,
    latencies_together,
)
from stillframe.rest.api import Traffic
from stillframe.rest.jobs import STATES, ServedJob

CONTENT_TYPE = CONTENT_TYPE_LATEST
SERIES_MAX = 20_000
"""Of subtasks. Where there would be more, there is one series for all subtasks of a task."""
_SERIES_OF_A_SUBTASK = 20
_LATENCY_BOUNDS = [*(str(bound_ms / 1000) for bound_ms in LATENCY_BOUNDS_MS), "+Inf"]
_LATENCY_PAIRS_MAX = 400
_ALL_SOURCES = "all"
_SHARES = ("working", "turn", "backpressured", "held", "idle")


def metrics_text(jobs: Iterable[ServedJob], now_ms: int, traffic: Traffic) -> str:
    """In the format OpenMetrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Jobs(jobs, now_ms, traffic))
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text.decode()


class _Jobs(Collector):
    def __init__(self, jobs: Iterable[ServedJob], now_ms: int, traffic: Traffic) -> None:
        self._jobs = list(jobs)
        self._now_ms = now_ms
        self._traffic = traffic
        subtasks = sum(task.parallelism for job in self._jobs for task in job.query.plan.tasks)
        self._is_by_task = subtasks * _SERIES_OF_A_SUBTASK > SERIES_MAX
        self._where = ("task_name",) if self._is_by_task else ("task_name", "subtask_index")

    def collect(self) -> Iterator[Metric]:
        yield from self._of_jobs()
        yield from self._of_checkpoints()
        yield from self._of_tasks()
        yield from self._of_latency()
        yield from self._of_sources()
        yield from self._of_sinks()
        yield from self._of_slots()
        yield from self._of_the_server()

    def _of_jobs(self) -> Iterator[Metric]:
        info = InfoMetricFamily("stillframe_job", "What the job promises.", labels=["job_name"])
        state = StateSetMetricFamily(
            "stillframe_job_state", "What the job is doing.", labels=["job_name"]
        )
        restarts = _counter("job_restarts", "How often the job was restarted.")
        rescales = _counter("job_rescales", "How often it went on with another parallelism.")
        down = _counter("job_down_seconds", "How long failures and rescales kept it from running.")
        for job in self._jobs:
            summary = job.query.summary
            about = {"guarantee": job.query.guarantee().word, "version": version("stillframe")}
            about["mode"] = job.query.config.checkpoint_mode
            info.add_metric([job.name], about)
            state.add_metric([job.name], {each: each == job.state for each in STATES})
            restarts.add_metric([job.name], summary.restarts)
            rescales.add_metric([job.name], summary.rescales)
            down.add_metric([job.name], summary.down_seconds)
        yield from (info, state, restarts, rescales, down)

    def _of_checkpoints(self) -> Iterator[Metric]:
        total = _counter("checkpoints", "Checkpoints that are over.", "outcome")
        pending_now = _gauge("checkpoints_in_progress", "Checkpoints that have begun.")
        last_id = _gauge("checkpoint_last_completed_id", "The number of the newest checkpoint.")
        last_at = _gauge(
            "checkpoint_last_completed_timestamp_seconds", "When the newest one was triggered."
        )
        interval = _gauge("checkpoint_interval_seconds", "How often one is to be taken.")
        age = _gauge("checkpoint_pending_age_seconds", "Since the oldest pending one has begun.")
        durations = HistogramMetricFamily(
            "stillframe_checkpoint_duration_seconds", "How long they took.", labels=["job_name"]
        )
        phases = _counter("checkpoint_phase_seconds", "Where their time went.", "phase")
        took = _gauge("checkpoint_last_duration_seconds", "How long the newest one took.")
        new = _gauge("checkpoint_last_size_bytes", "What was written for the newest one.")
        full = _gauge("checkpoint_last_full_size_bytes", "All files that the newest one needs.")
        metadata = _gauge("checkpoint_last_metadata_bytes", "The metadata of the newest one.")
        flying = _gauge("checkpoint_last_in_flight_bytes", "Records under way in the newest one.")
        for job in self._jobs:
            told = job.query.checkpoint_statistics
            name, counts = [job.name], told.counts
            total.add_metric([job.name, "completed"], counts.completed)
            total.add_metric([job.name, "failed"], counts.failed)
            pending_now.add_metric(name, counts.in_progress)
            if (seconds := job.query.config.checkpoint_interval_seconds) is not None:
                interval.add_metric(name, seconds)
            pending = [each for each in told.history if each.status == "IN_PROGRESS"]
            age.add_metric(name, max((p.end_to_end_ms for p in pending), default=0.0) / 1000)
            for phase, ms in told.spent.phases.items():
                phases.add_metric([job.name, phase], ms / 1000)
            durations.add_metric(name, *_buckets(told.spent))
            last = told.latest_completed
            if last is not None:
                metadata.add_metric(name, last.metadata_bytes)
                last_id.add_metric(name, last.checkpoint_id)
                last_at.add_metric(name, last.triggered_at_ms / 1000)
                took.add_metric(name, last.end_to_end_ms / 1000)
                new.add_metric(name, last.bytes_written)
                full.add_metric(name, last.state_bytes)
                flying.add_metric(name, last.in_flight_bytes)
        yield from (total, pending_now, age, durations, phases, interval)
        yield from (last_id, last_at, took, new, full, metadata, flying)

    def _of_tasks(self) -> Iterator[Metric]:
        where = self._where
        records_in = _counter("task_records_in", "Records that came.", *where)
        records_out = _counter("task_records_out", "Records that were sent or written.", *where)
        bytes_in = _counter("task_bytes_in", "Bytes that came.", *where)
        bytes_out = _counter("task_bytes_out", "Bytes that were sent or written.", *where)
        late = _counter("task_records_late", "Records that came too late.", *where)
        timers = _counter("task_timers_fired", "Timers that fired, by either clock.", *where)
        spent = _counter("task_time_seconds", "Where its time went.", *where, "state")
        queued = _gauge("task_queued_bytes", "What waits in front of it.", *where)
        watermark = _gauge("task_watermark_timestamp_seconds", "How far event time is.", *where)
        behind = _gauge("task_watermark_lag_seconds", "How far event time is behind.", *where)
        rows = _gauge("task_state_rows", "Rows of its state at its last snapshot.", *where)
        size = _gauge("task_state_bytes", "Bytes of its last snapshot.", *where)
        restored = _gauge("task_restore_seconds", "How long it took to make it.", *where)
        for job in self._jobs:
            names = [task.name for task in job.query.plan.tasks]
            for each in self._told_of(job):
                labels = self._labels(job, names[each.task], each.subtask)
                records_in.add_metric(labels, each.records_in)
                records_out.add_metric(labels, each.records_out)
                bytes_in.add_metric(labels, each.bytes_in)
                bytes_out.add_metric(labels, each.bytes_out)
                late.add_metric(labels, each.records_late)
                timers.add_metric(labels, each.timers_fired)
                restored.add_metric(labels, each.restore_ms / 1000)
                queued.add_metric(labels, each.queued_bytes)
                if each.watermark_us is not None:
                    watermark.add_metric(labels, each.watermark_us / 1e6)
                    behind.add_metric(labels, self._now_ms / 1e3 - each.watermark_us / 1e6)
                if each.state_rows is not None:
                    rows.add_metric(labels, each.state_rows)
                if each.state_bytes is not None:
                    size.add_metric(labels, each.state_bytes)
                for share in _SHARES:
                    spent.add_metric([*labels, share], getattr(each.shares, share) / 1e9)
        yield from (records_in, records_out, bytes_in, bytes_out, late, timers, spent, queued)
        yield from (watermark, behind, rows, size, restored, *self._of_last_checkpoint())

    def _told_of(self, job: ServedJob) -> list[SubtaskMeasures]:
        told = [each for slot in job.query.measured.values() for each in slot.subtasks]
        return _together(told) if self._is_by_task else told

    def _labels(self, job: ServedJob, task: str, subtask: int) -> list[str]:
        return [job.name, task] if self._is_by_task else [job.name, task, str(subtask)]

    def _of_last_checkpoint(self) -> Iterator[Metric]:
        where = self._where
        delay = _gauge("task_checkpoint_start_delay_seconds", "Until a barrier came.", *where)
        align = _gauge("task_checkpoint_alignment_seconds", "Until all had come.", *where)
        for job in self._jobs:
            last = job.query.checkpoint_statistics.latest_completed
            names = {task.vertex: task.name for task in last.tasks} if last is not None else {}
            longest: dict[tuple[str, ...], tuple[float, float]] = {}
            for part in last.subtasks if last is not None else ():
                key = tuple(self._labels(job, names[part.vertex], part.index))
                before = longest.get(key, (0.0, 0.0))
                ms = max(before[0], part.start_delay_ms), max(before[1], part.alignment_ms)
                longest[key] = ms
            for labels, (delay_ms, align_ms) in longest.items():
                delay.add_metric(labels, delay_ms / 1000)
                align.add_metric(labels, align_ms / 1000)
        yield from (delay, align)

    def _of_latency(self) -> Iterator[Metric]:
        took = HistogramMetricFamily(
            "stillframe_latency_seconds",
            "How long markers took from a source to a task, on the way of its records.",
            labels=["job_name", "source_name", "task_name"],
        )
        for job in self._jobs:
            names = [task.name for task in job.query.plan.tasks]
            for task, told in sorted(_latencies_of(job).items()):
                for source, latency in sorted(told.items()):
                    buckets = list(zip(_LATENCY_BOUNDS, accumulate(latency.counts), strict=True))
                    labels = [job.name, _ALL_SOURCES if source < 0 else names[source], names[task]]
                    took.add_metric(labels, buckets, latency.sum_ms / 1000)
        yield took

    def _of_sources(self) -> Iterator[Metric]:
        pending = _gauge("source_pending_records", "Records that are there unread.", "task_name")
        lag = _gauge("source_lag_seconds", "How old the newest record was.", "task_name")
        idle = _gauge("source_idle_seconds", "Since any of its subtasks has read.", "task_name")
        for job in self._jobs:
            silent_ms: dict[int, int] = {}
            for told in self._told_of(job):
                if told.silent_ms is not None and not job.has_ended:
                    least = silent_ms.get(told.task, told.silent_ms)
                    silent_ms[told.task] = min(least, told.silent_ms)
            for task, ms in sorted(silent_ms.items()):
                source = job.query.plan.tasks[task].operators[0].uid
                idle.add_metric([job.name, source], ms / 1000)
            for each in job.query.summary.lags:
                pending.add_metric([job.name, each.uid], each.records)
                if each.seconds is not None:
                    lag.add_metric([job.name, each.uid], each.seconds)
        yield from (pending, lag, idle)

    def _of_sinks(self) -> Iterator[Metric]:
        records = _counter("sink_records", "Records that sinks were given.", "task_name")
        commits = _counter("sink_commits", "Checkpoints that all sinks have committed.")
        seconds = HistogramMetricFamily(
            "stillframe_sink_commit_seconds",
            "From the end of a checkpoint until all sinks had committed it.",
            labels=["job_name"],
        )
        for job in self._jobs:
            written: dict[int, int] = {}
            for each in self._told_of(job):
                written[each.task] = written.get(each.task, 0) + each.records_written
            for task in job.query.plan.tasks:
                if task.has_sinks and task.index in written:
                    records.add_metric([job.name, task.name], written[task.index])
            spent = job.query.checkpoint_statistics.spent
            commits.add_metric([job.name], sum(spent.commit_counts))
            took_ms = spent.phases.get("commit", 0.0)
            seconds.add_metric([job.name], _up_to(spent.commit_counts), took_ms / 1000)
        yield from (records, commits, seconds)

    def _of_slots(self) -> Iterator[Metric]:
        of = ("slot", "host")
        memory = _gauge("slot_memory_bytes", "Memory of the slot's process.", *of)
        cpu = _counter("slot_cpu_seconds", "Processor time of the slot's process.", *of)
        longest = _gauge("slot_longest_step_seconds", "The longest turn of a task lately.", *of)
        offset = _gauge("slot_clock_offset_seconds", "Of its clock, behind the driver's.", *of)
        silence = _gauge("slot_silence_seconds", "Since the slot has told of itself.", *of)
        for job in self._jobs:
            hosts = {place.slot: place.host for place in job.query.slot_places}
            for slot, told in job.query.measured.items():
                labels = [job.name, str(slot), hosts.get(slot, "")]
                silent_ms = 0 if job.has_ended else max(0, self._now_ms - told.at_ms)
                silence.add_metric(labels, silent_ms / 1000)
                memory.add_metric(labels, told.rss_bytes)
                cpu.add_metric(labels, told.cpu_seconds)
                longest.add_metric(labels, told.longest_step_seconds)
                offset.add_metric(labels, job.query.clock_offsets_ms.get(slot, 0) / 1000)
        yield from (memory, cpu, longest, silence, offset)

    def _of_the_server(self) -> Iterator[Metric]:
        streams = GaugeMetricFamily("stillframe_http_streams", "Event streams that are open.")
        sent = CounterMetricFamily("stillframe_http_sent_bytes", "Bytes of answers, without heads.")
        dropped = GaugeMetricFamily(
            "stillframe_metrics_subtasks_dropped",
            "1: there are so many subtasks that their tasks are told instead.",
        )
        streams.add_metric([], self._traffic.streams)
        sent.add_metric([], self._traffic.sent_bytes)
        dropped.add_metric([], int(self._is_by_task))
        yield from (streams, sent, dropped)


def _latencies_of(job: ServedJob) -> dict[int, dict[int, Latency]]:
    """By task and source. Of very many such pairs all sources of a task are told as one, -1."""
    of_task: dict[int, list[Latency]] = {}
    for slot in job.query.measured.values():
        for each in slot.subtasks:
            of_task.setdefault(each.task, []).extend(each.latency)
    found = {task: latencies_together(told) for task, told in of_task.items()}
    if sum(map(len, found.values())) <= _LATENCY_PAIRS_MAX:
        return found
    return {
        task: latencies_together(replace(each, source_task=-1) for each in told.values())
        for task, told in found.items()
    }


def _together(told: Iterable[SubtaskMeasures]) -> list[SubtaskMeasures]:
    """Of each task one, as of all its subtasks: the sum of what is counted, the time of the
    slowest."""
    tasks: dict[int, SubtaskMeasures] = {}
    for each in told:
        first = tasks.get(each.task)
        tasks[each.task] = each if first is None else _both(first, each)
    return [tasks[task] for task in sorted(tasks)]


def _both(one: SubtaskMeasures, other: SubtaskMeasures) -> SubtaskMeasures:
    counted = (
        "records_in", "records_out", "bytes_in", "bytes_out", "records_late", "queued_bytes",
        "records_written", "state_rows", "state_bytes", "timers_fired",
    )  # fmt: skip
    values = {name: (getattr(one, name), getattr(other, name)) for name in counted}
    times_us = [each.watermark_us for each in (one, other) if each.watermark_us is not None]
    silent_ms = [each.silent_ms for each in (one, other) if each.silent_ms is not None]
    return replace(
        one,
        **{
            name: None if both == (None, None) else sum(filter(None, both))
            for name, both in values.items()
        },
        watermark_us=min(times_us, default=None),
        restore_ms=max(one.restore_ms, other.restore_ms),
        silent_ms=min(silent_ms, default=None),
        shares=TimeShares(
            *(getattr(one.shares, name) + getattr(other.shares, name) for name in _SHARES)
        ),
    )


def _buckets(spent: Spent) -> tuple[list[tuple[str, float]], float]:
    """Each with all below it, and the sum of all durations; a commit is none of one's duration."""
    took_ms = sum(ms for phase, ms in spent.phases.items() if phase != "commit")
    return _up_to(spent.counts), took_ms / 1000


def _up_to(counts: Sequence[int]) -> list[tuple[str, float]]:
    bounds = [*map(str, BUCKETS_SECONDS), "+Inf"]
    return list(zip(bounds, accumulate(counts), strict=True))


def _gauge(name: str, what: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"stillframe_{name}", what, labels=["job_name", *labels])


def _counter(name: str, what: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"stillframe_{name}", what, labels=["job_name", *labels])
