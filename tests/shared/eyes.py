"""What tests of the page share: a driver whose jobs flow, and a tab that notes what it did."""

from __future__ import annotations

import json
import os
import re
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
from served_jobs import CLICKS, COUNTS, TOKEN, ServingDriver

from stillframe.api.aggregates import AggregateCall
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import CLICK_SCHEMA, ClickSource
from stillframe.graph.logical import Aggregate, Node, Read, Write
from stillframe.graph.plan import Plan, build_plan
from stillframe.testing.sources import ScriptedSource, Wait

JOB = "page-views"
MARKUP = '"><img src=x onerror=alert(1)>'
_WAIT_MS_MAX = 150_000
_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
_TEXTS = """() => {
  const left = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const within = walk.currentNode.parentElement;
    if (!within.closest('[lang=en], code, kbd, pre, script, noscript, title')) {
      left.push(walk.currentNode.textContent);
    }
  }
  const said = [...document.querySelectorAll('[aria-label], [placeholder]')].map((each) =>
    (each.closest('[lang=en]') ? '' : `${each.ariaLabel ?? ''} ${each.placeholder ?? ''}`));
  return [...left, ...said].join('\\n');
}"""
_PICTURES = "STILLFRAME_PICTURES"
"""A directory: pictures of the page go there."""


class FlowingDriver(ServingDriver):
    """Its jobs read clicks at a pace, and never end. In one of this name, all is named so."""

    def plan(self, name: str, parallelism: int = 2, fault: Any = None) -> Plan:
        if name == MARKUP:
            batch = pa.record_batch([[1], [MARKUP]], schema=CLICKS)
            script = (batch, Wait(self._goes_on("odd")))
            read = Node(Read(ScriptedSource(CLICKS, (script,))), CLICKS, given_uid="clicks")
        else:
            source = ClickSource(records_per_second=2_000, partitions=2, apps=50)
            read = Node(Read(source), CLICK_SCHEMA, given_uid="clicks")
        uid = MARKUP if name == MARKUP else "count"
        call = AggregateCall("count", None, "count", pa.int64())
        counted = Node(Aggregate(("app_id",), (call,)), COUNTS, (read,), given_uid=uid)
        write = Node(Write(DiscardSink()), COUNTS, (counted,), given_uid="nowhere")
        return build_plan(name, [write], parallelism)

    def get(self, path: str) -> Any:
        request = urllib.request.Request(f"{self.url}{path}")
        request.add_header("Authorization", f"Bearer {TOKEN}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


# Whatever the page's policy forbids is told to the test, and nothing else is changed.
LISTEN = """
window.forbidden = [];
addEventListener('securitypolicyviolation', (event) => window.forbidden.push(
  `${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`));
"""


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

    def open(self, route: str, *, with_token: bool = True, token: str = TOKEN) -> None:
        """Another view, as a new address: `/jobs/x`, behind the #."""
        token = f"{'&' if '?' in route else '?'}token={token}" if with_token else ""
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

    def axe_finds_nothing(self) -> None:
        """At AA; nor is the page wider than its window."""
        from axe_playwright_python.base import AXE_SCRIPT, AxeResults

        where = f"{self.page.url} {self.page.viewport_size['width']}"
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE_SCRIPT)
        wanted = {"runOnly": _RULES, "resultTypes": ["violations"]}
        found = AxeResults(self.page.evaluate("(wanted) => axe.run(wanted)", wanted))
        assert found.violations_count == 0, f"{where}\n{found.generate_report()}"
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert self.page.evaluate(wide) <= 0, f"wider than its window: {where}"

    def is_loaded(self) -> None:
        """Nothing says that it is still being asked for."""
        self.page.locator("main [role=status]").wait_for(state="detached")

    def latin_words(self, allowed: set[str]) -> list[str]:
        """Words that are shown and not marked as English, or as code."""
        text = self.page.evaluate(_TEXTS)
        return [word for word in re.findall(r"[A-Za-z]{3,}", text) if word not in allowed]

    def has_done_nothing_wrong(self) -> None:
        wrong = [
            *self.page.evaluate("window.forbidden"),
            *self.errors,
            *(url for url in self.asked if not url.startswith(self.url)),
        ]
        assert not wrong, wrong

    def pictures(self, name: str) -> None:
        """In both schemes."""
        for scheme in ("dark", "light"):
            self.page.emulate_media(color_scheme=scheme)
            self.picture(f"{name}-{scheme}")

    def picture(self, name: str) -> None:
        if os.environ.get(_PICTURES):
            directory = Path(os.environ[_PICTURES])
            directory.mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=str(directory / f"{name}.png"), animations="disabled")


OpenEyes = Callable[..., Any]


def job_route(name: str, *rest: str) -> str:
    return "/" + "/".join(["jobs", urllib.parse.quote(name, safe=""), *rest])
