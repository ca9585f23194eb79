"""The figures of `stillframe status`, of jobs that really run."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from threading import Event as Happened
from typing import Any, cast

import pyarrow as pa
import pytest
from served_jobs import WAIT_SECONDS_MAX, ServingDriver

from stillframe.api.sources import Lag, SourceContext, SourceReader, Split
from stillframe.cli.main import main
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.history import AttemptFailed, Event, SlotsRunning
from stillframe.graph.logical import Node, Read, WithWatermark, Write
from stillframe.graph.plan import Plan, build_plan
from stillframe.testing.sources import Item, ScriptedSource, Wait

TIMES = pa.schema([("at", pa.timestamp("us", "UTC"))])
NOON = datetime(2024, 2, 9, 12, tzinfo=UTC)
DELAY_SECONDS = 60


class TimedDriver(ServingDriver):
    """Its jobs read one record of noon and one of an hour later, from two splits."""

    def plan(self, name: str, parallelism: int = 2, fault: Item | None = None) -> Plan:
        noon, later = (
            pa.record_batch([[NOON.replace(hour=hour)]], schema=TIMES) for hour in (12, 13)
        )
        until = Wait(self._goes_on(name))
        first = (noon, until) if fault is None else (noon, fault, until)
        source = ScriptedSource(TIMES, (first, (later, until)))
        read = Node(Read(source), TIMES, given_uid="times")
        timed = Node(WithWatermark("at", DELAY_SECONDS * 10**6), TIMES, (read,), given_uid="time")
        write = Node(Write(DiscardSink()), TIMES, (timed,), given_uid="nowhere")
        return build_plan(name, [write], parallelism)


class SteadyDriver(ServingDriver):
    """Its jobs read 2,000 records a second."""

    def plan(self, name: str, parallelism: int = 2, fault: Item | None = None) -> Plan:
        source = ClickSource(records_per_second=2_000)
        read = Node(Read(source), source.schema, given_uid="clicks")
        write = Node(Write(DiscardSink()), source.schema, (read,), given_uid="nowhere")
        return build_plan(name, [write], parallelism)


class BehindSource(ClickSource):
    def open(self, splits: Sequence[Split], context: SourceContext) -> SourceReader:
        reader: Any = ClickSource.open(self, splits, context)
        reader.lag = lambda: Lag(1_234, 1.5)
        return cast(SourceReader, reader)


class BehindDriver(ServingDriver):
    """Each reader of its jobs is 1,234 records behind."""

    def plan(self, name: str, parallelism: int = 2, fault: Item | None = None) -> Plan:
        source = BehindSource(records_per_second=100)
        read = Node(Read(source), source.schema, given_uid="clicks")
        write = Node(Write(DiscardSink()), source.schema, (read,), given_uid="nowhere")
        return build_plan(name, [write], parallelism)


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STILLFRAME_REGISTRY", str(tmp_path / "registry"))


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[[type[ServingDriver]], ServingDriver]]:
    made: list[ServingDriver] = []

    def serve(kind: type[ServingDriver]) -> ServingDriver:
        made.append(kind(tmp_path))
        return made[-1]

    yield serve
    for driver in made:
        driver.close()


class Status:
    """What the command says of the job now, for machines and for people."""

    def __init__(self, driver: ServingDriver, capsys: pytest.CaptureFixture[str]) -> None:
        self._url = driver.url
        self._capsys = capsys

    @property
    def json(self) -> Any:
        return json.loads(self._said("--json"))

    @property
    def fields(self) -> dict[str, str]:
        lines = self._said().splitlines()
        return dict(re.split(r"  +", line, maxsplit=1) for line in lines)

    def _said(self, *options: str) -> str:
        self._capsys.readouterr()
        assert main(["status", "counts", "--url", self._url, *options]) == 0
        return self._capsys.readouterr().out


@pytest.fixture
def status(capsys: pytest.CaptureFixture[str]) -> Callable[[ServingDriver], Status]:
    return lambda driver: Status(driver, capsys)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(round(WAIT_SECONDS_MAX / 0.05)):
        if condition():
            return
        Happened().wait(0.05)
    raise AssertionError("it did not happen")


def test_records_a_second_are_as_many_as_the_source_gives(serving, status):
    driver = serving(SteadyDriver)
    driver.start()
    shown = status(driver)

    until(lambda: shown.json["records-in"] > 7_000)

    assert 1_500 < shown.json["records-in-per-second"] < 2_500
    read, rate = re.fullmatch(r"([\d,]+) read, ([\d,]+)/s", shown.fields["Records"]).groups()
    assert int(read.replace(",", "")) > 7_000
    assert 1_500 < int(rate.replace(",", "")) < 2_500


def test_the_sentence_is_that_of_the_api_and_of_the_page(serving, status):
    driver = serving(SteadyDriver)
    driver.start()
    shown = status(driver)

    def said() -> str:
        with urllib.request.urlopen(f"{driver.url}/jobs/counts/diagnosis", timeout=30) as answer:
            return str(json.load(answer)["sentence"])

    until(lambda: shown.fields.get("Diagnosis") == said() == "It keeps up with its sources.")
    assert shown.json["diagnosis"] == "It keeps up with its sources."


def test_the_watermark_is_that_of_the_slowest_split(serving, status):
    driver = serving(TimedDriver)
    driver.start()
    shown = status(driver)
    slowest_ms = (int(NOON.timestamp()) - DELAY_SECONDS) * 1000

    until(lambda: shown.json["watermark"] == slowest_ms)

    here = datetime.fromtimestamp(slowest_ms / 1000)
    assert shown.fields["Watermark"] == f"{here:%Y-%m-%d %H:%M:%S}"


def test_a_source_that_tells_how_far_it_is_behind_is_shown_with_that(serving, status):
    driver = serving(BehindDriver)
    driver.start()
    shown = status(driver)

    until(lambda: bool(shown.json["lags"]))

    [lag] = shown.json["lags"]
    assert (lag["uid"], lag["records"], lag["seconds"]) == ("clicks", 2_468, 1.5)
    assert shown.fields["Lag"] == "2,468 records, 1.5 s"


def test_a_restart_is_counted_with_its_reason_and_each_worker_is_shown_with_its_process(
    serving, status
):
    driver = serving(TimedDriver)
    query = driver.start(fault=driver.die_once())
    shown = status(driver)
    running = [event for event in query.events if isinstance(event, SlotsRunning)][-1]
    (failed,) = [event for event in query.events if isinstance(event, AttemptFailed)]

    fields = shown.fields

    assert fields["State"] == "RUNNING"
    assert fields["Restarts"] == f"1 (last: {failed.reason})"
    assert "killed" in failed.reason or "lost" in failed.reason, failed.reason
    first, second = running.pids
    assert fields["Slots"] == f"0 (process {first}), 1 (process {second})"
    assert (shown.json["restarts"], shown.json["last-failure"]) == (1, failed.reason)
    assert shown.json["slot-pids"] == [first, second]


def test_a_job_that_is_restarting_says_why(serving, status):
    driver = serving(TimedDriver)
    query, begin = driver.prepare("counts", driver.die_once(), restartDelay="1 hour")
    failed = Happened()

    def note(event: Event) -> None:
        if isinstance(event, AttemptFailed):
            failed.set()

    query.add_listener(note)
    begin()
    assert failed.wait(WAIT_SECONDS_MAX)
    shown = status(driver)

    until(lambda: shown.json["state"] == "RESTARTING")

    (told,) = [event for event in query.events if isinstance(event, AttemptFailed)]
    assert shown.fields["State"] == f"RESTARTING ({str(told).splitlines()[0]})"
    assert "restarting in 3600 s" in shown.fields["State"]
    assert shown.fields["Slots"] == "-"
