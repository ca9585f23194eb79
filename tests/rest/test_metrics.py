"""What Prometheus is told, by rules for names and units, and how much of it there may be."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from stillframe.protocol.checkpointing import CheckpointingStatistics, Counts
from stillframe.protocol.measures import Latency, Measured, SubtaskMeasures, TimeShares
from stillframe.protocol.statistics import CheckpointStatistics, TaskShape
from stillframe.rest.api import Traffic
from stillframe.rest.metrics import SERIES_MAX, metrics_text

NOW_MS = 1_763_370_000_000
UNITS = ("seconds", "bytes", "records", "rows")
PLAIN = {
    "checkpoint_last_completed_id", "checkpoints_in_progress", "http_streams", "job", "job_state",
    "metrics_subtasks_dropped", "checkpoints", "job_restarts", "job_rescales", "sink_commits",
    "task_records_in", "task_records_out", "task_records_late", "task_bytes_in", "task_bytes_out",
    "task_timers_fired",
}  # fmt: skip
"""Counts of things, whose name is their unit, or that have none."""


def part(task, subtask, sources=1):
    shares = TimeShares(4_000_000_000, 0, 0, 0, 6_000_000_000)
    return SubtaskMeasures(
        task, subtask, 10, 20, 100, 200, shares, 5_000_000 + subtask, 1, 7, 3, 30,
        records_written=2, timers_fired=4, restore_ms=250 * (1 + subtask),
        silent_ms=None if task else 2_000 * (1 + subtask),
        latency=tuple(Latency(each, (1, 1, *(0,) * 17, 1), 700_003) for each in range(sources)),
    )  # fmt: skip


class LargeJob:
    """As many tasks with as many subtasks each, all measured and in a checkpoint: what is asked of
    a served job and of its query for metrics."""

    def __init__(self, tasks: int, parallelism: int, sources: int = 1) -> None:
        self.name, self.state, self.has_ended = "large", "RUNNING", False
        numbers = range(tasks)
        shapes = tuple(TaskShape(f"v{task}", f"task {task}", parallelism) for task in numbers)
        last = CheckpointStatistics(3, 1, "COMPLETED", "CHECKPOINT", NOW_MS, 9.0, shapes, ())
        self.query = SimpleNamespace(
            plan=SimpleNamespace(
                tasks=[
                    SimpleNamespace(
                        index=task,
                        name=f"task {task}",
                        operators=(SimpleNamespace(uid=f"source {task}"),),
                        parallelism=parallelism,
                        has_sinks=task == 1,
                    )
                    for task in numbers
                ]
            ),
            summary=SimpleNamespace(restarts=0, rescales=1, down_seconds=2.5, lags=()),
            config=SimpleNamespace(checkpoint_mode="exactly-once", checkpoint_interval_seconds=10),
            guarantee=lambda: SimpleNamespace(word="exactly-once"),
            checkpoint_statistics=CheckpointingStatistics(Counts(0, 1, 0, 1, 0), (last,), None),
            measured={
                slot: Measured(NOW_MS, tuple(part(task, slot, sources) for task in numbers))
                for slot in range(parallelism)
            },
            slot_places=(),
            clock_offsets_ms={0: 1_500},
        )


def told(*jobs):
    text = metrics_text(jobs, NOW_MS, Traffic(streams=2, sent_bytes=1_000))
    return list(text_string_to_metric_families(text))


def series(families, name):
    samples = (each for family in families for each in family.samples)
    return [each for each in samples if each.name == f"stillframe_{name}"]


def test_names_say_their_unit_and_counters_that_they_count():
    families = told(LargeJob(2, 2))

    assert len(families) > 40
    for family in families:
        name = family.name.removeprefix("stillframe_")
        assert re.fullmatch("stillframe(_[a-z]+)+", family.name), "one prefix, and plain words"
        assert name.endswith(UNITS) or name in PLAIN, name
        assert family.documentation.endswith("."), name
        assert not re.search("_(ms|milliseconds|kb|percent|total)$", name), name
        for sample in family.samples:
            assert "job" not in sample.labels, "every scrape sets it"
            assert family.type != "counter" or sample.name.endswith("_total")


def test_every_subtask_has_its_series_while_there_is_room():
    families = told(LargeJob(3, 4))

    assert len(series(families, "task_records_in_total")) == 12
    assert [each.value for each in series(families, "metrics_subtasks_dropped")] == [0]
    fired = series(families, "task_timers_fired_total")
    assert {each.value for each in fired} == {4.0}
    restored = series(families, "task_restore_seconds")
    assert [each.value for each in restored if each.labels["subtask_index"] == "3"] == 3 * [1.0]
    [idle] = series(families, "source_idle_seconds")
    assert (idle.labels["task_name"], idle.value) == ("source 0", 2.0), "of the one that read last"
    [written] = series(families, "sink_records_total")
    assert (written.labels["task_name"], written.value) == ("task 1", 8)
    assert series(families, "slot_clock_offset_seconds")[0].value == 1.5
    assert [each.value for each in series(families, "http_streams")] == [2]
    assert [each.value for each in series(families, "job_down_seconds_total")] == [2.5]


def test_how_long_markers_took_is_told_for_each_pair_of_source_and_task():
    families = told(LargeJob(3, 4))

    counts = series(families, "latency_seconds_bucket")
    to_last = {each.labels["le"]: each.value for each in counts if "task 2" in each.labels.values()}
    assert {name: to_last[name] for name in ("0.001", "0.002", "600.0", "+Inf")} == {
        "0.001": 4, "0.002": 8, "600.0": 8, "+Inf": 12,
    }  # fmt: skip
    pairs = {(each.labels["source_name"], each.labels["task_name"]) for each in counts}
    assert pairs == {("task 0", f"task {task}") for task in range(3)}
    assert series(families, "latency_seconds_sum")[0].value == pytest.approx(4 * 700.003)


def test_of_twelve_thousand_subtasks_their_tasks_are_told():
    families = told(LargeJob(200, 64, sources=3))

    assert sum(len(family.samples) for family in families) < SERIES_MAX
    records = series(families, "task_records_in_total")
    assert (len(records), {each.value for each in records}) == (200, {640})
    assert set(records[0].labels) == {"job_name", "task_name"}
    spent = series(families, "task_time_seconds_total")
    assert sum(each.value for each in spent) == pytest.approx(200 * 64 * 10)
    behind = series(families, "task_watermark_timestamp_seconds")
    assert {each.value for each in behind} == {5.0}, "of the slowest"
    assert {each.value for each in series(families, "task_restore_seconds")} == {16.0}
    assert {each.value for each in series(families, "task_timers_fired_total")} == {256.0}
    assert [each.value for each in series(families, "source_idle_seconds")] == [2.0]
    took = series(families, "latency_seconds_count")
    assert {(each.labels["source_name"], each.value) for each in took} == {("all", 3 * 3 * 64)}
    assert [each.value for each in series(families, "metrics_subtasks_dropped")] == [1]
