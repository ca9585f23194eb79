"""The connectors of docs/connectors/write-your-own.md under kills: each message counts once."""

from __future__ import annotations

import contextlib
import os
import signal
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stillframe.spark.session import Still

pytestmark = [pytest.mark.spark, pytest.mark.slow]

PAGE = Path(__file__).parents[2] / "docs/connectors/write-your-own.md"


def blocks_of_the_page() -> list[str]:
    return [part.partition("```")[0] for part in PAGE.read_text().split("```python\n")[1:]]


@pytest.fixture
def page() -> Iterator[Any]:
    """What the page defines, up to its job, in a module that no worker can import."""
    module = types.ModuleType("__main__")
    for code in blocks_of_the_page()[:3]:
        exec(code, module.__dict__)
    yield module
    module.server.shutdown()


def test_slots_that_are_killed_lose_and_double_nothing_of_the_queue(
    still: Still, page: Any, tmp_path: Path
) -> None:
    messages, last = 40_000, 40_000 - 1
    page.MESSAGES.update({number: f"app-{number % 3}" for number in range(messages)})
    clicks = still.readStream.format(page.QueueSource).options(url=page.url, last=last).load()
    writer = clicks.writeStream.format(page.ShelfSink).option("url", page.url).queryName("shelf")
    writer = writer.options(checkpointLocation=str(tmp_path), checkpointInterval="200 ms")
    query = writer.options(restartDelay="100 ms", parallelism=2).start()

    for slot in (0, 1, 0):
        # Whatever is read by then: the queue may be empty before the last kill.
        if query.checkpoint(timeout=90) is None:
            break
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(query.slot_pids[slot], signal.SIGKILL)
    assert query.awaitTermination(120)

    put = [row["number"] for rows in page.SHELF.values() for row in rows]
    assert sorted(put) == list(range(messages))
    assert query.summary.restarts >= 1
    assert not page.MESSAGES, "what completed checkpoints hold is deleted from the queue"
