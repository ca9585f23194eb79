"""What tasks are measured to do, and that Prometheus is told the same."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from told_jobs import plan_of

from stillframe.ids import SlotIndex, SubtaskIndex
from stillframe.protocol.measures import (
    ChannelMeasures,
    Measured,
    SubtaskMeasures,
    TimeShares,
)
from stillframe.rest.figure_rows import (
    CHANNELS_MAX,
    TASK_COLUMNS,
    channel_rows,
    rates_of,
    task_rows,
)
from stillframe.runtime.time_shares import IDLE, ShareClock

RECORDS = 200
"""That the sources of the quiet job have read before they stand still."""


@pytest.fixture
def figures(quiet, until):
    driver, _ = quiet

    def told():
        answer = driver.client.get("/jobs/counts/figures")
        return {task["name"].split()[0]: task["subtasks"] for task in answer["tasks"]}

    until(lambda: sum_of(told().get("read", []), "records-in") == RECORDS)
    return told


def sum_of(subtasks, field):
    return sum(each[field] for each in subtasks)


def test_what_a_task_sends_is_what_the_next_one_takes(figures, until):
    """Counted at both ends of every channel, within slots and between them."""
    until(lambda: sum_of(figures()["aggregate"], "records-in") > 0)
    tasks = figures()

    assert sum_of(tasks["read"], "bytes-in") > 0
    for field in ("records", "bytes"):
        sent = sum_of(tasks["read"], f"{field}-out")
        assert sent == sum_of(tasks["aggregate"], f"{field}-in") > 0
    assert [each["queued-bytes"] for each in tasks["aggregate"]] == [0, 0]


def test_the_shares_of_a_subtasks_time_are_all_of_it(figures, until):
    before = figures()
    until(lambda: figures() != before)
    after = figures()

    for task, subtasks in after.items():
        for earlier, later in zip(before[task], subtasks, strict=True):
            spent = {
                share: later["time-ms"][share] - earlier["time-ms"][share]
                for share in later["time-ms"]
            }
            assert min(spent.values()) >= 0
            # They stand still: sources with nothing to read, a count that gets nothing.
            assert spent["idle"] >= 0.9 * sum(spent.values())


def test_a_task_that_works_30_ms_of_each_100_is_said_to_work_300_ms_a_second():
    clock, reports = ShareClock(0), []
    for hundred in range(51):  # five seconds, as the figures are means of
        clock.begin_turn(hundred * 100_000_000)
        if hundred in (0, 50):
            shares = clock.shares(hundred * 100_000_000)
            part = SubtaskMeasures(0, SubtaskIndex(0), 0, 0, 0, 0, shares, None, 0, 0)
            reports.append(Measured(hundred * 100, (part,)))
        clock.end_turn(hundred * 100_000_000 + 30_000_000, has_worked=True, waits=IDLE)

    [row] = task_rows(rates_of({SlotIndex(0): (reports[0], reports[1])}))
    told = dict(zip(TASK_COLUMNS, row, strict=True))
    assert told["working"] == pytest.approx(0.3, abs=0.03)
    shares = ("working", "turn", "backpressured", "held", "idle")
    assert sum(told[share] for share in shares) == pytest.approx(1, abs=0.02)


def test_prometheus_is_told_the_same(quiet, figures):
    driver, query = quiet
    said = driver.client.ask("GET", "/metrics")
    assert said.headers["Content-Type"].startswith("application/openmetrics-text")

    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(said.text)
        for sample in family.samples
    }

    def value(name, **labels):
        return samples[(f"stillframe_{name}", *sorted({"job_name": "counts", **labels}.items()))]

    for subtask, each in enumerate(figures()["read"]):
        labels = {"task_name": "read scripted", "subtask_index": str(subtask)}
        assert value("task_records_in_total", **labels) == each["records-in"] > 0
        assert value("task_bytes_out_total", **labels) == each["bytes-out"] > 0
    assert value("job_state", stillframe_job_state="RUNNING") == 1
    assert value("job_restarts_total") == query.summary.restarts == 1
    assert value("checkpoint_last_completed_id") == query.summary.last_checkpoint
    assert value("slot_memory_bytes", slot="0", host="127.0.0.1") > 1 << 20
    took = sum(each.end_to_end_ms for each in query.checkpoint_statistics.completed) / 1000
    phases = ("start", "align", "sync", "async", "store")
    spent = sum(value("checkpoint_phase_seconds_total", phase=each) for each in phases)
    assert spent == pytest.approx(took, abs=0.001)
    assert value("checkpoint_duration_seconds_sum") == pytest.approx(took, abs=0.001)
    counted = len(query.checkpoint_statistics.completed)
    assert value("checkpoint_duration_seconds_count") == counted >= 2


def test_a_task_tells_the_same_by_flinks_names(quiet, figures, until):
    driver, _ = quiet
    vertex = {task["name"]: task["id"] for task in driver.client.get("/jobs/counts")["vertices"]}
    path = f"/jobs/counts/vertices/{vertex['read scripted']}"

    def metrics(*asked):
        said = driver.client.get(f"{path}/subtasks/metrics?get={','.join(asked)}")
        return {each.pop("id"): each for each in said}

    told = figures()["read"]
    read = [each["records-in"] for each in told]
    assert metrics("numRecordsIn", "nobodyKnows") == {
        "numRecordsIn": {
            "min": min(read),
            "max": max(read),
            "avg": sum(read) / 2,
            "sum": RECORDS,
            "skew": pytest.approx(100 * abs(read[0] - read[1]) / RECORDS),
        }
    }
    subtasks = driver.client.get(path)["subtasks"]
    assert [each["metrics"]["read-records"] for each in subtasks] == read
    assert [each["metrics"]["write-bytes"] for each in subtasks] == [e["bytes-out"] for e in told]
    assert [each["taskmanager-id"] for each in subtasks] == [f"slot-{e['slot']}" for e in told]

    times = ("busyTimeMsPerSecond", "backPressuredTimeMsPerSecond", "idleTimeMsPerSecond")
    until(lambda: len(metrics(*times)) == 3)
    assert sum(each["avg"] for each in metrics(*times).values()) == pytest.approx(1000, abs=1)
    assert set(times) < {each["id"] for each in driver.client.get(f"{path}/subtasks/metrics")}
    waits = driver.client.get(f"{path}/backpressure")
    assert (waits["status"], waits["backpressureLevel"]) == ("ok", "ok")
    for each in waits["subtasks"]:
        assert each["ratio"] + each["busyRatio"] + each["idleRatio"] == pytest.approx(1, abs=0.01)
    assert driver.client.get(f"{path}/watermarks") == []
    assert driver.client.ask("GET", f"/jobs/counts/vertices/{'0' * 32}").status == 404


def test_the_last_seconds_are_remembered_before_anybody_asks(quiet, figures, until):
    driver, _ = quiet

    def told(more=""):
        return driver.client.get(f"/jobs/counts/figures?window=900{more}")["window"]

    def idle():
        return [task["idle"][-1] for task in told()["tasks"]]

    until(lambda: len(idle()) == 2 and None not in idle() and min(idle()) > 0.5)
    window = told()
    assert window["at"] == sorted(window["at"])
    for task in window["tasks"]:
        assert task["records_in_per_second"][-1] == 0
    vertex = driver.client.get("/jobs/counts")["vertices"][1]["id"]
    assert [each["task"] for each in told(f"&vertex={vertex}")["tasks"]] == [1]
    assert driver.client.ask("GET", "/jobs/counts/figures?window=901").status == 400


def test_state_and_place_of_a_subtask_are_those_of_its_last_checkpoint(quiet, figures, until):
    driver, query = quiet
    newest = query.checkpoint_statistics.completed[0]

    def told():
        return figures()["aggregate"]

    until(lambda: all(each["state-rows"] is not None for each in told()))
    assert sum_of(told(), "state-rows") == 7, "one for each app"
    kept = {part.index: part for part in newest.subtasks if part.last_from is not None}
    assert [each["state-bytes"] for each in told()] == [kept[n].state_bytes for n in (0, 1)]
    slots = driver.client.get("/jobs/counts/figures")["slots"]
    assert [each["pid"] for each in slots] == list(query.slot_pids)
    assert {each["aligning"] for each in told()} == {None}


def test_other_methods_than_reading_are_refused(quiet):
    driver, _ = quiet

    assert driver.client.change("POST", "/metrics").status == 405


def test_of_very_many_channels_those_are_told_where_most_waits():
    senders = CHANNELS_MAX + 2

    def measured(records):
        channels = (
            *(ChannelMeasures("0-1", each, records, 0, each, False) for each in range(senders)),
            ChannelMeasures("0-1", senders, records, 0, 0, True),
        )
        spent = TimeShares(idle=records * 10_000_000)
        part = SubtaskMeasures(1, SubtaskIndex(0), 0, 0, 0, 0, spent, None, 0, 0)
        return Measured(records * 10, (replace(part, channels=channels),))

    [subtask] = rates_of({SlotIndex(0): (measured(0), measured(100))})[1]
    rows = channel_rows(plan_of("wide", [(0, 1)], 2, senders + 1), [subtask])

    assert rows[0] == [0, senders, 0, 100, 0, 1], "one that is held comes first"
    waiting_most = range(senders - 1, senders - CHANNELS_MAX, -1)
    assert [row[1] for row in rows[1:]] == list(waiting_most)
