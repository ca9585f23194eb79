"""S3 and what speaks like it: addresses, and how a bucket is reached.

Spark users have said it already, for Hadoop's `s3a`: the same settings are understood here, as
`spark.hadoop.fs.s3a.*` of the session or `fs.s3a.*` among a job's options. One for a single bucket,
`fs.s3a.bucket.<bucket>.*`, comes first. What they leave open is taken from the usual variables of
the environment (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN,
AWS_REGION), and what these leave open is found by each machine for itself: web identities,
containers, instance profiles.

The driver settles it and sends the result to the slots, so that one place decides. Keys that expire
are looked for again where they came from: in the environment of the driver, or in a file that an
option names, which a machine that has it reads itself; others get the new ones with the job's next
attempt.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stillframe.config import parse_flag
from stillframe.errors import BuildError
from stillframe.secrets import Secret, hide
from stillframe.storage.asking import Limits
from stillframe.storage.objects import Bucket, ObjectStore
from stillframe.storage.renewed import Renewed

if TYPE_CHECKING:
    from obstore.store import S3Store

_PREFIX = "fs.s3a."
_VARIABLES = {
    "endpoint": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "endpoint.region": ("AWS_REGION", "AWS_DEFAULT_REGION"),
    "access.key": ("AWS_ACCESS_KEY_ID",),
    "secret.key": ("AWS_SECRET_ACCESS_KEY",),
    "session.token": ("AWS_SESSION_TOKEN",),
}
"""Which variables of the environment say what a setting would; the first that is set counts."""
_UNDERSTOOD = (
    *_VARIABLES,
    "path.style.access",
    "connection.ssl.enabled",
    "connection.request.timeout",
    "aws.credentials.provider",
)
_KEYS = ("access.key", "secret.key", "session.token")
_UNIT_SECONDS = {"": 0.001, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def open_s3(address: str, settings: Mapping[str, str]) -> ObjectStore:
    """The store at `s3://bucket/prefix` or `s3a://bucket/prefix`."""
    bucket, prefix = _taken_apart(address)
    at_first = settled(bucket, settings, os.environ)
    access = _understood(bucket, at_first)
    endpoint = str(access.config.get("endpoint", "Amazon S3"))

    def newest() -> dict[str, str]:
        return {**at_first, **settled(bucket, settings, os.environ)}

    def connect(is_for_large: bool) -> S3Store:
        return _client(_understood(bucket, newest()), is_for_large)

    reached = Bucket(bucket, endpoint, connect, access.limits)
    return ObjectStore("s3", prefix, reached, Renewed(settings, newest))


def settled(
    bucket: str, settings: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, str]:
    """What counts for this bucket, by its setting's name; secrets are among it."""
    own = f"{_PREFIX}bucket.{bucket}."
    said: dict[str, str] = {}
    # All three come from one place: a key of the session does not go with the token of a shell.
    keys_given = any(at + key in settings for at in (own, _PREFIX) for key in _KEYS)
    for name in _UNDERSTOOD:
        variables = () if name in _KEYS and keys_given else _VARIABLES.get(name, ())
        texts = [settings.get(own + name), settings.get(_PREFIX + name)]
        texts += [environment.get(variable) for variable in variables]
        text = next((text.strip() for text in texts if text and text.strip()), None)
        if text is not None:
            said[_PREFIX + name] = text
    for key in _KEYS:
        source = settings.get(f"{own}{key}.from", settings.get(f"{_PREFIX}{key}.from"))
        if source is not None:
            said[f"{_PREFIX}{key}.from"] = source
            with suppress(BuildError):  # this machine has no such file
                said[_PREFIX + key] = Secret.from_option(key, source, lambda _: None).reveal()
    return said


def _taken_apart(address: str) -> tuple[str, str]:
    """Bucket and prefix; by hand, because a URL parser would cut a name at `?` or `#`."""
    rest = address.partition(":")[2]
    bucket, _, prefix = rest.removeprefix("//").partition("/")
    if "@" in bucket:  # the old way of Hadoop; not shown, because it holds a secret
        raise BuildError(
            "the checkpoint location has keys in its address, where everybody would see them: set"
            " spark.hadoop.fs.s3a.access.key and .secret.key, or AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY"
        )
    parts = [part for part in prefix.split("/") if part]
    if not rest.startswith("//") or not bucket or any(part in (".", "..") for part in parts):
        raise BuildError(
            f"the checkpoint location {address!r} is no bucket and prefix: write it as"
            " s3://bucket/prefix"
        )
    return bucket, "/".join(parts)


