"""The settings of a job, as a user writes them."""

import math

import pytest

from stillframe.config import (
    JobConfig,
    StateSettings,
    job_config,
    job_option_names,
    parse_duration_seconds,
)
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
            "maxConcurrentCheckpoints": "2",
            "tolerableFailedCheckpoints": "0",
            "checkpointsRetained": "3",
            "heartbeatTimeout": "20 s",
            "stuckTimeout": "0",
            "parallelism": "4",
            "maxParallelism": "256",
            "restartAttempts": "0",
            "restartDelay": "0 s",
            "restoreFrom": "7",
            "allowNonRestoredState": "true",
            "channelBufferBytes": "65536",
            "stateBackend": "rocksdb",
            "memoryStateMax": "512k",
            "incrementalCheckpoints": "false",
            "rocksdbMemory": "1 GiB",
            "evaluatorMemory": "1g",
            "stateDirectory": "/fast",
            "refreshInterval": "10 min",
        }
    )

    assert config == JobConfig(
        checkpoint_location="/chk",
        checkpoint_interval_seconds=1.0,
        checkpoint_timeout_seconds=120.0,
        checkpoint_min_pause_seconds=0.2,
        max_concurrent_checkpoints=2,
        tolerable_failed_checkpoints=0,
        checkpoints_retained=3,
        heartbeat_timeout_seconds=20.0,
        stuck_timeout_seconds=0.0,
        parallelism=4,
        max_parallelism=256,
        restart_strategy="fixed-delay",
        restart_attempts=0,
        restart_delay_seconds=0.0,
        restore_from=7,
        allow_non_restored_state=True,
        channel_buffer_bytes=65536,
        state_backend="rocksdb",
        memory_state_bytes_max=512 * 1024,
        incremental_checkpoints=False,
        rocksdb_memory_bytes=1024**3,
        evaluator_memory_bytes=1024**3,
        state_directory="/fast",
        refresh_interval_seconds=600.0,
    )
    assert config.state == StateSettings("rocksdb", 512 * 1024, False, 1024**3, "/fast")


def test_missing_output_is_accepted_by_the_name_of_its_file_and_its_rows():
    given = "part-views-sink-3-0-1-ab12.parquet:12, part-views-sink-3-1-1-cd34.parquet:7"
    config = job_config({"acceptMissingOutput": given})

    assert config.accept_missing_output == frozenset(given.split(", "))
    for wrong in ("true", "part-1.parquet", "part-1.parquet:", "part-1.parquet:x", ":3", ""):
        with pytest.raises(BuildError, match=r"acceptMissingOutput .*FILE:ROWS"):
            job_config({"acceptMissingOutput": wrong})


def test_the_options_of_a_failure_rate_are_parsed_into_their_units():
    config = job_config(
        {
            "restartStrategy": "failure-rate",
            "restartMaxFailuresPerInterval": "3",
            "restartFailureInterval": "5 min",
            "restartDelay": "10 s",
        }
    )

    assert config == JobConfig(
        restart_strategy="failure-rate",
        restart_max_failures_per_interval=3,
        restart_failure_interval_seconds=300.0,
        restart_delay_seconds=10.0,
    )


