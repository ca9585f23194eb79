"""The page in a browser, story by story, before a real job."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import signal
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from eyes import JOB, MARKUP, FlowingDriver, OpenEyes, job_route
from followed_streams import Following, Told
from gateway import Gateway
from served_jobs import TOKEN
from waiting import wait_until

from stillframe.coordinator.history import CheckpointFailed
from stillframe.coordinator.query import Query
from stillframe.errors import Blame
from stillframe.ids import Attempt, CheckpointId
from stillframe.protocol.failures import Failure

pytestmark = pytest.mark.browser

VIEWS = ("", "checkpoints", "recovery", "state", "logs", "settings")
_LIVE = "(await import('/page/live.js')).live.value"


def newest(driver: FlowingDriver) -> dict[str, Any]:
    """The newest checkpoint that has been committed, in full."""
    history = driver.get(f"/jobs/{JOB}/checkpoints")["history"]
    return next(each for each in history if each["status"] == "COMPLETED")


def test_figures_on_every_view_are_those_of_the_api(
    driver: FlowingDriver, query: Query, eyes: OpenEyes
) -> None:
    told: dict[int, list[Told]] = {}
    is_paused = threading.Event()
    with (
        eyes(driver.url) as tab,
        Following(driver.server.port, f"/jobs/{JOB}/events") as stream,
    ):

        def listen() -> None:
            for each in stream:
                if each.kind == "figures":
                    told.setdefault(each.data["at"], []).append(each)
                if is_paused.is_set():
                    return

        listening = threading.Thread(target=listen, daemon=True)
        listening.start()
        page = tab.page

        def written(kind: str, value: object) -> str:
            """As the page writes a figure of this kind."""
            script = f"async (value) => (await import('/page/formats.js')).{kind}(value)"
            return str(page.evaluate(script, value))

        tab.open("/")
        assert JOB in tab.sees("tbody tr", JOB)
        tab.is_live()
        tab.picture("jobs")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        tab.sees(".sentence[data-code]")
        tab.is_live()

        # The overview: stopped at one event, which the other client has been told too.
        page.wait_for_function(
            f"async () => {_LIVE}.rates[Object.keys({_LIVE}.rates)[0]].length > 3"
        )
        tab.picture("overview")
        page.emulate_media(color_scheme="dark")
        tab.picture("overview-dark")
        page.emulate_media(color_scheme="light")
        page.keyboard.press(".")
        tab.sees(".live.paused")
        at = page.evaluate(f"async () => {_LIVE}.figures.at")
        wait_until(lambda: at in told)
        is_paused.set()
        listening.join(60)
        # Where slots tell late, figures of one moment come twice, with another rate of all records.
        job = page.evaluate(f"async () => {_LIVE}.figures.job")
        [data, *_] = [each.data for each in told[at] if each.data["job"] == job]
        assert data["diagnosis"]["sentence"] in tab.sees(".sentence")
        assert tab.sees("[data-tile=in] .tile-value") == written(
            "rate", job["records_in_per_second"]
        )
        assert tab.sees("[data-tile=out] .tile-value") == written(
            "rate", job["records_out_per_second"]
        )
        last = job["last_checkpoint"]
        assert tab.sees("[data-tile=checkpoint] .tile-value") == f"#{last['id']}"
        assert tab.sees("[data-tile=state] .tile-value") == written("bytes", last["full_bytes"])
        for row, task in zip(data["tasks"], driver.get(f"/jobs/{JOB}")["vertices"], strict=True):
            cells = page.locator(f"tr[data-row='{task['id']}'] > *").all_inner_texts()
            assert cells[:4] == [
                task["name"],
                str(task["parallelism"]),
                written("rate", row[1]),
                written("rate", row[2]),
            ]
            assert cells[5:10] == [written("percent", share) for share in row[5:10]]

        # A task, from the graph.
        page.locator("svg a.node").nth(1).click()
        tab.sees(".drawer h2", driver.get(f"/jobs/{JOB}")["vertices"][1]["name"])
        tab.sees(".drawer tbody tr")
        page.keyboard.press("Escape")
        page.locator(".drawer").wait_for(state="detached")
        page.keyboard.press(".")

        # Checkpoints, and the newest of them.
        page.keyboard.press("g")
        page.keyboard.press("c")
        tab.sees(".chart canvas")
        checkpoint = newest(driver)
        cells = page.locator(f"tr[data-row='{checkpoint['id']}'] > *")
        cells.first.wait_for()
        texts = cells.all_inner_texts()
        assert texts[3] == f"{checkpoint['num_subtasks']}/{checkpoint['num_subtasks']}"
        assert texts[7] == written("span", checkpoint["end_to_end_duration"])
        assert texts[9] == written("bytes", checkpoint["checkpointed_size"])
        assert texts[10] == written("bytes", checkpoint["state_size"])
        tab.picture("checkpoints")
        tab.open(job_route(JOB, "checkpoints", str(checkpoint["id"])))
        assert tab.sees("[data-fact=took]") == written("span", checkpoint["end_to_end_duration"])
        details = driver.get(f"/jobs/{JOB}/checkpoints/details/{checkpoint['id']}")
        for name, value in details["stillframe"]["phases"].items():
            assert tab.sees(f"[data-phase={name}]") == written("span", value)

        held = driver.get(f"/jobs/{JOB}/checkpoints/details/{checkpoint['id']}/operators")
        for of in held["operators"]:
            cells = page.locator(f"[data-part=held] tr[data-row='{of['uid']}'] > *")
            shown = cells.all_inner_texts()
            assert shown[2:4] == [written("count", of["rows"]), written("bytes", of["bytes"])]
            for each in of["positions"]:
                place = f"{each['id']} {json.dumps(each['position'], separators=(',', ':'))}"
                assert place in (cells.nth(4).text_content() or "")

        # Its barriers: as many arrivals, in the order in which they came.
        tab.sees(".replay-controls output", "t +")
        path = f"/jobs/{JOB}/checkpoints/details/{checkpoint['id']}/barriers"
        arrivals = sorted(
            arrival[2] for each in driver.get(path)["subtasks"] for arrival in each["arrivals"]
        )
        page.locator("details summary").first.click()
        shown = page.locator("[data-step-kind=arrived] .number").all_inner_texts()
        assert shown == [f"+{written('span', ms)}" for ms in arrivals]
        page.locator("[aria-label='To the beginning']").click()
        assert page.locator("output").get_attribute("data-at") == "0"
        page.locator("[data-step]").click()
        page.wait_for_function("document.querySelector('output').dataset.at > 0")
        tab.picture("checkpoint")

        # Settings.
        page.keyboard.press("g")
        page.keyboard.press("t")
        config = driver.get(f"/jobs/{JOB}/config")
        options = config["execution-config"]["user-config"]
        tab.sees("tr[data-row=checkpointInterval]")
        facts = page.locator(".facts.wide").inner_text()
        assert all(version in facts for version in config["versions"].values())
        shown = page.locator("tbody tr").evaluate_all(
            "rows => rows.map((row) => [...row.children].map((cell) => cell.innerText))"
        )
        assert dict(shown) == options


def test_a_failure_is_seen_and_so_is_the_recovery(
    driver: FlowingDriver, query: Query, eyes: OpenEyes
) -> None:
    with eyes(driver.url) as tab:
        tab.open(job_route(JOB))
        tab.is_live()
        before = query.summary.attempts
        os.kill(query.slot_pids[1], signal.SIGKILL)
        tab.sees(".happened .bad", f"Attempt {before} failed")
        tab.sees(".top", f"attempt {before + 1}")
        tab.sees(".top .state-RUNNING")

        tab.page.keyboard.press("g")
        tab.page.keyboard.press("r")
        cause = driver.get(f"/jobs/{JOB}/exceptions")["exceptionHistory"]["entries"][0]
        assert cause["stacktrace"] in tab.sees(f"[data-failure='{before}']")
        attempts = driver.get(f"/jobs/{JOB}/attempts")
        assert tab.sees("[data-count=attempts] strong") == str(len(attempts))
        wait_until(
            lambda: driver.get(f"/jobs/{JOB}/attempts")[0]["phases"]["caught_up"] is not None
        )
        tab.page.reload()
        tab.sees(".axis")
        tab.picture("recovery")


def test_a_savepoint_is_taken_by_keyboard_alone(
    driver: FlowingDriver, query: Query, eyes: OpenEyes, tmp_path: Path
) -> None:
    with eyes(driver.url) as tab:
        keyboard = tab.page.keyboard
        tab.open(job_route(JOB), with_token=False)
        tab.sees("[data-action=savepoint]")
        keyboard.press("a")
        keyboard.press("s")
        tab.sees("dialog .token")
        keyboard.type(TOKEN)
        keyboard.press("Enter")
        tab.sees("dialog .field")
        keyboard.press("Control+a")
        keyboard.type(str(tmp_path / "savepoint"))
        tab.sees("dialog .command", f"stillframe savepoint {JOB} {tmp_path}/savepoint")
        keyboard.press("Enter")
        assert str(tmp_path / "savepoint") in tab.sees("dialog [data-result=good]")
        tab.picture("savepoint")
        keyboard.press("Escape")
        tab.page.locator("dialog").wait_for(state="detached")
    assert (tmp_path / "savepoint").is_dir()


def test_a_key_is_looked_up_and_two_checkpoints_compared(
    driver: FlowingDriver, query: Query, eyes: OpenEyes
) -> None:
    with eyes(driver.url) as tab:
        tab.open(job_route(JOB, "state"), with_token=False)
        tab.sees(".token")  # state is shown to nobody without the token
        number = str(newest(driver)["id"])
        tab.open(job_route(JOB, "checkpoints", number))
        tab.page.locator("[data-states]").click()
        tab.sees("#lookup select", "count · aggregates (50")
        assert tab.page.locator("#lookup select").first.input_value() == number
        tab.page.locator("#lookup input").fill("app-0001")
        tab.page.locator("#lookup button").click()
        shown = tab.sees("tbody tr", "app-0001")
        found = driver.get(f"/jobs/{JOB}/state?checkpoint={number}&uid=count&key=app-0001")
        [row] = found["rows"]
        assert f"{row['value']['count']}" in shown
        assert f"Key group {found['key_group']}" in tab.sees("[data-found]")
        tab.page.locator("#difference button").click()
        tab.sees("[data-diff=count] [data-change=changed]")
        tab.picture("state")


def test_the_token_goes_with_requests_in_their_header_and_nowhere_else(
    driver: FlowingDriver, query: Query, eyes: OpenEyes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    came: list[bytes] = []
    way = Gateway(driver.server.port)

    def look(data: bytes) -> bool:
        came.append(data)
        return False  # none is held

    way.hold(look)
    try:
        with eyes(way.url) as tab:
            tab.page.goto(f"{way.url}/#token={TOKEN}")  # as `stillframe open` tells it
            tab.sees("tbody tr", JOB)
            tab.open(job_route(JOB, "logs"), with_token=False)
            tab.sees("form select")  # who has no token is asked for it instead
            tab.page.reload()
            tab.sees("form select")
            assert TOKEN not in tab.page.url
            assert TOKEN not in tab.page.content()
            kept = "document.cookie + JSON.stringify({...localStorage})"
            assert TOKEN not in tab.page.evaluate(kept)
    finally:
        way.end()
    sent = b"".join(came).lower()
    assert sent.count(TOKEN.encode()) == sent.count(b"authorization: bearer " + TOKEN.encode()) > 0
    assert b"\nreferer:" not in sent
    assert TOKEN not in caplog.text


def test_markup_is_text_wherever_it_stands(driver: FlowingDriver, eyes: OpenEyes) -> None:
    query = driver.start(
        MARKUP, checkpointLocation=str(driver.home / "odd"), checkpointsRetained="3"
    )
    query.checkpoint()
    number = query.checkpoint()
    history = driver.jobs[-1].history
    blame = Blame(MARKUP, MARKUP, False, MARKUP, MARKUP, MARKUP, MARKUP)
    history.note_failure(Failure(Attempt(1), 1, 1_000, MARKUP, "other", 1.0, blame=blame))
    history.tell(CheckpointFailed(CheckpointId(99), MARKUP))
    logging.getLogger("stillframe").warning(MARKUP)
    shown_in = {
        "": ".sentence, .top .job-name",
        "checkpoints": ".top .job-name",
        "recovery": "[data-failure] pre",
        "state": "#lookup option",
        "logs": ".log-text",
        "settings": ".top .job-name",
        f"checkpoints/{number}": ".top .job-name",
    }
    try:
        with eyes(driver.url) as tab:
            page = tab.page

            def is_text(selector: str) -> None:
                page.locator(selector, has_text=MARKUP).first.wait_for(state="attached")
                tab.is_loaded()
                assert page.locator("img").count() == 0

            tab.open("/")
            is_text("tbody tr")
            for view, selector in shown_in.items():
                tab.open(job_route(MARKUP, *filter(None, view.split("/"))))
                is_text(selector)
                if view == "recovery":
                    page.locator("[data-failure] summary").click()
                    assert page.locator("[data-failure] pre", has_text=MARKUP).count() == 2
                if view == "state":
                    page.locator("#lookup input").fill(MARKUP)
                    page.locator("#lookup button").click()
                    is_text("tbody tr")
                    page.locator("#difference button").click()
                    is_text("[data-diff] h3")
            for vertex in driver.get(job_route(MARKUP))["vertices"]:
                tab.open(job_route(MARKUP, "tasks", vertex["id"]))
                tab.sees(".drawer tbody tr")
                assert page.locator("img").count() == 0
            # What would run markup is refused by the browser itself.
            refused = page.evaluate(
                "() => { try { document.body.innerHTML = '<p>'; return 'done'; }"
                " catch (error) { return error.name; } }"
            )
            assert refused == "TypeError"
            assert page.evaluate("window.forbidden.splice(0).length") == 1
            assert "TrustedHTML" in tab.errors.pop()
    finally:
        query.stop()


def test_every_order_is_given_by_keyboard_alone(
    driver: FlowingDriver, eyes: OpenEyes, tmp_path: Path
) -> None:
    name = "ordered"
    driver.start(name, checkpointLocation=str(tmp_path / "chk"))
    with eyes(driver.url) as tab:
        keyboard = tab.page.keyboard
        tab.open(job_route(name))
        tab.sees("[data-action=cancel]")

        def order(keys: str, typed: str, done: str) -> None:
            for key in keys:
                keyboard.press(key)
            tab.sees("dialog h2")
            if typed:
                keyboard.press("Control+a")
                keyboard.type(typed)
            keyboard.press("Enter")
            tab.sees("dialog [data-result=good]", done)
            keyboard.press("Escape")
            tab.page.locator("dialog").wait_for(state="detached")

        order("ac", "", "Checkpoint 1 is complete.")
        order("ar", "3", "The parallelism is 3, it was 2")
        tab.sees(".top .state-RUNNING")
        order("ax", str(tmp_path / "savepoint"), "The job has stopped; the savepoint is in")
        assert (tmp_path / "savepoint").is_dir()
        driver.start(name, checkpointLocation=str(tmp_path / "chk"))
        tab.page.reload()
        # There is no key for what ends a job for good: its button, and the job's name.
        tab.page.locator("[data-action=cancel]").focus()
        keyboard.press("Enter")
        tab.sees("dialog .field")
        keyboard.type("another")
        assert tab.page.locator("dialog [type=submit]").is_disabled()
        keyboard.press("Control+a")
        keyboard.type(name)
        keyboard.press("Enter")
        tab.sees("dialog [data-result=good]", "The job ends.")
        keyboard.press("Escape")
        tab.sees(".top .state-CANCELED")


def test_eight_tabs_load_and_hidden_ones_hold_no_connection(
    driver: FlowingDriver, query: Query, eyes: OpenEyes
) -> None:
    with eyes(driver.url) as tab:
        tabs = [tab.page, *(tab.page.context.new_page() for _ in range(7))]

        def hides(page: Any, is_hidden: bool) -> None:
            """Playwright's tabs are all in sight: what a browser says of one that is not."""
            page.evaluate(
                "(is) => { Object.defineProperty(document, 'hidden', {value: is, configurable:"
                " true}); document.dispatchEvent(new Event('visibilitychange')); }",
                is_hidden,
            )

        streams = driver.server._streams
        before = streams.count
        for number, page in enumerate(tabs):
            page.goto(f"{driver.url}/#{job_route(JOB)}")
            page.wait_for_selector(".sentence[data-code]")
            wait_until(lambda: streams.count == before + 1)
            if number < 7:
                hides(page, True)
                wait_until(lambda: streams.count == before)
        hides(tabs[0], False)
        wait_until(lambda: streams.count == before + 2)
        number = query.summary.last_checkpoint or 0
        tabs[0].locator(".happened li", has_text=f"Checkpoint {number + 1} is complete").wait_for()
        assert tabs[0].locator(".banner").count() == 0


