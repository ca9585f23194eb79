"""`stillframe list`, `status`, `stop` and so on, asked of jobs that really run and are served."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
import uuid
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from followed_streams import Following
from served_jobs import TOKEN, WAIT_SECONDS_MAX, ServingDriver

from stillframe.cli import demo
from stillframe.cli.lines import Lines
from stillframe.cli.main import main
from stillframe.coordinator.history import Waiting
from stillframe.coordinator.located import locate
from stillframe.errors import JobFailed
from stillframe.rest.history_server import HistoryServer


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of this test alone."""
    place = tmp_path / "registry"
    monkeypatch.setenv("STILLFRAME_REGISTRY", str(place))
    monkeypatch.delenv("STILLFRAME_TOKEN", raising=False)
    return place


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[ServingDriver]:
    made = ServingDriver(tmp_path)
    yield made
    made.close()


class Said:
    """What a command has said, and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def sentence(self) -> str:
        """Of a command that was refused."""
        assert (self.code, self.out) == (1, ""), f"{self.out}\n{self.err}"
        (line,) = self.err.splitlines()
        return line.removeprefix("stillframe: ")


Ask = Callable[..., Said]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """A command, in this process."""

    def run(*arguments: str) -> Said:
        capsys.readouterr()
        code = main(list(arguments))
        return Said(code, *capsys.readouterr())

    return run


def told(said: Said) -> Said:
    assert said.code == 0, said.err
    return said


def until(condition: Callable[[], bool]) -> None:
    """For what no event tells: that a job is announced, or not any more."""
    for _ in range(round(WAIT_SECONDS_MAX / 0.01)):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen")


def announced(ask: Ask, jobs: int = 1) -> None:
    until(lambda: len(told(ask("list", "--json")).json["jobs"]) == jobs)


# --- what is ---


def test_jobs_that_run_are_listed_and_those_that_have_ended_are_not(driver, ask):
    assert told(ask("list")).out == "no job runs\n"
    query = driver.start()
    announced(ask)

    heading, row = told(ask("list")).lines
    assert heading.split() == ["ID", "Name", "State", "Start", "Time"]
    assert row.split()[:3] == [query.id.replace("-", ""), "counts", "RUNNING"]
    (job,) = told(ask("list", "--json")).json["jobs"]
    assert job["name"] == "counts"

    query.stop()
    announced(ask, jobs=0)


def test_a_job_is_shown_by_name_by_id_by_its_checkpoints_and_by_its_address(driver, ask):
    query = driver.start()
    query.checkpoint()
    announced(ask)
    jid = query.id.replace("-", "")
    ways = [
        ["counts"],
        [jid],
        [query.id.upper()],
        ["counts", "--checkpoints", driver.location],
        [jid, "--checkpoints", driver.location],
        ["counts", "--url", driver.url + "/"],
    ]
    for way in ways:
        status = told(ask("status", *way, "--json")).json
        assert status["jid"] == jid, way
        assert status["state"] == "RUNNING"
        assert status["driver"] == {
            "url": driver.url,
            "pid": os.getpid(),
            "host": status["driver"]["host"],
        }
        assert status["last-checkpoint"]["id"] == 1
        assert status["parallelism"] == 2

    shown = told(ask("status", "counts")).out
    fields = dict(re.split(r"  +", line, maxsplit=1) for line in shown.splitlines())
    assert fields["State"] == "RUNNING"
    assert fields["Restarts"] == "0"
    assert fields["Guarantee"] != "-"
    assert fields["Last Checkpoint"].startswith("1, 20")
    assert fields["Checkpoint Location"] == driver.location
    assert fields["Driver"].startswith(f"{driver.url}, process {os.getpid()} of ")


def test_the_page_is_opened_with_the_token_behind_the_number_sign(driver, ask, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setenv("DISPLAY", ":0")
    driver.start(demo.JOB)
    announced(ask)
    address = f"{driver.url}/#token={TOKEN}"

    assert told(ask("open", demo.JOB)).out == f"{address}\n"
    assert told(ask("open", demo.JOB, "--json")).json == {"url": address}
    assert opened == [], "nobody sits at this terminal"
    with monkeypatch.context() as at_a_terminal:
        at_a_terminal.setattr(sys.stdout, "isatty", lambda: True)
        told(ask("open", demo.JOB))
    assert opened == [address]

    # make demo ARGS=--open shows the same.
    demo._open_when_announced(Lines(as_json=False))
    assert opened == [address, address]


def test_status_shows_what_is_in_the_way_of_a_job_and_nothing_when_it_is_over(driver, ask):
    query = driver.start()
    announced(ask)
    history = query._job.history
    hangs = Waiting("function tidy has not returned for 10 s\n  File job.py")
    history.begin("slot 1 hanging", hangs)

    shown = told(ask("status", "counts")).lines
    assert shown[-2:] == ["Trouble: function tidy has not returned for 10 s", "      File job.py"]
    assert told(ask("status", "counts", "--json")).json["trouble"] == query.trouble

    history.over("slot 1 hanging")
    assert "Trouble" not in told(ask("status", "counts")).out


def test_checkpoints_are_shown_within_100_columns_and_one_of_them_subtask_by_subtask(driver, ask):
    driver.start()
    announced(ask)
    assert told(ask("trigger", "counts")).out == "checkpoint 1 is complete\n"
    assert told(ask("trigger", "counts", "--json")).json == {"checkpoint-id": 2}

    heading, newest, oldest, counts = told(ask("checkpoints", "counts")).lines
    assert heading.startswith("ID  Status     Acks  Triggered")
    assert re.match(r"2   COMPLETED  (\d)/\1 ", newest)
    assert oldest.startswith("1   COMPLETED")
    assert counts == "2 completed, 0 failed, 0 restored, 0 in progress"
    assert told(ask("checkpoints", "counts", "--json")).json["counts"]["completed"] == 2

    shown = told(ask("checkpoints", "counts", "2")).out
    subtasks = [line for line in shown.splitlines() if re.match(r"[01] +\d{4}-", line)]
    assert len(subtasks) == 4, "two tasks, two subtasks each"
    assert "Alignment" in shown
    assert max(map(len, [heading, newest, oldest, *shown.splitlines()[:1], *subtasks])) <= 100
    details = told(ask("checkpoints", "counts", "2", "--json")).json
    assert details["subtasks"].keys() == details["tasks"].keys()

    assert "has no checkpoint 7 that is remembered" in ask("checkpoints", "counts", "7").sentence


def test_failures_are_shown_with_what_the_job_recovered_from(driver, ask):
    driver.start(fault=driver.die_once())
    announced(ask)

    heading, row = told(ask("failures", "counts")).lines
    assert heading.split() == ["Time", "Attempt", "Kind", "Task", "Recovered", "From", "Cause"]
    assert "the beginning" in row
    (entry,) = told(ask("failures", "counts", "--json")).json["exceptionHistory"]["entries"]
    assert entry["attempt"] == 1


# --- what is to be ---


def test_a_savepoint_is_taken_and_its_path_is_the_last_line(driver, ask, monkeypatch):
    query = driver.start()
    announced(ask)
    monkeypatch.chdir(driver.home)

    said = told(ask("savepoint", "counts", "sp"))

    assert said.out == f"{driver.home}/sp\n", "a relative path is one of here"
    assert locate(str(driver.home / "sp")).manifest.kind == "savepoint"
    assert query.isActive
    other = str(driver.home / "other")
    assert told(ask("savepoint", "counts", other, "--json")).json == {"location": other}


def test_a_savepoint_into_a_directory_that_is_there_is_refused_and_the_job_runs_on(driver, ask):
    query = driver.start()
    announced(ask)
    (driver.home / "taken").mkdir()
    (driver.home / "taken" / "letter").write_text("dear")

    assert "taken" in ask("savepoint", "counts", str(driver.home / "taken")).sentence
    assert query.isActive


def test_a_job_is_stopped_with_a_savepoint_and_without(driver, ask):
    first = driver.start("first")
    second = driver.start("second")
    announced(ask, jobs=2)
    place = str(driver.home / "sp")

    assert "--drain wants a savepoint" in ask("stop", "first", "--drain").sentence
    assert told(ask("stop", "first", "--savepoint", place, "--drain")).out == f"{place}\n"
    assert told(ask("stop", "second")).out == "job 'second' has stopped\n"

    assert locate(place).manifest.kind == "savepoint"
    assert not first.isActive
    assert second.summary.outcome == "stopped"


def test_a_job_is_rescaled_and_the_downtime_told(driver, ask):
    query = driver.start()
    announced(ask)

    said = told(ask("rescale", "counts", "3"))

    assert re.fullmatch(
        r"job 'counts' runs with parallelism 3, before 2; it was down for [\d.]+ m?s\n", said.out
    )
    assert query.parallelism == 3
    again = told(ask("rescale", "counts", "2", "--json")).json
    assert (again["parallelism-before"], again["parallelism"]) == (3, 2)
    assert again["downtime-ms"] >= 0


def test_a_job_is_cancelled(driver, ask):
    query = driver.start()
    announced(ask)

    assert told(ask("cancel", "counts")).out == "job 'counts' is cancelled\n"
    assert query.summary.outcome == "cancelled"


def test_what_is_detached_is_not_waited_for_and_has_a_number(driver, ask):
    query = driver.start()
    announced(ask)

    number = told(ask("trigger", "counts", "--detached")).out.strip()
    assert re.fullmatch("[0-9a-f]{32}", number)
    until(lambda: query.summary.last_checkpoint == 1)
    asked = told(ask("rescale", "counts", "2", "--detached", "--json")).json
    assert re.fullmatch("[0-9a-f]{32}", asked["request-id"])


# --- which job is meant ---


def test_of_two_jobs_of_one_name_the_id_is_wanted(driver, ask):
    one = driver.start()
    other = driver.start(checkpointLocation=str(driver.home / "elsewhere"))
    announced(ask, jobs=2)

    sentence = ask("stop", "counts").sentence
    assert "2 jobs are named 'counts'" in sentence
    assert one.id.replace("-", "") in sentence
    told(ask("stop", other.id))
    assert one.isActive
    assert not other.isActive


def test_a_job_that_nobody_knows_is_told_with_those_that_run(driver, ask):
    assert "none runs; for a job of another machine give --url" in ask("status", "counts").sentence
    driver.start()
    announced(ask)
    assert "these run: counts" in ask("status", "county").sentence
    below = ask("status", "county", "--checkpoints", driver.location).sentence
    assert below.endswith("these are there: counts")
    assert "is no directory" in ask("list", "--checkpoints", str(driver.home / "none")).sentence
    assert "county" in ask("status", "county", "--url", driver.url).sentence


def test_without_the_right_token_nothing_changes(driver, ask, registry, monkeypatch):
    query = driver.start()
    announced(ask)

    monkeypatch.setenv("STILLFRAME_TOKEN", "a-token-of-another-driver")
    told(ask("trigger", "counts"))
    wrong = ask("stop", "counts", "--token", "a-wrong-token-of-somebody")
    assert "token" in wrong.sentence
    for file in registry.iterdir():
        file.rename(driver.home / file.name)  # as on another machine
    assert "token" in ask("stop", "counts", "--url", driver.url).sentence
    told(ask("status", "counts", "--url", driver.url))
    assert query.isActive

    monkeypatch.setenv("STILLFRAME_TOKEN", TOKEN)
    told(ask("stop", "counts", "--url", driver.url))
    assert not query.isActive


# --- without a driver ---


def test_of_a_job_that_was_stopped_its_files_tell(driver, ask):
    query = driver.start(fault=driver.die_once())
    query.checkpoint()
    query.stop()
    announced(ask, jobs=0)
    root = ["--checkpoints", driver.location]

    until(lambda: told(ask("list", *root)).lines[1].split()[1:3] == ["counts", "STOPPED"])
    status = told(ask("status", "counts", *root, "--json")).json
    assert (status["state"], status["driver"], status["attempts"]) == ("STOPPED", None, 2)
    assert status["last-checkpoint"]["id"] == 1
    assert "no driver of it runs" in told(ask("status", "counts", *root)).out
    kept = told(ask("checkpoints", "counts", *root))
    assert kept.lines[1].startswith("1   COMPLETED")
    assert "no driver of it runs; this is what its files say" in kept.err
    assert "Alignment" in told(ask("checkpoints", "counts", "1", *root)).out
    assert "the beginning" in told(ask("failures", "counts", *root)).out

    changing = (["trigger"], ["savepoint", "x"], ["stop"], ["cancel"], ["rescale", "3"])
    for command, *more in changing:
        sentence = ask(command, "counts", *more, *root).sentence
        assert sentence.endswith(
            "start it with the command it was started with, it goes on from checkpoint 1"
        )


def test_a_job_has_one_id_however_its_checkpoint_location_is_written(driver, ask, monkeypatch):
    monkeypatch.chdir(driver.home)
    (driver.home / "link").symlink_to("chk")
    query = driver.start(checkpointLocation="chk")
    announced(ask)
    jid = query.id.replace("-", "")
    monkeypatch.chdir("/")
    assert told(ask("status", jid, "--json")).json["jid"] == jid, "the registry knows where it is"
    assert query.id.replace("-", "") == jid, "wherever the driver goes"
    query.stop()
    announced(ask, jobs=0)
    until(lambda: not (driver.home / "chk" / "counts" / "driver.json").exists())

    monkeypatch.chdir(driver.home)
    ways = ["chk", "./chk/", "chk/../chk", "link", driver.location, f"file://{driver.location}/"]
    for way in ways:
        (job,) = told(ask("list", "--checkpoints", way, "--json")).json["jobs"]
        assert job["jid"] == jid, way
        assert told(ask("status", jid, "--checkpoints", way, "--json")).json["name"] == "counts"


def test_of_a_job_that_failed_its_files_tell(driver, ask):
    query, begin = driver.prepare("counts", driver.die_once(), restartAttempts="0")
    begin()
    with pytest.raises(JobFailed):
        query.awaitTermination(WAIT_SECONDS_MAX)
    announced(ask, jobs=0)
    root = ["--checkpoints", driver.location]

    assert told(ask("status", "counts", *root, "--json")).json["state"] == "FAILED"
    assert told(ask("status", "counts", *root)).lines[-1].startswith("Failure  ")
    assert "given up" in told(ask("failures", "counts", *root)).out
    assert ask("trigger", "counts", *root).sentence.endswith("it starts over")


def test_a_job_whose_log_cannot_be_read_does_not_hide_the_others(driver, ask):
    driver.start("good").stop()
    driver.start("bad").stop()
    announced(ask, jobs=0)
    log = driver.home / "chk" / "bad" / "log"
    for entry in log.iterdir():
        entry.write_bytes(b"torn")
    root = ["--checkpoints", driver.location]

    rows = [line.split() for line in told(ask("list", *root)).lines[1:]]

    assert [row[1:3] for row in rows] == [["bad", "UNREADABLE"], ["good", "STOPPED"]]
    assert "is damaged" in ask("status", "bad", *root).sentence
    above = ask("list", "--checkpoints", f"{driver.location}/good").sentence
    assert "is the directory of a job: give the one above it" in above


PROGRAM = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from served_jobs import ServingDriver


if __name__ == "__main__":
    driver = ServingDriver(Path(sys.argv[2]))
    query = driver.start()
    query.checkpoint()
    print("running", flush=True)
    query.awaitTermination()
"""


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A driver in a process of its own, which ends when its job does."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    with subprocess.Popen(
        [sys.executable, str(program), str(Path(__file__).parents[1] / "shared"), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        yield process
        process.kill()


def over_http(server: HistoryServer, path: str) -> Any:
    with urllib.request.urlopen(f"{server.url}{path}", timeout=WAIT_SECONDS_MAX) as answer:
        return json.load(answer)


def test_of_a_job_whose_driver_was_killed_its_files_tell(other_process, tmp_path, ask):
    announced(ask)
    root = ["--checkpoints", str(tmp_path / "chk")]
    assert told(ask("status", "counts", *root, "--json")).json["state"] == "RUNNING"
    history = HistoryServer(str(tmp_path / "chk"), 0, "a-token-of-its-own", frozenset())
    assert over_http(history, "/jobs/counts")["state"] == "RUNNING"
    other_process.send_signal(signal.SIGKILL)
    other_process.wait(WAIT_SECONDS_MAX)

    with contextlib.closing(history):
        began_at = time.monotonic()
        assert over_http(history, "/jobs/counts")["state"] == "NO DRIVER"
        assert time.monotonic() - began_at < 30, "it asks nobody who is not there"
        assert over_http(history, "/jobs/overview")["jobs"][0]["state"] == "NO DRIVER"
        told_of = over_http(history, "/jobs/counts/checkpoints")
        assert told_of["latest"]["completed"]["id"] == 1, told_of
        with Following(history.port, "/jobs/counts/events") as following:
            assert following.next("figures").data["diagnosis"]["code"] == "no-driver"

    assert told(ask("list")).out == "no job runs\n"
    status = told(ask("status", "counts", *root, "--json")).json
    assert (status["state"], status["last-checkpoint"]["id"]) == ("NO DRIVER", 1)
    sentence = ask("rescale", "counts", "3", *root).sentence
    assert f"process {other_process.pid} of" in sentence
    assert sentence.endswith("it goes on from checkpoint 1")


def test_a_driver_that_ends_with_its_job_has_done_what_it_was_asked_for(
    other_process, tmp_path, ask
):
    announced(ask)
    place = str(tmp_path / "sp")

    assert told(ask("stop", "counts", "--savepoint", place)).out == f"{place}\n"
    assert other_process.wait(WAIT_SECONDS_MAX) == 0
    assert locate(place).manifest.kind == "savepoint"


# --- what is no driver ---


@pytest.fixture
def foreign() -> Iterator[Callable[..., str]]:
    """A server that answers everything in one way; its address."""
    servers: list[ThreadingHTTPServer] = []

    def begin(
        body: bytes,
        status: int = 200,
        seen: list[Any] | None = None,
        drop_seconds: float | None = None,
        **headers: str,
    ) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if seen is not None:
                    seen.append(dict(self.headers))
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                parts = [body] if drop_seconds is None else [bytes([byte]) for byte in body]
                with suppress(OSError):  # the client had enough
                    for part in parts:
                        self.wfile.write(part)
                        threading.Event().wait(drop_seconds or 0)

            do_POST = do_PATCH = do_GET  # noqa: N815 - names of the library

            def log_message(self, *given: Any) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield begin
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("body", "status", "told_as"),
    [
        (b"<html>welcome</html>", 200, "which is no JSON: it is no driver of Stillframe"),
        (b"[1, 2]", 200, "a JSON list: it is no driver"),
        (b"\xff\xfe", 200, "no JSON"),
        (b"nothing here", 404, "status 404 (Not Found) without a reason"),
        (b'{"errors": []}', 500, "status 500"),
        (b'{"errors": ["it is too late"]}', 409, "it is too late"),
        (b"", 302, "status 302"),
    ],
)
def test_what_is_no_driver_is_told_in_one_sentence(foreign, ask, body, status, told_as):
    url = foreign(body, status, Location="http://127.0.0.1:1/")
    assert told_as in ask("status", "counts", "--url", url).sentence


