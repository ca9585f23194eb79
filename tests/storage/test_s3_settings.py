"""How a bucket is reached: Hadoop's settings, the environment, and what is refused."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.parquet import ParquetSource
from stillframe.errors import BuildError
from stillframe.storage.places import place_of
from stillframe.storage.renewed import joined
from stillframe.storage.s3 import _understood, settled
from stillframe.storage.store import open_store

ENVIRONMENT = {
    "AWS_ENDPOINT_URL": "http://from-env:9000",
    "AWS_ACCESS_KEY_ID": "env-key",
    "AWS_SECRET_ACCESS_KEY": "env-secret",
    "AWS_SESSION_TOKEN": "env-token",
    "AWS_DEFAULT_REGION": "eu-central-1",
    "PATH": "/bin",
}


def config(settings: dict[str, str]) -> dict[str, object]:
    return _understood("data", settled("data", settings, {})).config


def test_the_environment_says_what_no_setting_does() -> None:
    assert settled("data", {}, ENVIRONMENT) == {
        "fs.s3a.endpoint": "http://from-env:9000",
        "fs.s3a.endpoint.region": "eu-central-1",
        "fs.s3a.access.key": "env-key",
        "fs.s3a.secret.key": "env-secret",
        "fs.s3a.session.token": "env-token",
    }


def test_a_setting_comes_before_the_environment_and_one_of_the_bucket_before_both() -> None:
    settings = {
        "fs.s3a.endpoint": "http://for-all:9000",
        "fs.s3a.bucket.data.endpoint": "http://for-data:9000",
        "fs.s3a.endpoint.region": "us-west-2",
    }

    assert settled("data", settings, ENVIRONMENT)["fs.s3a.endpoint"] == "http://for-data:9000"
    assert settled("logs", settings, ENVIRONMENT)["fs.s3a.endpoint"] == "http://for-all:9000"
    assert settled("logs", settings, ENVIRONMENT)["fs.s3a.endpoint.region"] == "us-west-2"


def test_keys_of_a_session_are_not_mixed_with_the_token_of_a_shell() -> None:
    keys = {"fs.s3a.access.key": "own", "fs.s3a.secret.key": "own-secret"}

    assert "fs.s3a.session.token" not in settled("data", keys, ENVIRONMENT)


def test_the_variable_for_s3_alone_comes_first() -> None:
    environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL_S3": "http://s3-alone:9000"}

    assert settled("data", {}, environment)["fs.s3a.endpoint"] == "http://s3-alone:9000"


def test_what_was_settled_is_settled_for_whoever_gets_it() -> None:
    said = settled("data", {}, ENVIRONMENT)

    assert settled("data", said, {"AWS_ENDPOINT_URL": "http://elsewhere"}) == said


@pytest.mark.parametrize(
    ("settings", "endpoint", "in_host"),
    [
        ({}, None, True),
        ({"fs.s3a.endpoint": "minio:9000"}, "https://minio:9000", False),
        (
            {"fs.s3a.endpoint": "minio:9000", "fs.s3a.connection.ssl.enabled": "false"},
            "http://minio:9000",
            False,
        ),
        (
            {"fs.s3a.endpoint": "http://minio:9000/", "fs.s3a.connection.ssl.enabled": "true"},
            "http://minio:9000",
            False,
        ),
        (
            {"fs.s3a.endpoint": "https://s3.example", "fs.s3a.path.style.access": "false"},
            "https://data.s3.example",
            True,
        ),
        ({"fs.s3a.path.style.access": "true"}, None, False),
    ],
)
def test_the_endpoint_is_understood_as_spark_understands_it(
    settings: dict[str, str], endpoint: str | None, in_host: bool
) -> None:
    understood = config(settings)

    assert understood.get("endpoint") == endpoint
    assert understood["virtual_hosted_style_request"] is in_host


def test_anonymous_credentials_sign_nothing() -> None:
    provider = "org.apache.hadoop.fs.s3a.AnonymousAWSCredentialsProvider"

    assert config({"fs.s3a.aws.credentials.provider": provider})["skip_signature"] is True


@pytest.mark.parametrize(
    ("text", "seconds"), [("5000", 5.0), ("5s", 5.0), ("250 ms", 0.25), ("1m", 60.0)]
)
def test_the_time_of_a_request_bounds_everything_else(text: str, seconds: float) -> None:
    said = {"fs.s3a.connection.request.timeout": text}
    limits = _understood("data", said).limits

    assert limits.request_seconds == seconds
    assert limits.patience_seconds == 2 * seconds


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"fs.s3a.access.key": "k"}, "only one is given"),
        ({"fs.s3a.path.style.access": "yes"}, "path.style.access is true or false, not 'yes'"),
        ({"fs.s3a.connection.request.timeout": "soon"}, "is a duration .* not 'soon'"),
        ({"fs.s3a.connection.request.timeout": "0"}, "is a duration .* not '0'"),
        ({"fs.s3a.endpoint": "http://user:hidden@minio"}, "has a user in it"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(BuildError, match=said) as raised:
        config(settings)
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    ("address", "opened"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("s3a://bucket/a//b/", "s3://bucket/a/b"),
        ("S3A://bucket", "s3://bucket"),
        ("s3://bucket/a b#1?c", "s3://bucket/a b#1?c"),
    ],
)
def test_an_address_is_a_bucket_and_a_prefix(address: str, opened: str) -> None:
    assert open_store(address).address == opened


@pytest.mark.parametrize("address", ["s3:///a", "s3:/bucket/a", "s3://", "s3a://bucket/a/../b"])
def test_an_address_without_a_bucket_is_refused(address: str) -> None:
    with pytest.raises(BuildError, match="write it as s3://bucket/prefix"):
        open_store(address)


def test_keys_in_an_address_are_refused_and_not_repeated() -> None:
    with pytest.raises(BuildError, match="has keys in its address") as raised:
        open_store("s3a://key:hidden@bucket/a")
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize("address", ["hdfs:/a", "hdfs://host", "hdfs://host/../a"])
def test_an_address_that_is_no_directory_of_hdfs_is_refused(address: str) -> None:
    with pytest.raises(BuildError, match="write it as hdfs://host:port/path"):
        open_store(address)


def test_what_is_sent_to_another_machine_has_the_keys_of_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in {**ENVIRONMENT, "AWS_SESSION_TOKEN": "the-first-token"}.items():
        monkeypatch.setenv(name, text)
    place = place_of("s3://data/out")
    sink = FileSink("s3://data/out", "parquet", pa.schema([]), settings=place.settings)
    source = ParquetSource("s3://data/in", pa.schema([])).listing(
        settings=joined({}, [place.settings])
    )
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the-second-token")

    assert place_of("s3://data/out", sink.settings) is place, "it looks into the environment itself"
    assert place_of("s3://data/in", source.settings) is place
    for sent in pickle.loads(pickle.dumps((sink, source))):
        assert sent.settings["fs.s3a.session.token"] == "the-second-token"
        assert place_of("s3://data/out", sent.settings) is not place