def test_times_are_local_or_utc_and_commands_are_copied(
    driver: FlowingDriver, query: Query, eyes: OpenEyes
) -> None:
    number = newest(driver)["id"]
    with eyes(driver.url, permissions=["clipboard-read", "clipboard-write"]) as tab:
        tab.open(job_route(JOB, "checkpoints", str(number)))
        at = driver.get(f"/jobs/{JOB}/checkpoints/details/{number}")["trigger_timestamp"]
        for zone in ("Europe/Berlin", "UTC"):
            moment = datetime.fromtimestamp(at / 1000, ZoneInfo(zone))
            tab.sees("[data-fact=triggered] time", moment.strftime("%H:%M:%S"))
            tab.page.get_by_role("button", name="Local time or UTC").click()
        tab.page.get_by_role("button", name="Copy the command that restores it").click()
        tab.sees(".copied button", "✓")
        copied = tab.page.evaluate("navigator.clipboard.readText()")
        assert copied == tab.sees(".copied code")
        assert copied.startswith("stillframe run --restore")


def test_after_a_cut_the_page_goes_on_exactly_and_meanwhile_no_clock_ticks(
    driver: FlowingDriver, query: Query, eyes: OpenEyes
) -> None:
    way = Gateway(driver.server.port)
    try:
        with eyes(way.url) as tab:
            tab.open(job_route(JOB))
            tab.is_live()
            tab.sees(".happened [data-event]")
            way.close()
            closed_at = time.time()
            banner = tab.sees(".banner", "Stale since")
            tab.picture("stale")
            # Since the last that it heard, whenever it noticed that no more comes.
            since = tab.page.evaluate(f"async () => {_LIVE}.since") / 1000
            assert way.answered_at - 1 <= since <= closed_at + 1
            shown = datetime.fromtimestamp(since, ZoneInfo("Europe/Berlin"))
            assert shown.strftime("%H:%M:%S") in banner
            clock = "async () => (await import('/page/live.js')).clock.value.ms"
            stood = tab.page.evaluate(clock)
            number = query.summary.last_checkpoint or 0
            wait_until(lambda: (query.summary.last_checkpoint or 0) > number + 1)
            assert tab.page.evaluate(clock) == stood
            way.open()
            tab.page.locator(".banner").wait_for(state="detached")
            number = query.summary.last_checkpoint or 0
            tab.sees(".happened li", f"Checkpoint {number + 1} is complete")
            # Lines of the log have numbers of the same row.
            happened = tab.page.evaluate(f"async () => {_LIVE}.happened.map((event) => event.key)")
            logged = tab.page.evaluate(f"async () => {_LIVE}.logs.map((line) => line.id)")
            numbers = sorted(int(key.rpartition("-")[2]) for key in [*happened, *logged])
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    finally:
        way.end()