def test_the_options_of_an_exponential_delay_are_parsed_into_their_units():
    config = job_config(
        {
            "restartStrategy": "Exponential-Delay",
            "restartInitialBackoff": "500 ms",
            "restartMaxBackoff": "2 min",
            "restartBackoffMultiplier": "2",
            "restartResetBackoffThreshold": "10 min",
            "restartJitterFactor": "0.25",
            "restartAttemptsBeforeResetBackoff": "7",
        }
    )

    assert config == JobConfig(
        restart_strategy="exponential-delay",
        restart_initial_backoff_seconds=0.5,
        restart_max_backoff_seconds=120.0,
        restart_backoff_multiplier=2.0,
        restart_reset_backoff_threshold_seconds=600.0,
        restart_jitter_factor=0.25,
        restart_attempts_before_reset_backoff=7,
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


def test_a_job_starts_from_a_checkpoint_by_number_or_from_a_savepoint_by_address():
    place = {"checkpointLocation": "/chk"}

    assert job_config({"restoreFrom": " 7 "}).restore_from == 7
    assert job_config({**place, "restoreFrom": "/sp/7"}).restore_from == "/sp/7"
    assert job_config({**place, "restoreFrom": "s3://b/sp"}).restore_from == "s3://b/sp"


@pytest.mark.parametrize("text", ["0", "-1", "1.5"])
def test_a_number_that_no_checkpoint_can_have_is_not_taken_for_an_address(text):
    with pytest.raises(BuildError, match="restoreFrom"):
        job_config({"checkpointLocation": "/chk", "restoreFrom": text})


def test_a_savepoint_without_a_place_for_checkpoints_is_refused():
    with pytest.raises(BuildError, match="restoreFrom is the savepoint '/sp', but checkpointLocat"):
        job_config({"restoreFrom": "/sp"})


def test_more_subtasks_than_key_groups_are_refused_with_both_numbers():
    with pytest.raises(BuildError, match="parallelism 200 is more than maxParallelism 128"):
        job_config({"parallelism": "200"})


def test_an_empty_location_is_refused():
    with pytest.raises(BuildError, match="option checkpointLocation is empty"):
        job_config({"checkpointLocation": " "})


def test_the_names_of_the_options_are_listed():
    assert "checkpointInterval" in job_option_names()


# --- restarts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        ({}, None),
        ({"restartAttempts": "3"}, "fixed-delay"),
        ({"restartDelay": "5 s"}, "fixed-delay"),
        ({"restartattempts": "3", "RESTARTDELAY": "5 s"}, "fixed-delay"),
        ({"restartFailureInterval": "5 min", "restartDelay": "5 s"}, "failure-rate"),
        ({"restartMaxFailuresPerInterval": "3"}, "failure-rate"),
        ({"restartMaxBackoff": "5 min"}, "exponential-delay"),
        ({"restartStrategy": "failure-rate", "restartDelay": "5 s"}, "failure-rate"),
        ({"restartStrategy": "off"}, "none"),
    ],
)
def test_options_of_one_restart_strategy_choose_it(options, meant):
    assert job_config(options).restart_strategy == meant


@pytest.mark.parametrize(
    ("session", "options", "meant"),
    [
        ({"restartStrategy": "failure-rate"}, {"restartDelay": "5 s"}, "failure-rate"),
        ({"restartStrategy": "failure-rate"}, {"restartAttempts": "5"}, "fixed-delay"),
        ({"restartStrategy": "failure-rate"}, {"restartStrategy": "none"}, "none"),
        ({"restartStrategy": "failure-rate"}, {}, "failure-rate"),
        ({"restartAttempts": "3"}, {"restartStrategy": "none"}, "none"),
        ({"restartAttempts": "3"}, {"restartMaxBackoff": "5 min"}, "exponential-delay"),
    ],
)
def test_the_strategy_a_writer_means_outweighs_the_sessions(session, options, meant):
    of_session = {f"spark.stillframe.{name}": value for name, value in session.items()}

    assert job_config(options, of_session).restart_strategy == meant


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("fixed_delay", "fixed-delay"), ("exponential", "exponential-delay"),
        ("failurerate", "failure-rate"), ("no", "none"),
    ],
)  # fmt: skip
def test_an_unknown_restart_strategy_is_an_error_that_names_the_nearest(given, nearest):
    with pytest.raises(BuildError, match=f"not '{given}'; did you mean '{nearest}'"):
        job_config({"restartStrategy": given})


def test_only_what_is_near_is_suggested():
    with pytest.raises(BuildError) as refused:
        job_config({"restartStrategy": "whenever"})
    assert str(refused.value).endswith(
        "none, fixed-delay, failure-rate, exponential-delay, not 'whenever'"
    )
    with pytest.raises(UnknownOption) as unknown:
        job_config({"kafka.bootstrap.servers": "host:9092"})
    assert str(unknown.value) == "the job has no option 'kafka.bootstrap.servers': leave it out"


def test_options_of_different_restart_strategies_are_refused():
    sentence = "restartAttempts and restartMaxBackoff of the job belong to different"
    with pytest.raises(BuildError, match=sentence):
        job_config({"restartAttempts": "3", "restartMaxBackoff": "5 min"})


def test_an_option_that_the_named_restart_strategy_does_not_have_is_refused():
    with pytest.raises(BuildError, match=r"restartAttempts of the job .* 'none'.* fixed-delay"):
        job_config({"restartStrategy": "none", "restartAttempts": "3"})


@pytest.mark.parametrize("text", ["0.9", "-1", "two", "", "inf", "nan"])
def test_a_backoff_that_would_shrink_is_refused(text):
    sentence = "option restartBackoffMultiplier is a number of at least 1, not"
    with pytest.raises(BuildError, match=sentence):
        job_config({"restartBackoffMultiplier": text})


