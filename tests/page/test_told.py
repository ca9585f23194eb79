"""Every figure of a job whose slots tell everything, and the views of one that has told nothing."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from eyes import FlowingDriver, OpenEyes, job_route
from followed_streams import Following
from gateway import Gateway
from told_jobs import ToldJob, plan_of
from waiting import wait_until

pytestmark = pytest.mark.browser

_NOTHING_YET = {
    "": "none yet",
    "checkpoints": "Checkpoints are taken when somebody asks only",
    "recovery": "This job has never failed.",
    "state": "No checkpoint is retained",
    "logs": "Slots send warnings and errors",
    "settings": "no guarantee",
}


@pytest.fixture(scope="module")
def told(driver: FlowingDriver) -> ToldJob:
    job = ToldJob.of(driver, plan_of("told", [(0, 1)], 2, 2))
    job.aligns = (1, 0)
    for second in range(1, 4):
        job.measure(second)
        job.read(10_000 * second, second, 4_200, 0.25)
    job.checkpoint(1)
    return job


def words_of(tab: Any, kind: str, *values: object) -> str:
    """As the page writes figures of this kind."""
    script = f"async (given) => (await import('/page/formats.js')).{kind}(...given)"
    return str(tab.page.evaluate(script, list(values)))


def cells(tab: Any, row: object) -> list[str]:
    tab.page.locator(f"tr[data-row='{row}']").wait_for()
    return list(tab.page.locator(f"tr[data-row='{row}'] > *").all_inner_texts())


def named(columns: list[str], row: list[Any]) -> dict[str, Any]:
    return dict(zip(columns, row, strict=True))


def test_jobs_and_their_lag_are_those_of_the_stream_of_all(
    driver: FlowingDriver, told: ToldJob, eyes: OpenEyes
) -> None:
    with Following(driver.server.port, "/events") as stream:
        data = stream.next("figures").data
    [job] = [each for each in data["jobs"] if each["name"] == "told"]
    assert (job["lag_records"], job["lag_seconds"]) == (4_200, 0.25)
    with eyes(driver.url) as tab:
        tab.open("/")
        tab.sees(".job-sentence", job["diagnosis"]["sentence"])
        shown = cells(tab, job["jid"])
        last = job["last_checkpoint"]
        assert shown[0] == "told"
        assert shown[1] == "● running"
        assert shown[3] == words_of(tab, "rate", job["records_in_per_second"])
        assert shown[5] == "4.2K · 250 ms"
        assert words_of(tab, "span", last["duration_ms"]) in shown[6]
        assert words_of(tab, "bytes", last["new_bytes"]) in shown[6]
        assert (shown[7], shown[9]) == (str(job["restarts"]), "no guarantee")


def test_a_task_shows_what_the_api_tells_of_each_subtask(
    driver: FlowingDriver, told: ToldJob, eyes: OpenEyes
) -> None:
    first, second = driver.get("/jobs/told")["vertices"]
    with eyes(driver.url) as tab:
        for vertex in (first["id"], second["id"]):
            with Following(driver.server.port, f"/jobs/told/events?watch={vertex}") as stream:
                columns = stream.next("hello").data["columns"]
                data = stream.next("figures").data
            api = driver.get("/jobs/told/figures")
            places = {each["slot"]: each for each in api["slots"]}
            [task] = [each for each in api["tasks"] if each["id"] == vertex]
            counted = {each["subtask"]: each for each in task["subtasks"]}
            tab.open(job_route("told", "tasks", vertex))
            tab.sees(".drawer tbody tr[data-row='1'] td", "vm")
            tab.sees(".drawer tbody tr[data-row='1'] td", "/s")
            assert tab.page.locator(".operators li").all_inner_texts() == [
                " ".join(f"{each['uid']} {each['name']}".split()) for each in task["operators"]
            ]
            heads = tab.page.locator(".drawer thead").first.locator("th").all_inner_texts()
            for row in data["subtasks"]:
                of = named(columns["subtasks"], row)
                own = counted[of["subtask"]]
                at = places[of["slot"]]
                drawer = tab.page.locator(f".drawer tr[data-row='{of['subtask']}'] > *")
                shown = dict(zip(heads, drawer.all_inner_texts(), strict=True))
                lag = words_of(tab, "lagInWords", of["lag_records"], of["lag_ms"])
                expected = {
                    "Subtask": str(of["subtask"]),
                    "Slot": str(of["slot"]),
                    "Host": at["host"],
                    "PID": str(at["pid"]),
                    "In": words_of(tab, "rate", of["records_in_per_second"]),
                    "Out": words_of(tab, "rate", of["records_out_per_second"]),
                    "Bytes in": words_of(tab, "byteRate", of["bytes_in_per_second"]),
                    "Bytes out": words_of(tab, "byteRate", of["bytes_out_per_second"]),
                    "working": words_of(tab, "percent", of["working"]),
                    "idle": words_of(tab, "percent", of["idle"]),
                    "queued": words_of(tab, "bytes", of["queued_bytes"]),
                    "Lag": lag,
                    "State rows": words_of(tab, "count", own["state-rows"]),
                    "State": words_of(tab, "bytes", own["state-bytes"]),
                    "Late": str(own["records-late"]),
                    "Records in, in all": words_of(tab, "count", own["records-in"]),
                    "Memory of slot": words_of(tab, "bytes", at["memory-bytes"]),
                }
                assert {name: shown[name] for name in expected} == expected
            assert shown["Watermark"].startswith("−")
            tab.picture(f"task-{first['id'] == vertex}")

        rows = tab.page.locator("[data-part=channels] tbody tr")
        channels = [named(columns["channels"], row) for row in data["channels"]]
        assert [each.split("\t") for each in rows.all_inner_texts()] == [
            [
                f"task 0 {of['source']}",
                str(of["subtask"]),
                words_of(tab, "rate", of["records_per_second"]),
                words_of(tab, "bytes", of["queued_bytes"]),
                "◇ held" if of["held"] else "",
            ]
            for of in channels
        ]
        assert {(of["source"], of["held"]) for of in channels} == {(0, 0), (1, 1)}
        rows = tab.page.locator("[data-part=latency] tbody tr")
        assert [each.split("\t") for each in rows.all_inner_texts()] == [
            ["task 0", str(each), "≤ 5 ms", "≤ 10 ms", "4"] for each in (0, 1)
        ]

        # Behind it: the lag, and who waits for a barrier.
        tab.open(job_route("told"))
        tab.is_live()
        assert tab.sees("[data-tile=lag] .tile-value") == "4.2K"
        assert "250 ms" in tab.sees("[data-tile=lag] .tile-more")
        assert tab.sees("[data-tile=watermark] .tile-value").startswith("−")
        tab.page.locator(".node-aligning", has_text="0 waits for 0-1 1 since").wait_for()


def log_rows(tab: Any) -> list[list[str]]:
    """As they are shown, without their time."""
    script = "rows => rows.map((row) => [...row.children].map((cell) => cell.textContent))"
    return [row[1:] for row in tab.page.locator("tbody tr").evaluate_all(script)]


def told_rows(driver: FlowingDriver, asked: str) -> list[list[str]]:
    """As they are to be shown."""
    return [
        [
            line["level"],
            "driver" if line["slot"] is None else f"slot {line['slot']}",
            *(str(line[name] or "–") for name in ("attempt", "checkpoint")),
            line["text"],
        ]
        for line in driver.get(f"/jobs/told/logs{asked}")["lines"]
    ]


def test_logs_are_those_of_the_api(driver: FlowingDriver, told: ToldJob, eyes: OpenEyes) -> None:
    log = logging.getLogger("stillframe")
    log.warning("a line for these logs")
    with eyes(driver.url) as tab:
        tab.open(job_route("told", "logs"))
        tab.sees(".log-text", "a line for these logs")
        wait_until(lambda: log_rows(tab) == told_rows(driver, ""))
        log.warning("a line that comes while somebody looks")
        tab.sees(".log-text", "a line that comes while somebody looks")
        # The lines are those of the process: others may have logged errors before.
        log.error("a line of another level")
        tab.page.locator("form select").select_option("ERROR")
        wait_until(lambda: log_rows(tab) == told_rows(driver, "?level=ERROR"))
        assert {row[0] for row in log_rows(tab)} == {"ERROR"}
        assert log_rows(tab)[-1][-1] == "a line of another level"
        nothing = {"lines": [], "more": False}
        tab.page.route("**/logs?level=WARNING", lambda route: route.fulfill(json=nothing))
        tab.page.locator("form select").select_option("WARNING")
        assert tab.sees(".empty") == "No lines yet."


def test_each_view_says_that_there_is_nothing_what_is_wrong_and_since_when_it_is_stale(
    driver: FlowingDriver, eyes: OpenEyes
) -> None:
    ToldJob.of(driver, plan_of("silent", [(0, 1)], 2, 2))
    way = Gateway(driver.server.port)
    try:
        with eyes(way.url) as tab:
            for view, text in _NOTHING_YET.items():
                tab.open(job_route("silent", *filter(None, [view])))
                tab.sees("main", text)
                tab.pictures(f"empty-{view or 'overview'}")
                tab.open(job_route("nobody", *filter(None, [view])))
                assert "no job 'nobody'" in tab.sees("main [role=alert]")
                tab.pictures(f"error-{view or 'overview'}")
            tab.open(job_route("silent"))
            tab.page.locator("svg a.node", has_text="working –").first.wait_for()
            way.close()
            tab.sees(".banner", "Stale since")
            # Of what was not loaded before, each view says that nobody can be reached.
            for view in _NOTHING_YET:
                tab.page.evaluate(f"location.hash = '#{job_route('silent', view)}'")
                tab.sees(".banner", "Stale since")
                tab.sees("main")
                tab.pictures(f"stale-{view or 'overview'}")
    finally:
        way.end()