def test_in_chinese_only_names_are_left_in_latin_letters(
    driver: FlowingDriver, query: Query, eyes: OpenEyes
) -> None:
    tasks = " ".join(each["name"] for each in driver.get(f"/jobs/{JOB}")["vertices"])
    allowed = {*re.findall(r"[A-Za-z]+", f"{JOB} {tasks} {os.uname().nodename}"), "Stillframe"}
    allowed |= {"UTC", "PID", "Prometheus", "Spark", "min", "checkpointInterval", "metrics"}
    allowed |= {"openapi", "json", "Python", "PySpark", "PyArrow"}
    with eyes(driver.url, language="zh") as tab:
        number = newest(driver)["id"]
        for view in ("", *VIEWS[1:], f"checkpoints/{number}"):
            tab.open(job_route(JOB, *filter(None, view.split("/"))))
            tab.is_live()
            tab.is_loaded()
            if view == "":
                tab.picture("overview-zh")
            left = tab.latin_words(allowed)
            assert not left, f"{view}: {left}"
        waits = {"checkpoint": 19, "task": "count", "subtask": 1, "seconds": 5}
        said = tab.page.evaluate(
            "async (told) => (await import('/page/sentence.js')).inWords(told)",
            {"code": "checkpoint-waits", "sentence": "", "args": {**waits, "senders": "clicks 0"}},
        )
        found = re.findall(r"\w+", said, re.ASCII)
        assert found == ["19", "count", "1", "5", "clicks", "0"]


