"""A browser for tests that look at the page, and tabs that note what they did."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from chromium import chromium
from eyes import LISTEN, Eyes, OpenEyes

from stillframe.testing.fetched import NotFetched


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
        context.add_init_script(LISTEN)
        try:
            watched = Eyes(context.new_page(), url)
            yield watched
            watched.has_done_nothing_wrong()
        finally:
            context.close()

    return opened