def test_the_token_of_the_registry_goes_to_the_address_it_belongs_to_alone(driver, foreign, ask):
    driver.start()
    announced(ask)
    seen: list[dict[str, str]] = []
    url = foreign(b'{"errors": ["no"]}', 409, seen)

    assert ask("stop", "counts", "--url", url).sentence == "no"
    assert seen
    assert not any("Authorization" in headers for headers in seen)


def test_an_operation_that_takes_too_long_is_waited_for_no_longer_than_was_said(foreign, ask):
    request = {"request-id": uuid.uuid4().hex, "status": {"id": "IN_PROGRESS"}}
    url = foreign(json.dumps(request).encode())

    sentence = ask("trigger", "counts", "--url", url, "--timeout", "0.3").sentence

    assert "the operation is still under way after 0.3 s (--timeout)" in sentence


def test_an_answer_that_comes_drop_by_drop_is_waited_for_no_longer_either(foreign, ask):
    url = foreign(b" " * 100, drop_seconds=0.05)

    sentence = ask("status", "counts", "--url", url, "--timeout", "0.5").sentence

    assert "has not answered everything after 0.5 s (--timeout)" in sentence


def test_an_address_at_which_nobody_is_and_one_that_is_none_are_told(ask, foreign):
    assert "no driver answers at http://127.0.0.1:1 (" in (
        ask("status", "counts", "--url", "http://127.0.0.1:1").sentence
    )
    for url in ("file:///etc/passwd", "127.0.0.1:8081", "http://", "http://a b"):
        assert "is no address of a driver" in ask("list", "--url", url).sentence
    assert ask("list", "--url", f"http://{'ü' * 300}/").sentence
    url = foreign(b"{}")
    assert "signs that no token has" in ask("list", "--url", url, "--token", "a\nb").sentence


