"""A few threads that do what the server's own thread must not wait for.

Not a `ThreadPoolExecutor`: that one is closed before the process has said its last word, and waits
at the end of the process for whatever hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

WORKERS_MAX = 4
_T = TypeVar("_T")


class Workers:
    """Used by the thread of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, threads: int = WORKERS_MAX) -> None:
        self._loop = loop
        self._work: queue.SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None]
        self._work = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"stillframe-rest-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, do: Callable[[], _T]) -> _T:
        """What it returns, or raises."""
        done: asyncio.Future[_T] = self._loop.create_future()
        self._work.put((done, do))
        return await done

    def close(self) -> None:
        """They end when they have done what they are at."""
        for _ in self._threads:
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            done, do = work
            try:
                result, error = do(), None
            except Exception as raised:
                result, error = None, raised
            with contextlib.suppress(RuntimeError):  # the loop is over: nobody waits
                self._loop.call_soon_threadsafe(_tell, done, result, error)


def _tell(done: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if done.cancelled():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
