"""A browser in front of a driver whose job runs, without Spark."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chromium import chromium
from served_jobs import COUNTS, TOKEN, ServingDriver
from waiting import wait_until

from stillframe.api.aggregates import AggregateCall
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import CLICK_SCHEMA, ClickSource
from stillframe.coordinator.query import Query
from stillframe.graph.logical import Aggregate, Node, Read, Write
from stillframe.graph.plan import Plan, build_plan
from stillframe.testing.fetched import NotFetched

pa = pytest.importorskip("pyarrow")
JOB = "page-views"
MARKUP = '"><img src=x onerror=alert(1)>'
_WAIT_MS_MAX = 60_000
_PICTURES = "STILLFRAME_PICTURES"
"""A directory: pictures of the page go there."""

# Whatever the page's policy forbids is told to the test, and nothing else is changed.
_LISTEN = """
window.forbidden = [];
addEventListener('securitypolicyviolation', (event) => window.forbidden.push(
  `${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`));
"""


class FlowingDriver(ServingDriver):
    """Its jobs read clicks at a pace, and never end."""

    def plan(self, name: str, parallelism: int = 2, fault: Any = None) -> Plan:
        source = ClickSource(records_per_second=2_000, partitions=2, apps=50)
        read = Node(Read(source), CLICK_SCHEMA, given_uid="clicks")
        call = AggregateCall("count", None, "count", pa.int64())
        counted = Node(Aggregate(("app_id",), (call,)), COUNTS, (read,), given_uid="count")
        write = Node(Write(DiscardSink()), COUNTS, (counted,), given_uid="nowhere")
        return build_plan(name, [write], parallelism)

    def get(self, path: str) -> Any:
        request = urllib.request.Request(f"{self.url}{path}")
        request.add_header("Authorization", f"Bearer {TOKEN}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    try:
        found = chromium()
    except NotFetched as error:
        pytest.skip(str(error))
    # Names lead nowhere: a page that asked another host would fail.
    arguments = ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--disable-gpu"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=found.program,
            args=arguments,
            env={**os.environ, **found.environment},
        )
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowingDriver]:
    made = FlowingDriver(tmp_path_factory.mktemp("page"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def query(driver: FlowingDriver) -> Query:
    """A job that takes a checkpoint each second, and has taken three."""
    started = driver.start(JOB, checkpointInterval="1 s", checkpointsRetained="5")
    wait_until(lambda: (started.summary.last_checkpoint or 0) >= 3)
    return started


class Eyes:
    """One tab, and all that it did that it should not."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.errors: list[str] = []
        self.asked: list[str] = []
        page.set_default_timeout(_WAIT_MS_MAX)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._hear)
        page.on("dialog", lambda dialog: self.errors.append(f"a dialog: {dialog.message}"))
        page.on("request", lambda request: self.asked.append(request.url))

    def _hear(self, message: Any) -> None:
        # A request that is refused or cut off is told by the browser, and shown by the page.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def open(self, route: str, *, with_token: bool = True) -> None:
        """Another view, as a new address: `/jobs/x`, behind the #."""
        token = f"{'&' if '?' in route else '?'}token={TOKEN}" if with_token else ""
        self.page.goto(f"{self.url}/#{route}{token}")
        self.page.wait_for_selector("main")
        if with_token:
            self.page.wait_for_function("!location.href.includes('token')")

    def sees(self, selector: str, text: str | None = None) -> str:
        """What stands there, as soon as it does."""
        found = self.page.locator(selector)
        if text is not None:
            found = found.filter(has_text=text)
        found.first.wait_for()
        return str(found.first.inner_text())

    def is_live(self) -> None:
        """The stream has told figures of every task."""
        self.page.wait_for_function(
            "async () => { const { live } = await import('/page/live.js');"
            " const { hello, figures } = live.value;"
            " return hello && figures && (!hello.tasks"
            " || Object.keys(figures.tasks).length === hello.tasks.length) }"
        )

    def has_done_nothing_wrong(self) -> None:
        assert self.page.evaluate("window.forbidden") == []
        assert self.errors == []
        assert [url for url in self.asked if not url.startswith(self.url)] == []

    def picture(self, name: str) -> None:
        if os.environ.get(_PICTURES):
            directory = Path(os.environ[_PICTURES])
            directory.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=str(directory / f"{name}.png"), animations="disabled")


OpenEyes = Callable[..., Any]


@pytest.fixture
def eyes(browser: Any) -> OpenEyes:
    """Opens tabs that must have done nothing wrong when they are closed."""

    @contextmanager
    def opened(url: str, *, width: int = 1440, language: str = "en", **options: Any) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            locale="zh-CN" if language == "zh" else "en-GB",
            timezone_id="Europe/Berlin",
            **options,
        )
        context.add_init_script(_LISTEN)
        try:
            watched = Eyes(context.new_page(), url)
            yield watched
            watched.has_done_nothing_wrong()
        finally:
            context.close()

    return opened


def job_route(name: str, *rest: str) -> str:
    return "/" + "/".join(["jobs", urllib.parse.quote(name, safe=""), *rest])


def latin_words(text: str, allowed: set[str]) -> list[str]:
    return [word for word in re.findall(r"[A-Za-z]{3,}", text) if word not in allowed]
