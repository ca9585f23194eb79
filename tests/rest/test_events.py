"""What those who follow a job are told, and what happens to those who do not listen."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
from followed_streams import Following
from served_jobs import TOKEN
from told_jobs import ToldJob, plan_of

from stillframe.coordinator.replanned import Refreshed
from stillframe.rest import news, streams
from stillframe.rest.news import Logged
from stillframe.rest.streams import BEHIND_BYTES_MAX, STREAMS_MAX

EVENTS = "/jobs/counts/events"


@pytest.fixture
def follow(driver):
    """Follows something of the test's own driver; closed at its end."""
    opened = []

    def follow(path=EVENTS, last_id=None, token=None):
        following = Following(driver.server.port, path, last_id, token)
        opened.append(following)
        return following

    yield follow
    for each in opened:
        each.close()


def is_checkpoint(event, number):
    return lambda told: (
        told.kind == "checkpoint" and ((told.data["event"], told.data["id"]) == (event, number))
    )


def is_operation(told):
    return told.kind == "operation"


def discrete(told):
    return [each for each in told if each.kind not in ("hello", "figures")]


def test_what_happens_to_a_job_is_told_once_and_in_order(driver, follow):
    query = driver.start()
    following = follow(token=TOKEN)
    hello = following.next("hello").data
    assert (hello["reset"], hello["job"]["name"], hello["job"]["state"]) == (
        False,
        "counts",
        "RUNNING",
    )
    assert [task["parallelism"] for task in hello["tasks"]] == [2, 2]
    assert hello["edges"] == [{"source": 0, "target": 1, "channels": 4, "feedback": False}]

    number = query.checkpoint()
    driver.let_finish(query)
    came = discrete(following.until(lambda told: told.data.get("state") == "FINISHED"))

    told = [(each.kind, each.data.get("event")) for each in came]
    assert told.index(("checkpoint", "completed")) < told.index(("checkpoint", "committed"))
    assert told[-1] == ("job", "job_ended")
    assert ("log", None) in told
    ids = [int(each.id.rpartition("-")[2]) for each in came]
    assert ids == list(range(ids[0], ids[0] + len(ids)))
    committed = next(each for each in came if is_checkpoint("committed", number)(each))
    details = driver.client.get(f"/jobs/counts/checkpoints/details/{number}")
    assert committed.data["checkpoint"] == {**details, "tasks": {}}


def test_who_was_cut_off_gets_what_it_missed_and_nothing_twice(driver, follow):
    query = driver.start()
    with follow(token=TOKEN) as first:
        number = query.checkpoint()
        seen = discrete(first.until(is_checkpoint("completed", number)))
    query.checkpoint()

    again = follow(last_id=first.last_id, token=TOKEN)
    assert again.next("hello").data["reset"] is False
    seen += discrete(again.until(is_checkpoint("committed", query.checkpoint())))

    ids = [int(each.id.rpartition("-")[2]) for each in seen]
    assert ids == list(range(ids[0], ids[0] + len(ids)))


@pytest.mark.parametrize("last_id", ["0badc0de-1", "what", ""])
def test_who_knows_another_run_begins_again(driver, follow, last_id):
    driver.start()

    assert follow(last_id=last_id).next("hello").data["reset"] is True


def test_after_a_long_cut_and_with_another_driver_nothing_is_taken_for_whole(
    driver, follow, tmp_path
):
    """A thousand events are as much as ten minutes of a busy job."""
    driver.prepare("counts")
    streams, (job,) = driver.server._streams, driver.server._jobs.all()

    def tell(first, last):
        for number in range(first, last):
            streams.post(job, Logged(number, {"text": str(number)}))

    def seen(following, last):
        return following.until(lambda told: told.data.get("text") == str(last))

    with follow(token=TOKEN) as first:
        first.next("hello")
        tell(0, 1)
        seen(first, 0)
    tell(1, 1_001)
    second = follow(last_id=first.last_id, token=TOKEN)
    assert second.next("hello").data["reset"] is False
    missed = [each.data["text"] for each in seen(second, 1_000) if each.kind == "log"]
    assert missed == [str(number) for number in range(1, 1_001)]

    tell(1_001, 1_002)
    seen(second, 1_001)
    assert follow(last_id=first.last_id, token=TOKEN).next("hello").data["reset"] is True
    other = type(driver)(tmp_path / "other")
    other.prepare("counts")
    with Following(other.server.port, EVENTS, second.last_id, TOKEN) as third:
        hello = third.next("hello").data
    other.close()
    assert (hello["reset"], hello["job"]["name"]) == (True, "counts")