# --- the document ---


PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"


def sessions(text: str) -> list[tuple[str, list[str]]]:
    """The commands of all console blocks, each with the lines that are shown below it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ stillframe "):
                found.append((line.removeprefix("$ stillframe "), []))
            else:
                found[-1][1].append(line)
    return found


def without_chance(line: str) -> str:
    """Ids, moments, spans, sizes and processes are others each time, and so are widths."""
    for pattern, word in (
        (r"\b[0-9a-f]{32}\b", "ID"),
        (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME"),
        (r"\b[\d.]+ (?:m?s|K?B)\b", "AMOUNT"),
        (r"^Diagnosis .*", "SENTENCE"),
        (r"127\.0\.0\.1:\d+, process \d+ of \S+", "DRIVER"),
        (r"slot \d(?: \(pid \d+\))?", "SLOT"),
        (r"process \d+", "PROCESS"),
        (r"[\d,]+ read, [\d,]+/s", "RECORDS"),
        (r"from checkpoint \d+", "from CHECKPOINT"),
        (r" +", " "),
    ):
        line = re.sub(pattern, word, line)
    return line


def test_every_command_of_the_document_says_what_is_shown_there(driver, ask):
    driver.location = str(driver.home / "checkpoints")
    driver.start("page-views", driver.die_once()).checkpoint()
    driver.start("orders")
    announced(ask, jobs=2)
    commands = sessions(PAGE.read_text())
    assert {line.split()[0] for line, _ in commands} == {
        "list", "status", "failures", "checkpoints",
        "trigger", "savepoint", "rescale", "stop", "cancel",
    }  # fmt: skip

    for line, shown in commands:
        if "--checkpoints" in line:
            announced(ask, jobs=0)
            until(lambda: not list(Path(driver.location).glob("*/driver.json")))
        said = ask(*line.replace("/srv", str(driver.home)).split())
        really = (said.out + said.err).replace(str(driver.home), "/srv").splitlines()
        assert list(map(without_chance, really)) == list(map(without_chance, shown)), line