@dataclass(frozen=True, slots=True)
class _Access:
    """How a bucket is reached, as the client wants to hear it; not shown, it has secrets."""

    bucket: str
    config: dict[str, Any]
    allow_http: bool
    limits: Limits

    def __repr__(self) -> str:
        return f"_Access({self.bucket!r})"


def _understood(bucket: str, said: Mapping[str, str]) -> _Access:
    texts = {name.removeprefix(_PREFIX): text for name, text in said.items()}
    config: dict[str, Any] = {}
    for name, ours in (
        ("access.key", "access_key_id"),
        ("secret.key", "secret_access_key"),
        ("session.token", "session_token"),
        ("endpoint.region", "region"),
    ):
        if name in texts:
            config[ours] = texts[name]
            if name in _KEYS:
                hide(texts[name])
    if ("access.key" in texts) != ("secret.key" in texts):
        raise BuildError(
            "of the access key and the secret key of S3 only one is given: set both"
            " fs.s3a.access.key and fs.s3a.secret.key, or AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY"
        )
    if "Anonymous" in texts.get("aws.credentials.provider", ""):
        config["skip_signature"] = True
    endpoint = _endpoint(texts)
    # Hadoop's default is the bucket in the host's name. That goes without saying only at Amazon.
    in_path = _flag(texts, "path.style.access", default=endpoint is not None)
    config["virtual_hosted_style_request"] = not in_path
    if endpoint is not None:
        scheme, _, host = endpoint.partition("://")
        config["endpoint"] = endpoint if in_path else f"{scheme}://{bucket}.{host}"
    limits = _limits(texts)
    return _Access(bucket, config, bool(endpoint and endpoint.startswith("http://")), limits)


def _endpoint(texts: Mapping[str, str]) -> str | None:
    endpoint = texts.get("endpoint", "").rstrip("/")
    if not endpoint:
        return None
    if "@" in endpoint:
        raise BuildError(
            "the endpoint of S3 has a user in it, where everybody would see it: leave it out and"
            " set the keys"
        )
    if re.match(r"https?://", endpoint):
        return endpoint
    secure = _flag(texts, "connection.ssl.enabled", default=True)
    return f"{'https' if secure else 'http'}://{endpoint}"


def _flag(texts: Mapping[str, str], name: str, *, default: bool) -> bool:
    return parse_flag(f"{_PREFIX}{name}", texts.get(name, str(default)))


def _limits(texts: Mapping[str, str]) -> Limits:
    text = texts.get("connection.request.timeout")
    if text is None:
        return Limits()
    match = re.fullmatch(r"(\d+)\s*(ms|s|m|h|)", text.lower())
    if match is None or int(match[1]) == 0:
        raise BuildError(
            f"{_PREFIX}connection.request.timeout is a duration such as '5s' or, in milliseconds,"
            f" '5000', not {text!r}"
        )
    return Limits.of_request(int(match[1]) * _UNIT_SECONDS[match[2]])


def _client(access: _Access, is_for_large: bool) -> S3Store:
    """Made at the first request, never before: a process that was forked could not use it.

    The one for large bodies sends a part again by itself, of which no harm can come. Whatever else
    is sent again by `Bucket.ask` alone, which has to know how often something was sent.
    """
    from obstore.store import S3Store

    limits = access.limits
    request = timedelta(seconds=limits.request_seconds)
    return S3Store(
        access.bucket,
        config=access.config,  # type: ignore[arg-type]
        client_options={
            "allow_http": access.allow_http,
            "connect_timeout": timedelta(seconds=limits.connect_seconds),
            "timeout": timedelta(seconds=limits.body_seconds) if is_for_large else request,
        },
        retry_config={
            "max_retries": 10 if is_for_large else 0,
            "retry_timeout": timedelta(seconds=limits.patience_seconds),
        },
    )
