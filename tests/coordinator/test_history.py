"""What a job tells people."""

import pytest

from stillframe.coordinator.history import (
    AttemptFailed,
    AttemptStarted,
    CheckpointCompleted,
    CheckpointDamaged,
    CheckpointFailed,
    History,
    JobEnded,
    SlotsRunning,
    Summary,
    Waiting,
    format_bytes,
)
from stillframe.protocol.messages import Progress, SourceLag


def completed(checkpoint_id=7):
    return CheckpointCompleted(checkpoint_id, 6, 1, 0, 41.2, 21_300, (), 10, 5)


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (AttemptStarted(1, None, ()), "attempt 1 starts from the beginning"),
        (
            AttemptStarted(2, 7, ("p-0 at next=9",)),
            "restored checkpoint 7, replaying from p-0 at next=9",
        ),
        (AttemptStarted(2, 7, ()), "restored checkpoint 7, replaying from its end"),
        (SlotsRunning(1, (47, 48)), "slots running: 0 (pid 47), 1 (pid 48)"),
        (completed(), "checkpoint 7 complete, 41 ms, 21 KB"),
        (CheckpointFailed(8, "disk full"), "checkpoint 8 failed: disk full"),
        (CheckpointDamaged(8, "torn"), "checkpoint 8 is damaged: torn"),
        (AttemptFailed(1, "lost", 1.0), "attempt 1 failed: lost; restarting in 1 s"),
        (AttemptFailed(1, "lost", None), "attempt 1 failed: lost"),
        (JobEnded("finished"), "job finished"),
    ],
)
def test_every_event_is_one_line_for_people(event, sentence):
    assert str(event) == sentence


def test_only_the_first_few_positions_are_told():
    event = AttemptStarted(2, 7, tuple(f"p-{i}" for i in range(9)))

    assert str(event).endswith("p-0, p-1, p-2, p-3, …")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (21_300, "21 KB"), (5e6, "5.0 MB"),
     (3e9, "3.0 GB"), (5e12, "5000 GB")],
)  # fmt: skip
def test_sizes_are_told_as_people_say_them(count, text):
    assert format_bytes(int(count)) == text


def test_a_size_just_below_a_unit_is_told_in_the_next():
    assert format_bytes(999_999) == "1.0 MB"


def test_listeners_hear_every_event_from_when_they_came():
    history, heard = History(), []
    history.tell(AttemptStarted(1, None, ()))
    history.add_listener(heard.append)
    history.tell(completed())

    assert heard == [completed()]
    assert history.events() == [AttemptStarted(1, None, ()), completed()]


def test_a_listener_that_raises_harms_nobody(caplog):
    history, heard = History(), []
    history.add_listener(lambda event: 1 / 0)
    history.add_listener(heard.append)

    history.tell(JobEnded("finished"))

    assert heard == [JobEnded("finished")]
    assert "a listener failed" in caplog.text


def test_a_listener_may_ask_the_history_about_itself():
    history, seen = History(), []
    history.add_listener(lambda event: seen.append(history.summary().outcome))

    history.tell(JobEnded("finished"))

    assert seen == ["finished"]


def test_the_summary_counts_replayed_records_too():
    history = History()
    history.tell(AttemptStarted(1, None, ()))
    history.report_progress(0, Progress(10, 1), 0.0)
    history.report_progress(1, Progress(5, 1, 4, records_malformed=5), 0.0)
    history.report_progress(0, Progress(20, 2), 0.0)
    history.tell(completed())
    history.tell(CheckpointFailed(8, "x"))
    history.tell(AttemptStarted(2, 7, ()))
    history.report_progress(0, Progress(3, 1, 2, records_malformed=1), 0.0)
    history.tell(JobEnded("finished"))

    assert history.records_of_attempt() == Progress(3, 1, 2, records_malformed=1)
    assert history.summary() == Summary("finished", 2, 1, 1, 1, 7, 28, 4, 6, records_malformed=6)
    assert history.summary().to_json()["last_checkpoint"] == 7
    assert history.summary().to_json()["records_late"] == 6


def test_only_the_last_hundred_are_kept_and_all_are_counted():
    history = History()
    for checkpoint_id in range(1, 251):
        history.tell(completed(checkpoint_id))

    assert [each.checkpoint_id for each in history.completed()] == list(range(151, 251))
    assert history.summary().checkpoints_completed == 250


def test_the_rate_is_that_of_the_last_seconds_and_begins_again_with_an_attempt():
    history = History()
    history.tell(AttemptStarted(1, None, ()))
    for second in range(30):
        history.report_progress(0, Progress(100 * second, 0), float(second))
        history.report_progress(1, Progress(max(0, second - 10) * 900, 0), second + 0.5)

    assert history.summary().records_per_second == 1000.0
    history.tell(AttemptFailed(1, "slot 1 was lost", 1.0))
    assert history.summary().records_per_second == 0.0


def test_the_watermark_of_a_job_is_that_of_its_slowest_slot():
    history = History()
    history.tell(AttemptStarted(1, None, ()))
    assert history.summary().watermark_us is None
    history.report_progress(0, Progress(1, 0, watermark_us=7_000_000), 0.0)
    history.report_progress(1, Progress(1, 0), 0.0)
    history.report_progress(2, Progress(1, 0, watermark_us=5_000_000), 0.0)

    assert history.summary().watermark_us == 5_000_000


def test_slots_are_not_waited_for_any_more_when_they_run():
    history = History()
    history.tell(AttemptStarted(1, None, ()))
    history.begin("slots", Waiting("waiting for 2 slots"))
    history.begin("commit", Waiting("a sink is away"))

    history.tell(SlotsRunning(1, (47, 48)))

    assert [str(event) for event in history.present()] == ["a sink is away"]


def test_the_lag_of_a_source_is_that_of_all_its_slots_in_this_attempt():
    history = History()
    history.tell(AttemptStarted(1, None, (), None))
    history.report_progress(0, Progress(0, 0, lags=(SourceLag("views", "kafka", 9, 7.0),)), 0.0)
    history.tell(AttemptStarted(2, None, (), None))
    lags = (SourceLag("views", "kafka", 3, 1.5), SourceLag("apps", "files", 1, None))
    history.report_progress(0, Progress(0, 0, lags=lags), 0.0)
    history.report_progress(1, Progress(0, 0, lags=(SourceLag("views", "kafka", 2, 4.0),)), 0.0)

    assert history.summary().lags == (
        SourceLag("apps", "files", 1, None),
        SourceLag("views", "kafka", 5, 4.0),
    )
