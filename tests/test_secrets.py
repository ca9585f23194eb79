"""Secrets show nowhere: they are taken from where they are kept, and hidden in every text."""

from __future__ import annotations

import json
import logging
import pickle
import traceback
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from stillframe.config import job_config
from stillframe.errors import BuildError, DataError, UnknownOption, UserCodeError
from stillframe.options import Options
from stillframe.secrets import Secret, is_secret_name, masked
from stillframe.user_code import calling

VALUE = 'p"ss w\\rd/ü-7731'


def options(given: dict[str, str], **more: Any) -> Options:
    return Options("the sink shelf", given, **more)


# --- what is one ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "password",
        "user.passwd",
        "sslKeyPassphrase",
        "clientSecret",
        "api_key",
        "authToken",
        "kafka.sasl.jaas.config",
        "kafka.ssl.key.password",
        "fs.s3a.access.key",
        "fs.s3a.secret.key",
        "fs.s3a.session.token",
        "connectionString",
    ],
)
def test_an_option_called_like_a_secret_is_one(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["path", "user", "keyColumn", "kafka.bootstrap.servers", "fs.s3a.aws.credentials.provider"],
)
def test_other_options_are_none(name):
    assert not is_secret_name(name)


def test_a_connector_may_mark_others_as_secrets():
    given = options({"PIN": VALUE, "place": "here"}, known=("place",), secret_names=("pin",))

    assert given.secret("pin").reveal() == VALUE
    assert given["place"] == "here"


def test_a_password_in_an_address_is_refused_and_not_shown():
    for address in ("postgresql://ann:hunter-2@db/x", "jdbc:x://db/x?user=a&password=hunter-2"):
        with pytest.raises(BuildError, match="option url has a password") as refused:
            options({"url": address})
        assert "hunter-2" not in str(refused.value)


# --- where it is taken from ----------------------------------------------------------------------


def test_a_secret_is_the_text_or_what_the_text_names(tmp_path, monkeypatch):
    monkeypatch.setenv("SHELF_PASSWORD", VALUE)
    (tmp_path / "password").write_text(VALUE + "\n")
    conf = {"spark.shelf.password": VALUE}.get

    for text in (
        VALUE,
        "env:SHELF_PASSWORD",
        f"file:{tmp_path}/password",
        "conf:spark.shelf.password",
    ):
        assert options({"Password": text}, conf=conf).secret("password").reveal() == VALUE


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "env:NO_SUCH_VARIABLE",
            "environment variable 'NO_SUCH_VARIABLE', which is not set on the",
        ),
        ("file:/no/such/file", r"file '/no/such/file', which the driver cannot read \(No such"),
        ("conf:spark.no.such", "Spark's configuration 'spark.no.such', which is not set"),
    ],
)
def test_a_secret_that_is_not_there_is_refused_when_the_job_is_built(text, told):
    with pytest.raises(BuildError, match=f"option password is taken from .*{told}"):
        options({"password": text})


def test_on_the_driver_a_changed_file_is_read_again_and_executors_get_the_value(tmp_path):
    file = tmp_path / "token"
    file.write_text("the-first-token")
    secret = options({"token": f"file:{file}"}).secret("token")

    sent = pickle.dumps(secret)
    file.write_text("the-second-token")

    assert pickle.loads(sent).reveal() == "the-first-token"
    file.unlink()
    assert pickle.loads(sent).reveal() == "the-first-token", "executors have no such file"
    file.write_text("the-second-token")
    assert pickle.loads(pickle.dumps(secret)).reveal() == "the-second-token"


def test_keys_of_a_storage_among_a_jobs_options_are_taken_from_there_too(monkeypatch):
    monkeypatch.setenv("S3_KEY", VALUE)

    made = job_config({"fs.s3a.secret.key": "env:S3_KEY", "fs.s3a.endpoint": "env:nothing"})

    assert made.storage_settings == {"fs.s3a.secret.key": VALUE, "fs.s3a.endpoint": "env:nothing"}
    assert VALUE not in repr(made)


# --- that it shows nowhere -----------------------------------------------------------------------


def test_it_is_printed_as_stars(caplog):
    secret = Secret(VALUE)
    given = options({"password": VALUE, "place": "here"})
    logging.getLogger("any").warning("%s %r", secret, given)

    told = [str(secret), repr(secret), f"{secret}", repr([secret]), caplog.text]
    assert all("***" in text and VALUE not in text for text in told)
    assert repr(given) == "Options({'password': '***', 'place': 'here'})"
    with pytest.raises(TypeError):
        json.dumps({"password": secret})


def test_whoever_asks_for_its_text_is_told_how_to_ask():
    with pytest.raises(
        BuildError, match=r"option password of the sink shelf is a secret.*\.secret"
    ):
        options({"password": VALUE})["password"]


def test_an_option_that_is_needed_and_not_given_is_named():
    with pytest.raises(BuildError) as missing:
        options({})["topic"]
    assert str(missing.value) == "the sink shelf needs the option topic: say .option('topic', ...)"
    assert options({}).get("topic") is None


def test_options_that_begin_alike_are_handed_on_as_they_were_spelled():
    given = options(
        {"topic": "t", "kafka.sasl.Password": VALUE, "KAFKA.acks": "all"},
        known=("topic", "kafka.*"),
    )

    assert given.below("kafka.") == {"sasl.Password": Secret(VALUE), "acks": "all"}
    with pytest.raises(UnknownOption, match="did you mean 'topic'"):
        options({"topics": "t"}, known=("topic", "kafka.*"))


@pytest.mark.parametrize("form", [VALUE, repr(VALUE), json.dumps(VALUE), quote(VALUE)])
def test_a_text_of_somebody_else_is_masked_in_whatever_form_it_has_it(form):
    Secret(VALUE)

    assert masked(f"login with {form} refused").startswith("login with ")
    assert "7731" not in masked(f"login with {form} refused")


def test_a_short_secret_is_masked_where_it_stands_alone():
    Secret("ab")

    assert masked("password ab in table abc") == "password *** in table abc"


def test_each_line_of_a_key_is_masked():
    Secret("-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG\nhkiG9w0BAQEFAAS\n-----END KEY-----")

    assert masked("bad base64 'hkiG9w0BAQEFAAS'") == "bad base64 '***'"


def raise_with(secret: Secret, kind: type[Exception]) -> None:
    try:
        raise OSError(f"no login as {secret.reveal()}")
    except OSError as error:
        raise kind(f"cannot connect: {error}") from error


@pytest.mark.parametrize("kind", [ValueError, DataError])
def test_an_error_of_a_connector_does_not_tell_it(kind):
    with pytest.raises((UserCodeError, DataError)) as told, calling("sink shelf", f"row {VALUE}"):
        raise_with(Secret(VALUE), kind)

    assert "cannot connect: no login as ***" in str(told.value)
    assert VALUE not in "".join(traceback.format_exception(told.value))
    assert VALUE not in repr(getattr(told.value, "blame", None))


def test_the_page_names_every_place_a_secret_may_come_from():
    page = (Path(__file__).parents[1] / "docs/api.md").read_text()
    assert all(f"`{kind}:" in page for kind in ("env", "file", "conf"))
