"""How long after its last acknowledgement a checkpoint on S3 is announced, so that sinks commit.

    python bench/commit_latency.py [--checkpoints N] [--delay-ms N] [--slots N]

Slots (plain processes) count clicks by app in four aggregates, with a checkpoint each 500 ms on
moto's S3 server, to which every request takes 20 ms longer. Told are the median, the 95th
percentile and the worst of: the time from the last acknowledgement to the announcement; the time
from the trigger until everything is committed; and the time for which the job's thread was at one
piece of mail, because a heartbeat waits for that long.
"""

from __future__ import annotations

import argparse
import http.client
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa

from stillframe.api.aggregates import AggregateCall
from stillframe.clock import SystemClock
from stillframe.config import job_config
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.attempt import RunningAttempt
from stillframe.coordinator.control import ControlServer
from stillframe.coordinator.history import CheckpointCommitted
from stillframe.coordinator.job import Job
from stillframe.coordinator.query import Query
from stillframe.coordinator.running import DriverAddress
from stillframe.graph.logical import Aggregate, Node, Read, Write
from stillframe.graph.plan import build_plan
from stillframe.protocol.checkpoints import Checkpoints, StoreCheckpoint
from stillframe.protocol.messages import CompleteCheckpoint, TriggerCheckpoint
from stillframe.testing.processes import ProcessDeployment

BUCKET = "latency"
AGGREGATES = 4
_METHODS = (b"GET ", b"PUT ", b"POST ", b"HEAD ", b"DELETE ")


class Delayed:
    """A way to a server on which every request takes longer."""

    def __init__(self, server_port: int, seconds: float) -> None:
        self._server_port = server_port
        self._seconds = seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(("127.0.0.1", self._server_port), 10)
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for way in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=way, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if data.startswith(_METHODS):
                    time.sleep(self._seconds)
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Watch:
    """Looks on at the coordinator, whichever thread it does things on."""

    def __init__(self) -> None:
        self.triggered: dict[int, float] = {}
        self.acknowledged: dict[int, float] = {}
        self.announced: dict[int, float] = {}
        self.committed: dict[int, float] = {}
        self.handled: list[float] = []

    def look_on(self) -> None:
        broadcast, acknowledged = ControlServer.broadcast, Checkpoints.on_acknowledged

        def on_broadcast(server: Any, order: Any) -> None:
            if isinstance(order, TriggerCheckpoint):
                self.triggered[order.checkpoint_id] = time.monotonic()
            broadcast(server, order)
            if isinstance(order, CompleteCheckpoint):
                self.announced[order.checkpoint_id] = time.monotonic()

        def on_acknowledged(*report: Any) -> Any:
            answer, instructions = acknowledged(*report)
            for each in instructions:
                if isinstance(each, StoreCheckpoint):
                    self.acknowledged[each.checkpoint_id] = time.monotonic()
            return answer, instructions

        ControlServer.broadcast = on_broadcast  # type: ignore[method-assign]
        Checkpoints.on_acknowledged = on_acknowledged  # type: ignore[method-assign, assignment]
        for name in ("handle", "on_time"):
            setattr(RunningAttempt, name, self._timed(getattr(RunningAttempt, name)))

    def _timed(self, step: Callable[..., None]) -> Callable[..., None]:
        def timed(*given: Any) -> None:
            began = time.monotonic()
            step(*given)
            self.handled.append(time.monotonic() - began)

        return timed

    def on_event(self, event: object) -> None:
        if isinstance(event, CheckpointCommitted):
            self.committed[event.checkpoint_id] = time.monotonic()


def played(watch: Watch, port: int, checkpoints: int, slots: int) -> None:
    """Run the job until so many checkpoints are committed."""
    source = ClickSource(records_per_second=2_000)
    clicks = Node(Read(source), source.schema)
    counts = pa.schema([source.schema.field("app_id"), ("count", pa.int64())])
    count = AggregateCall("count", None, "count", pa.int64())
    sinks = []
    for number in range(AGGREGATES):
        by_app = Node(Aggregate(("app_id",), (count,)), counts, (clicks,), f"count-{number}")
        sinks.append(Node(Write(DiscardSink()), counts, (by_app,), f"write-{number}"))
    config = job_config(
        {
            "checkpointLocation": f"s3://{BUCKET}/jobs",
            "checkpointInterval": "500 ms",
            "fs.s3a.endpoint": f"http://127.0.0.1:{port}",
            "fs.s3a.access.key": "key",
            "fs.s3a.secret.key": "secret",
            "fs.s3a.endpoint.region": "us-east-1",
        }
    )
    plan = build_plan("clicks", sinks, slots)
    job = Job(plan, config, ProcessDeployment(), DriverAddress("127.0.0.1"), SystemClock())
    query, enough = Query(job), threading.Event()

    def on_event(event: object) -> None:
        watch.on_event(event)
        if len(watch.committed) >= checkpoints or not job.is_alive():
            enough.set()

    query.add_listener(on_event)
    job.start()
    enough.wait(600)
    query.stop()


def told(name: str, seconds: list[float]) -> None:
    ms = sorted(each * 1000 for each in seconds)
    middle, high = statistics.median(ms), ms[int(len(ms) * 0.95)]
    print(f"{name:<38} median {middle:6.1f} ms   95 % {high:6.1f} ms   worst {ms[-1]:6.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=60)
    parser.add_argument("--delay-ms", type=float, default=20.0)
    parser.add_argument("--slots", type=int, default=2)
    given = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as held:
        server_port = held.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-p", str(server_port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _make_bucket(server_port)
        watch = Watch()
        watch.look_on()
        way = Delayed(server_port, given.delay_ms / 1000)
        played(watch, way.port, given.checkpoints, given.slots)
    finally:
        server.kill()
        server.wait(10)
    done = watch.committed.keys() & watch.acknowledged.keys() & watch.announced.keys()
    told("acknowledged until announced", [watch.announced[i] - watch.acknowledged[i] for i in done])
    told("triggered until committed", [watch.committed[i] - watch.triggered[i] for i in done])
    told("the job's thread at one piece of mail", watch.handled)


def _make_bucket(port: int) -> None:
    for _ in range(200):
        with suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("PUT", f"/{BUCKET}")
            connection.getresponse().read()
            return
        time.sleep(0.1)
    raise RuntimeError("no S3 server came up")


if __name__ == "__main__":
    main()
