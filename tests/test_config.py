"""The settings of a job, as a user writes them."""

import pytest

from stillframe.config import JobConfig, job_config, job_option_names, parse_duration_seconds
from stillframe.errors import BuildError, UnknownOption


def test_without_options_everything_has_its_default():
    assert job_config({}) == JobConfig()


def test_every_option_is_parsed_into_its_unit():
    config = job_config(
        {
            "checkpointLocation": "/chk",
            "checkpointInterval": "1 second",
            "checkpointTimeout": "2 min",
            "checkpointMinPause": "200 ms",
            "checkpointsRetained": "3",
            "parallelism": "4",
            "maxParallelism": "256",
            "restartAttempts": "0",
            "restartDelay": "0 s",
            "restoreFrom": "7",
            "channelBufferBytes": "65536",
        }
    )

    assert config == JobConfig(
        checkpoint_location="/chk",
        checkpoint_interval_seconds=1.0,
        checkpoint_timeout_seconds=120.0,
        checkpoint_min_pause_seconds=0.2,
        checkpoints_retained=3,
        parallelism=4,
        max_parallelism=256,
        restart_attempts=0,
        restart_delay_seconds=0.0,
        restore_from=7,
        channel_buffer_bytes=65536,
    )


def test_an_option_is_known_in_any_case_as_sparks_are():
    assert job_config({"CHECKPOINTLOCATION": "/chk"}).checkpoint_location == "/chk"


def test_a_writers_option_outweighs_the_sessions():
    session = {"spark.stillframe.restartAttempts": "3", "spark.master": "local[2]"}

    assert job_config({}, session).restart_attempts == 3
    assert job_config({"restartAttempts": "5"}, session).restart_attempts == 5


@pytest.mark.parametrize(
    ("given", "nearest"),
    [("checkpointIntervall", "checkpointInterval"), ("parralelism", "parallelism")],
)
def test_an_unknown_option_is_an_error_that_names_the_nearest(given, nearest):
    with pytest.raises(UnknownOption, match=f"the job has no option '{given}'.*{nearest}"):
        job_config({given: "1"})


def test_an_unknown_option_of_the_session_says_where_it_stands():
    with pytest.raises(UnknownOption, match=r"the session \(spark\.stillframe\.\*\)"):
        job_config({}, {"spark.stillframe.chekpointLocation": "/chk"})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1 second", 1), ("200ms", 0.2), ("10 min", 600), ("1.5 h", 5400), ("2 days", 172800),
        (" 3 S ", 3), ("1 minute", 60), ("7 milliseconds", 0.007),
    ],
)  # fmt: skip
def test_a_duration_is_a_number_and_a_unit(text, seconds):
    assert parse_duration_seconds("restartDelay", text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "1", "second", "-1 s", "1 fortnight", "1 s 2 ms", "1,5 s"])
def test_what_is_no_duration_is_an_error_with_examples(text):
    with pytest.raises(BuildError, match=r"option restartDelay is a duration such as '1 second'"):
        parse_duration_seconds("restartDelay", text)


@pytest.mark.parametrize("option", ["checkpointInterval", "checkpointTimeout"])
def test_an_interval_or_a_timeout_of_nothing_is_refused(option):
    with pytest.raises(BuildError, match=f"option {option} must be longer than nothing"):
        job_config({"checkpointLocation": "/chk", option: "0 s"})


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", ""])
def test_a_count_is_a_whole_number_of_at_least_one(text):
    with pytest.raises(BuildError, match=r"option checkpointsRetained is a whole number"):
        job_config({"checkpointsRetained": text})


def test_an_interval_without_a_location_is_refused():
    with pytest.raises(BuildError, match="say where checkpoints go"):
        job_config({"checkpointInterval": "1 s"})


def test_more_subtasks_than_key_groups_are_refused_with_both_numbers():
    with pytest.raises(BuildError, match="parallelism 200 is more than maxParallelism 128"):
        job_config({"parallelism": "200"})


def test_an_empty_location_is_refused():
    with pytest.raises(BuildError, match="option checkpointLocation is empty"):
        job_config({"checkpointLocation": " "})


def test_the_names_of_the_options_are_listed():
    assert "checkpointInterval" in job_option_names()