@pytest.mark.parametrize("text", ["1.1", "-0.1", "10%", ""])
def test_a_jitter_is_a_share_of_the_delay(text):
    sentence = "option restartJitterFactor is a number from 0 to 1, not"
    with pytest.raises(BuildError, match=sentence):
        job_config({"restartJitterFactor": text})


def test_a_first_delay_longer_than_the_longest_is_refused_with_both():
    sentence = "restartInitialBackoff of 120 s is longer than restartMaxBackoff of 60 s"
    with pytest.raises(BuildError, match=sentence):
        job_config({"restartInitialBackoff": "2 min"})


@pytest.mark.parametrize(
    "option", ["restartInitialBackoff", "restartResetBackoffThreshold", "restartFailureInterval"]
)
def test_a_time_over_which_restarts_are_reckoned_is_longer_than_nothing(option):
    with pytest.raises(BuildError, match=f"option {option} must be longer than nothing"):
        job_config({option: "0 s"})


@pytest.mark.parametrize("text", ["-1", "1.5", "many"])
def test_restarts_before_a_reset_are_counted_or_infinite(text):
    sentence = "restartAttemptsBeforeResetBackoff is a whole number of at least 1 or 'infinite'"
    with pytest.raises(BuildError, match=sentence):
        job_config({"restartAttemptsBeforeResetBackoff": text})


@pytest.mark.parametrize("text", ["at-least-once", "AT_LEAST_ONCE", " At-Least-Once "])
def test_the_checkpoint_mode_may_be_written_as_flink_users_do(text):
    assert job_config({"checkpointMode": text}).checkpoint_mode == "at-least-once"


def test_an_unknown_checkpoint_mode_is_an_error_that_names_the_nearest():
    with pytest.raises(BuildError, match="not 'exactly'; did you mean 'exactly-once'"):
        job_config({"checkpointMode": "exactly"})


@pytest.mark.parametrize("text", ["-1", "1.5", "many"])
def test_tolerable_failures_are_counted_from_nothing_or_infinite(text):
    given = job_config({"tolerableFailedCheckpoints": "Infinite"})
    assert given == JobConfig(tolerable_failed_checkpoints=math.inf)
    sentence = "tolerableFailedCheckpoints is a whole number of at least 0 or 'infinite', not"
    with pytest.raises(BuildError, match=sentence):
        job_config({"tolerableFailedCheckpoints": text})


def test_how_far_ahead_a_record_may_pull_time_is_a_duration_or_infinite():
    assert job_config({"watermarkMaxAhead": "365 days"}) == JobConfig()
    assert job_config({"watermarkMaxAhead": "0 s"}).watermark_ahead_seconds_max == 0
    assert job_config({"watermarkMaxAhead": "Infinite"}).watermark_ahead_seconds_max == math.inf
    with pytest.raises(BuildError, match=r"watermarkMaxAhead is a duration .* or 'infinite', not"):
        job_config({"watermarkMaxAhead": "-1 day"})


def test_at_least_one_checkpoint_may_be_in_flight():
    with pytest.raises(BuildError, match="maxConcurrentCheckpoints is a whole number of at least"):
        job_config({"maxConcurrentCheckpoints": "0"})


# --- modes ---------------------------------------------------------------------------------------

CHECKPOINTS = {"checkpointLocation": "/chk", "checkpointInterval": "1 s"}


def test_at_most_once_without_checkpoints_would_emit_nothing_and_is_refused():
    with pytest.raises(BuildError, match="there are no checkpoints: set checkpointInterval"):
        job_config({"checkpointMode": "at-most-once"})

    assert job_config({"checkpointMode": "at-most-once", **CHECKPOINTS})


@pytest.mark.parametrize("mode", ["at-least-once", "at-most-once", "stop-the-world"])
def test_barriers_overtake_in_exactly_once_only(mode):
    options = {"unalignedCheckpoints": "true", "checkpointMode": mode, **CHECKPOINTS}

    with pytest.raises(BuildError, match=f"exactly-once only, not with {mode}: leave one"):
        job_config(options)


def test_barriers_that_overtake_do_so_for_one_checkpoint_at_a_time():
    options = {"unalignedCheckpoints": "true", "maxConcurrentCheckpoints": "3"}

    with pytest.raises(BuildError, match=r"unalignedCheckpoints takes one .* is 3: leave one"):
        job_config(options)


