"""An S3 server that has too many requests, and credentials that expire and are renewed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_servers import Front

from stillframe.config import storage_settings
from stillframe.errors import NotDone
from stillframe.storage.asking import Limits
from stillframe.storage.places import place_of
from stillframe.storage.store import Store, open_store

pytestmark = pytest.mark.s3


@pytest.fixture
def front(s3_port: int) -> Iterator[Front]:
    made = Front(s3_port)
    yield made
    made.end()


@pytest.fixture
def settings(front: Front, s3_settings: dict[str, str]) -> dict[str, str]:
    return {**s3_settings, "fs.s3a.endpoint": front.url}


def slow_down_for(front: Front, requests: int) -> None:
    def refuses(*_: object) -> tuple[int, str] | None:
        return (503, "SlowDown") if front.refused < requests else None

    front.refuses = refuses


def test_a_storage_that_asks_to_slow_down_is_asked_again_later(front, settings, s3_bucket) -> None:
    store = open_store(f"s3://{s3_bucket}/root", settings)
    slow_down_for(front, 3)

    assert store.create_if_absent("log/1", b"mine")
    assert front.refused == 3
    assert not store.create_if_absent("log/1", b"mine")


def test_a_storage_that_is_too_busy_for_long_has_done_nothing_and_is_named(
    front, settings, s3_bucket
) -> None:
    store = open_store(f"s3://{s3_bucket}/root", settings)
    slow_down_for(front, 1_000_000)

    with pytest.raises(NotDone, match=r"answers 503 SlowDown, because .* too many requests; raise"):
        store.create_if_absent("log/1", b"mine")
    assert 3 <= front.refused < 30, "ever longer pauses"


def test_a_token_that_expires_is_read_again_from_its_file(
    front, settings, s3_bucket, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("the-first-token")
    given = storage_settings({**settings, "fs.s3a.session.token": f"file:{file}"}, {})
    store = open_store(f"s3://{s3_bucket}/root", given)
    of_a_slot: Store = open_store(store.address, dict(store.settings))
    for each in (store, of_a_slot):
        each.list("")
    file.write_text("the-second-token")
    front.expire("the-first-token")

    assert store.create_if_absent("log/1", b"mine")
    assert of_a_slot.read("log/1") == b"mine"
    assert store.settings["fs.s3a.session.token"] == "the-second-token", "for the next attempt"


def test_files_of_sources_and_sinks_are_reached_with_a_renewed_token(
    front, settings, s3_bucket, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("token-0")
    given = storage_settings({**settings, "fs.s3a.session.token": f"file:{file}"}, {})
    root, data = f"s3://{s3_bucket}/out", bytes(9 << 20)
    place = place_of(root, given)

    def renew(number: int) -> None:
        front.expire(f"token-{number - 1}")
        file.write_text(f"token-{number}")

    draft = place.draft(f"{root}/large")
    draft.file.write(data)
    place.note(f"{root}/small")
    renew(1)
    assert draft.finish() == len(data)
    renew(2)
    facts = place.facts(f"{root}/large")
    assert facts is not None
    renew(3)
    opened = place.open(f"{root}/large")
    renew(4)
    assert opened.read() == data
    renew(5)
    assert place.move(f"{root}/large", f"{root}/moved")
    renew(6)
    found = place.walk(root, lambda name: False)
    assert {each.path for each in found} == {f"{root}/small", f"{root}/moved"}
    assert front.refused >= 6


def test_a_token_that_expires_while_a_large_file_is_sent_does_not_lose_it(
    front, settings, s3_bucket, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("the-first-token")
    given = storage_settings({**settings, "fs.s3a.session.token": f"file:{file}"}, {})
    root, data = f"s3://{s3_bucket}/out", bytes(20 << 20)
    place = place_of(root, given)

    def refuses(method: str, headers: Any) -> tuple[int, str] | None:
        is_old = headers.get("x-amz-security-token") == "the-first-token"
        if is_old and method == "PUT":  # a part of it
            file.write_text("the-second-token")
            return 400, "ExpiredToken"
        return None

    front.refuses = refuses
    draft = place.draft(f"{root}/large")
    draft.file.write(data)

    assert draft.finish() == len(data)
    assert front.refused >= 1
    facts = place.facts(f"{root}/large")
    assert facts is not None
    assert facts.size_bytes == len(data)


def test_a_token_that_expires_is_read_again_from_the_environment(
    front, s3_bucket, s3_environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the-first-token")
    store = open_store(f"s3://{s3_bucket}/root", {"fs.s3a.endpoint": front.url})
    store.list("")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "the-second-token")
    front.expire("the-first-token")

    store.write("a", [b"a"])

    assert front.refused == 1


def test_a_token_that_is_renewed_a_moment_late_was_never_missed(
    front, settings, s3_bucket, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("the-first-token")
    given = storage_settings({**settings, "fs.s3a.session.token": f"file:{file}"}, {})
    store = open_store(f"s3://{s3_bucket}/root", given)
    front.expire("the-first-token")
    late = threading.Timer(0.3, lambda: file.write_text("the-second-token"))
    late.start()

    try:
        assert store.list("") == []
    finally:
        late.join()


def test_a_token_that_nobody_renews_is_said_within_a_bound(front, settings, s3_bucket) -> None:
    store = open_store(
        f"s3://{s3_bucket}/root", {**settings, "fs.s3a.session.token": "the-first-token"}
    )
    front.expire("the-first-token")
    began = time.monotonic()

    with pytest.raises(NotDone, match=r"the credentials have expired, and no newer .*; renew the"):
        store.create_if_absent("log/1", b"mine")
    assert time.monotonic() - began < 5 * Limits.of_request(1.0).patience_seconds