def test_axe_finds_nothing_in_either_scheme_at_either_width(
    driver: FlowingDriver, query: Query, eyes: OpenEyes
) -> None:
    number = newest(driver)["id"]
    vertex = driver.get(f"/jobs/{JOB}")["vertices"][1]["id"]
    routes = ["/", *(job_route(JOB, *filter(None, [view])) for view in VIEWS)]
    routes += [job_route(JOB, "checkpoints", str(number)), job_route(JOB, "tasks", vertex)]
    with eyes(driver.url) as tab:
        for route in routes:
            tab.open(route)
            tab.is_live()
            tab.is_loaded()
            for width, scheme in itertools.product((1440, 320), ("light", "dark")):
                tab.page.set_viewport_size({"width": width, "height": 900})
                tab.page.emulate_media(color_scheme=scheme)
                tab.axe_finds_nothing()
            if route == job_route(JOB):
                tab.picture("overview-narrow")


def test_less_motion_gives_the_steps_as_a_list_and_forced_colours_keep_the_signs(
    driver: FlowingDriver, query: Query, eyes: OpenEyes
) -> None:
    route = job_route(JOB, "checkpoints", str(newest(driver)["id"]))
    with eyes(driver.url, reduced_motion="reduce", forced_colors="active") as tab:
        tab.open(route)
        tab.sees(".replay-steps li")
        assert tab.page.locator("[data-play]").count() == 0
        assert "✓" in tab.sees(".status")