def test_the_world_stops_for_one_checkpoint_at_a_time():
    options = {"checkpointMode": "stop-the-world", "maxConcurrentCheckpoints": "2"}

    with pytest.raises(BuildError, match=r"stop-the-world takes one .* is 2: leave it out"):
        job_config(options)


def test_a_patience_without_anything_to_be_done_when_it_is_over_is_refused():
    with pytest.raises(BuildError, match="set unalignedCheckpoints to true, or leave it out"):
        job_config({"alignedCheckpointTimeout": "200 ms"})


@pytest.mark.parametrize(
    ("options", "timeout_ms"),
    [
        ({}, None),
        ({"unalignedCheckpoints": "true"}, 0),
        ({"unalignedCheckpoints": "true", "alignedCheckpointTimeout": "1.5 s"}, 1500),
        ({"unalignedCheckpoints": "false"}, None),
    ],
)
def test_how_long_barriers_wait_for_each_other(options, timeout_ms):
    assert job_config(options).alignment_timeout_ms == timeout_ms


@pytest.mark.parametrize("text", ["0.4 ms", "0.1 ms"])
def test_a_patience_too_short_to_count_is_none_at_all(text):
    options = {"unalignedCheckpoints": "true", "alignedCheckpointTimeout": text}

    assert job_config(options).alignment_timeout_ms == 0


@pytest.mark.parametrize("text", ["yes", "1", ""])
def test_a_flag_is_true_or_false(text):
    with pytest.raises(BuildError, match="option unalignedCheckpoints is true or false, not"):
        job_config({"unalignedCheckpoints": text})


def test_settings_of_the_storage_are_kept_as_they_are_and_not_shown() -> None:
    session = {
        "spark.hadoop.fs.s3a.endpoint": "http://minio:9000",
        "spark.hadoop.fs.s3a.secret.key": "hidden",
        "spark.hadoop.fs.defaultFS": "hdfs://x",
    }

    config = job_config({"fs.s3a.endpoint": "http://other:9000"}, session)

    assert config.storage_settings == {
        "fs.s3a.endpoint": "http://other:9000",
        "fs.s3a.secret.key": "hidden",
    }
    assert "hidden" not in repr(config)


def test_the_settings_of_state_are_the_same_whether_nobody_or_everybody_asks():
    assert JobConfig().state == StateSettings()


def test_a_state_backend_that_does_not_exist_names_those_that_do():
    with pytest.raises(BuildError, match=r"one of memory, fs, rocksdb, not 'rocks'; .*'rocksdb'"):
        job_config({"stateBackend": "rocks"})
    assert job_config({"stateBackend": "hashmap"}).state_backend == "fs"


@pytest.mark.parametrize("text", ["", "0", "-1m", "5x", "m", "1.5g"])
def test_a_size_is_a_number_and_a_unit(text: str):
    with pytest.raises(BuildError, match=r"memoryStateMax is a size such as '512k', '5m' or '1g'"):
        job_config({"memoryStateMax": text})


def test_the_latest_checkpoint_is_what_a_job_starts_from_anyway() -> None:
    assert job_config({"restoreFrom": "latest"}).restore_from is None
    assert job_config({"restoreFrom": " Latest "}) == job_config({})


def test_who_begins_anew_does_not_go_back() -> None:
    with pytest.raises(BuildError, match=r"fresh starts .* restoreFrom is its checkpoint 7"):
        job_config({"fresh": "true", "restoreFrom": "7", "checkpointLocation": "x"})


def test_a_restore_mode_is_one_of_flinks() -> None:
    assert job_config({"restoreMode": "CLAIM"}).restore_mode == "claim"
    assert job_config({"restoreMode": "no-claim"}).restore_mode == "no_claim"
    with pytest.raises(BuildError, match=r"restoreMode is one of no_claim, claim, not 'legacy'"):
        job_config({"restoreMode": "legacy"})


def test_prepared_output_is_discarded_only_by_its_full_name():
    keys = job_config({"discardPrepared": "write-1a2b:7:120, of: two:0:unknown"}).discard_prepared

    assert keys == ("write-1a2b:7:120", "of: two:0:unknown")
    for text in ("true", "write-1a2b", "write-1a2b:7", "write-1a2b:7:many", ":7:1", ""):
        with pytest.raises(BuildError, match="names sink, epoch and number of rows"):
            job_config({"discardPrepared": text})
