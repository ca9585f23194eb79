"""What tasks are measured to do, and that Prometheus is told the same."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

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
    assert value("slot_memory_bytes", slot="0") > 1 << 20


def test_other_methods_than_reading_are_refused(quiet):
    driver, _ = quiet

    assert driver.client.change("POST", "/metrics").status == 405