def test_figures_are_those_that_the_api_tells(driver, follow, until):
    driver.start()
    following = follow()
    columns = following.next("hello").data["columns"]

    figures = following.until(lambda told: told.kind == "figures" and len(told.data["tasks"]) == 2)[
        -1
    ]

    assert figures.id is None
    assert figures.data["state"] == "RUNNING"
    told = driver.client.get("/jobs/counts/diagnosis")
    assert figures.data["diagnosis"]["code"] == told["code"]
    rows = [dict(zip(columns["tasks"], row, strict=True)) for row in figures.data["tasks"]]
    for row in rows:
        shares = [row[name] for name in ("working", "turn", "backpressured", "held", "idle")]
        assert sum(shares) == pytest.approx(1.0, abs=0.01)
    ((number, *_),) = figures.data["edges"]
    assert number == 0
    assert "subtasks" not in figures.data


def test_what_five_pages_are_shown_is_made_once(driver, follow, monkeypatch):
    job = ToldJob.of(driver, plan_of("told", [(0, 1), (1, 2)], 3, 2))
    figures, spent = news.figures, []

    def noted(*given):
        began = time.thread_time()
        made = figures(*given)
        spent.append(time.thread_time() - began)
        return made

    monkeypatch.setattr(news, "figures", noted)
    pages = [follow("/jobs/told/events") for _ in range(5)]
    began = time.monotonic()
    for second in range(1, 5):
        job.measure(second)
        for page in pages:
            page.next("figures")

    ticks_max = (time.monotonic() - began) / news.TICK_SECONDS + 2
    assert 4 <= len(spent) <= ticks_max, "once for all of them"
    assert min(spent) < 0.01, "a hundredth of a second's processor time"


def test_what_cannot_be_told_is_logged_and_does_not_end_what_follows(
    driver, follow, monkeypatch, caplog
):
    in_words, tries = streams._in_words, iter([True])

    def breaks_once(mail):
        if next(tries, False):
            raise RuntimeError("no words for it")
        return in_words(mail)

    monkeypatch.setattr(streams, "_in_words", breaks_once)
    query = driver.start()
    following = follow()
    following.next("hello")
    number = query.checkpoint()

    following.until(is_checkpoint("completed", number))
    following.next("figures")
    assert "something that happened to a job is not told" in caplog.text


def test_subtasks_are_told_only_of_the_task_that_is_watched(driver, follow):
    driver.start()
    vertex = driver.client.get("/jobs/counts")["vertices"][1]["id"]
    following = follow(f"{EVENTS}?watch={vertex}")
    columns = following.next("hello").data["columns"]["subtasks"]

    rows = following.until(
        lambda told: told.kind == "figures" and len(told.data.get("subtasks", ())) == 2
    )[-1].data["subtasks"]

    assert [(row[0], row[1]) for row in rows] == [(0, 0), (1, 1)]
    assert all(len(row) == len(columns) for row in rows)


def test_channels_are_measured_while_somebody_watches_their_task(driver, follow):
    driver.start()
    vertex = driver.client.get("/jobs/counts")["vertices"][1]["id"]
    following = follow(f"{EVENTS}?watch={vertex}")
    columns = following.next("hello").data["columns"]["channels"]

    told = following.until(lambda told: len(told.data.get("channels", ())) == 4)[-1]
    rows = [dict(zip(columns, row, strict=True)) for row in told.data["channels"]]

    ends = {(row["edge"], row["source"], row["subtask"]) for row in rows}
    assert ends == {(0, source, subtask) for source in (0, 1) for subtask in (0, 1)}
    assert {row["held"] for row in rows} == {0}


def test_how_long_records_take_is_measured_from_each_source(driver, until):
    driver.start()

    def latencies():
        tasks = driver.client.get("/jobs/counts/figures")["tasks"]
        return [[each["latency"] for each in task["subtasks"]] for task in tasks]

    until(lambda: len(latencies()) == 2 and any(latencies()[1]))
    of_read, of_counts = latencies()
    assert not any(of_read), "it has no source before it"
    [told] = next(filter(None, of_counts))
    assert (told["source"], told["count"] > 0) == ("read scripted", True)
    assert 0 < told["p50-ms"] <= told["p99-ms"]


