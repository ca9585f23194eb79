"""Large jobs in a browser. What they cost is counted in processor time: others use the machine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from eyes import JOB, FlowingDriver, OpenEyes, job_route
from followed_streams import Following, Told
from told_jobs import ToldJob, plan_of

from stillframe.coordinator.query import Query

pytestmark = pytest.mark.browser

FIRST_SECONDS_MAX = 1.5
UPDATE_SECONDS_MAX = 0.05
FRAME_SECONDS_MAX = 0.05
# To look at each frame would draw frames for the test alone, which costs as much as the update.
LOOK_EACH_MS = 50
STREAM_BYTES_A_SECOND_MAX = 40_000
HEAP_BYTES_MORE_MAX = 1_000_000
_HEARD = "async (events) => (await import('/page/live.js')).live.value.changed >= events"
_SHOWN = "async (at) => (await import('/page/live.js')).live.value.figures?.at >= at"


def layered(layers: int, wide: int) -> list[tuple[int, int]]:
    """Each task reads from two of the layer before it, and some from a third one."""
    edges = [
        ((layer - 1) * wide + (place + beside) % wide, layer * wide + place)
        for layer in range(1, layers)
        for place in range(wide)
        for beside in (0, 1)
    ]
    thirds = [((layer - 1) * wide + 5, layer * wide) for layer in range(1, layers)]
    return [*edges, *thirds, (190 - wide, 199)]


class Spent:
    """Processor time of a tab's main thread, and its memory."""

    def __init__(self, page: Any) -> None:
        self._session = page.context.new_cdp_session(page)
        self._session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def seconds(self) -> float:
        return self._metric("TaskDuration")

    def heap_bytes(self) -> float:
        self._session.send("HeapProfiler.collectGarbage")
        return self._metric("JSHeapUsedSize")

    def _metric(self, name: str) -> float:
        told = self._session.send("Performance.getMetrics")["metrics"]
        return next(float(each["value"]) for each in told if each["name"] == name)


class Frames:
    """What the main thread of a tab did at a stretch, in processor time: whoever scrolls or types
    meanwhile waits for it."""

    def __init__(self, page: Any) -> None:
        self._browser = page.context.browser
        self._browser.start_tracing(page=page, categories=["toplevel", "__metadata"])

    def longest_seconds(self) -> float:
        events = json.loads(self._browser.stop_tracing())["traceEvents"]
        mains = {
            (each["pid"], each["tid"])
            for each in events
            if each["name"] == "thread_name" and each["args"]["name"] == "CrRendererMain"
        }
        spent = [
            each["tdur"]
            for each in events
            if each["ph"] == "X" and "tdur" in each and (each["pid"], each["tid"]) in mains
        ]
        return float(max(spent)) / 1e6  # of microseconds


def test_barriers_of_64_x_64_are_replayed_in_the_order_in_which_they_were_acknowledged(
    driver: FlowingDriver, eyes: OpenEyes
) -> None:
    job = ToldJob.of(driver, plan_of("wide", [(0, 1)], 2, 64))
    came = job.checkpoint(1)
    assert len(came) == 64 * 64
    with eyes(driver.url) as tab:
        tab.open(job_route("wide", "checkpoints", "1"))
        tab.sees(".replay-controls output", "t +")
        tab.page.locator(".replay details summary").click()
        shown: dict[int, str] = {}
        for moment in range(5, 62):
            tab.page.locator(".replay input[type=range]").fill(str(moment))
            tab.page.wait_for_function(f"document.querySelector('output').dataset.at == {moment}")
            first, texts = tab.page.evaluate(
                "() => { const list = document.querySelector('.replay-steps');"
                " return [list.start, [...list.children].map((each) => each.dataset.stepKind"
                " === 'arrived' ? each.innerText : '')]; }"
            )
            shown |= dict(enumerate(texts, first))
        in_words = [text.partition(" ms ")[2] for _, text in sorted(shown.items()) if text]
        assert in_words == [
            f"{task} {subtask}: barrier from {sender} {source}"
            for _, task, subtask, sender, source in came
        ]
        tab.picture("replay-64")


@pytest.mark.parametrize(
    "updates", [4, pytest.param(30, marks=pytest.mark.soak, id="for a minute")]
)
def test_two_hundred_tasks_are_drawn_at_once_and_cost_little_to_look_at(
    driver: FlowingDriver, eyes: OpenEyes, updates: int
) -> None:
    edges = layered(20, 10)
    assert len(edges) == 400
    job = ToldJob.of(driver, plan_of("large", edges, 200, 64))
    job.measure(1)
    job.measure(2)
    sizes: list[int] = []
    with eyes(driver.url) as tab:
        spent = Spent(tab.page)
        tab.open(job_route("large"))
        tab.page.wait_for_selector("svg a.node")
        tab.is_live()
        assert spent.seconds() <= FIRST_SECONDS_MAX

        with Following(driver.server.port, "/jobs/large/events") as stream:

            def hears(seconds: range) -> float:
                """A report of each second comes and is shown; processor time for each."""
                before = spent.seconds()
                for second in seconds:
                    job.measure(second)
                    newest = stream.next("figures")
                    shown_at = newest.data["at"]
                    tab.page.wait_for_function(_SHOWN, arg=shown_at, polling=LOOK_EACH_MS)
                    sizes.append(len(json.dumps(newest.data, separators=(",", ":"))))
                return (spent.seconds() - before) / len(seconds)

            hears(range(3, 5))
            frames = Frames(tab.page)
            each_seconds = hears(range(5, 5 + updates))
            assert frames.longest_seconds() <= FRAME_SECONDS_MAX
        assert each_seconds <= UPDATE_SECONDS_MAX
        assert max(sizes) / 2 <= STREAM_BYTES_A_SECOND_MAX  # large ones come each two seconds
        tab.picture("overview-large")

        # Whoever looks for a task is brought there.
        tab.page.locator("[data-find]").fill("task 137")
        tab.page.locator("[data-find]").press("Tab")
        there = tab.page.locator("svg a.node", has_text="task 137")
        assert "working" in there.text_content()
        assert there.evaluate("node => node === document.activeElement")


def test_eight_hours_of_news_leave_no_more_behind_than_one(
    driver: FlowingDriver, query: Query, eyes: OpenEyes
) -> None:
    with Following(driver.server.port, f"/jobs/{JOB}/events") as stream:
        hello = stream.next("hello")
        figures = stream.next("figures")
        checkpoint = stream.next("checkpoint")

    def frame(told: Told, number: int | None = None) -> str:
        name = "" if number is None else f"id: {hello.data['run']}-{number}\n"
        return f"{name}event: {told.kind}\ndata: {json.dumps(told.data)}\n\n"

    # A figure each second, a checkpoint each ten: two hours at a time.
    parts = [frame(hello)]
    for second in range(7_200):
        parts.append(frame(figures))
        if second % 10 == 0:
            parts.append(frame(checkpoint, second))
    body = "".join(parts)
    with eyes(driver.url) as tab:
        spent, heaps = Spent(tab.page), []
        tab.page.route(
            f"**/jobs/{JOB}/events", lambda route: route.fulfill(
                body=body, content_type="text/event-stream"
            )
        )  # fmt: skip
        tab.open(job_route(JOB))
        for played in range(1, 5):
            tab.page.wait_for_function(_HEARD, arg=played * 720)
            tab.sees(".banner")  # the stream is over
            heaps.append(spent.heap_bytes())
            tab.page.evaluate("async () => (await import('/page/live.js')).retry()")
        assert max(heaps) - min(heaps) <= HEAP_BYTES_MORE_MAX, heaps
