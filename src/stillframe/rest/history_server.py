"""The HTTP server of `stillframe history`: all jobs below a checkpoint location."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from stillframe.clock import SystemClock
from stillframe.config import LOOPBACK
from stillframe.rest.api import Api
from stillframe.rest.history_api import HistoryApi, KeptJobs
from stillframe.rest.jobs import ServedJobs
from stillframe.rest.kept_jobs import jobs_below
from stillframe.rest.operations import Operations
from stillframe.rest.routes import Route
from stillframe.rest.server import RestServer


class HistoryServer(RestServer):
    """On this machine alone."""

    def __init__(
        self,
        root: str,
        port: int,
        token: str,
        forward: frozenset[str],
        more_routes: Sequence[Route] = (),
    ) -> None:
        """Listens when it returns; raises `StorageError` if there is no such place."""
        jobs_below(root)
        self._root = root
        self._forward = forward
        self._more_routes = more_routes
        super().__init__(LOOPBACK, port, token)

    def _made_api(self, token: str, bind_host: str) -> Api:
        jobs = cast(ServedJobs, KeptJobs(SystemClock(), self._root))
        return HistoryApi(
            jobs,
            Operations(),
            token,
            bind_host,
            is_loopback=True,
            more_routes=self._more_routes,
            forward=self._forward,
        )