def test_a_failure_is_told_with_what_follows_from_it(driver, follow):
    query = driver.start()
    following = follow()
    following.next("figures")
    os.kill(query.slot_pids[0], signal.SIGKILL)

    failure = following.next("failure").data
    assert failure["attempt"] == 1
    assert "slot 0" in failure["reason"]
    assert following.next("attempt").data["event"] == "started"
    assert following.next("attempt").data["event"] == "running"


def test_tables_that_were_read_again_are_told_with_the_attempt_that_has_them(driver, follow):
    job = ToldJob.of(driver, plan_of("priced", [(0, 1)], 2, 2))
    following = follow("/jobs/priced/events")
    following.next("hello")

    job.history.tell(Refreshed(1.5))

    refreshed = {"event": "refreshed", "attempt": 1, "downtime_seconds": 1.5}
    assert following.next("attempt").data.items() >= refreshed.items()


def test_an_operation_is_told_when_it_begins_and_when_it_is_over(driver, follow):
    driver.start()
    following = follow()
    following.next("hello")
    number = driver.client.change("POST", "/jobs/counts/checkpoints").json["request-id"]

    begun, over = following.next("operation").data, following.next("operation").data

    assert (begun["request-id"], begun["status"]) == (number, "IN_PROGRESS")
    assert (over["request-id"], over["status"]) == (number, "COMPLETED")
    assert over["result"] == {"checkpointId": 1}


def test_all_jobs_are_told_in_a_line_each(driver, follow):
    driver.start("first")
    driver.prepare("second")
    following = follow("/events")
    assert following.next("hello").data["reset"] is False

    jobs = following.next("figures").data["jobs"]

    assert [(job["name"], job["state"]) for job in jobs] == [
        ("first", "RUNNING"),
        ("second", "INITIALIZING"),
    ]
    assert jobs[0]["diagnosis"]["sentence"]


def test_a_server_that_ends_says_good_bye(driver, follow):
    driver.prepare("counts")
    following = follow()
    following.next("hello")

    driver.server.close()

    assert following.next("bye").data["reset"] is False
    assert list(following) == []
    assert following.is_over


def test_a_few_may_follow_and_others_are_asked_to_come_again(driver, follow, until):
    driver.prepare("counts")
    first = [follow() for _ in range(STREAMS_MAX)]

    refused = follow()
    assert refused.answer.status == 503
    assert refused.answer.headers["Retry-After"] == "5"
    assert b"16 streams are open already" in refused.answer.read()

    first[0].close()
    until(lambda: follow().answer.status == 200)


def test_a_head_is_told_and_no_stream_begun(driver):
    driver.prepare("counts")

    said = driver.client.ask("HEAD", EVENTS)

    assert (said.status, said.headers["Content-Type"]) == (200, "text/event-stream")


@pytest.mark.parametrize("rings", [1, 8])
def test_who_reads_nothing_is_sent_away(hurried, until, rings):
    """What happens is large here, so that it need not happen often."""
    hurried.prepare("counts")
    streams, (job,) = hurried.server._streams, hurried.server._jobs.all()
    request = f"GET {EVENTS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", hurried.server.port), 60) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(request.encode())
        until(lambda: streams.count == 1)

        for _ in range(rings * 2 * BEHIND_BYTES_MAX // 4000):
            streams.post(job, Logged(0, {"text": "x" * 4000}))

        until(lambda: streams.count == 0)


def test_log_lines_are_for_those_alone_who_have_the_token(driver, follow):
    driver.prepare("counts")
    streams, (job,) = driver.server._streams, driver.server._jobs.all()
    knowing, other = follow(token=TOKEN), follow()
    for each in (knowing, other):
        each.next("hello")

    streams.post(job, Logged(0, {"text": "a customer's name"}))
    driver.server._tell_operation(job.jid, "checkpoint", "0" * 32, None)

    kinds = [[told.kind for told in each.until(is_operation)] for each in (knowing, other)]
    assert [[kind for kind in each if kind != "figures"] for each in kinds] == [
        ["log", "operation"],
        ["operation"],
    ]
