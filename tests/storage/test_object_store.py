"""An object store over a network that breaks: answers get lost, servers go and come back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from stillframe.errors import NotDone, StorageError, Unanswered
from stillframe.storage.asking import Limits
from stillframe.storage.store import Store, open_store

pytestmark = pytest.mark.s3

LARGE_BYTES = 20_000_000


@pytest.fixture
def store(s3_bucket: str, s3_settings: dict[str, str]) -> Store:
    return open_store(f"s3a://{s3_bucket}/root", s3_settings)


@pytest.fixture
def other(s3_bucket: str, s3_environment: None) -> Store:
    """The same store, by a way that never breaks."""
    return open_store(f"s3://{s3_bucket}/root")


def test_a_creator_whose_answer_was_lost_finds_that_it_has_won(store: Store, gateway) -> None:
    gateway.lose_answers(1)

    assert store.create_if_absent("log/1", b"mine")

    assert gateway.answers_lost == 1
    assert not store.create_if_absent("log/1", b"mine")


def test_a_creator_whose_answer_was_lost_finds_that_another_has_won(
    store: Store, other: Store, gateway
) -> None:
    other.create_if_absent("log/1", b"same contents")
    gateway.lose_answers(2)

    assert not store.create_if_absent("log/1", b"same contents")


def test_a_writer_whose_answers_were_lost_has_written(store: Store, gateway) -> None:
    gateway.lose_answers(2)

    written = store.write("chk-1/a", [b"state"])

    assert store.read_verified("chk-1/a", written.length_bytes, written.crc32).size == 5


def test_a_large_file_whose_answers_were_lost_on_the_way_is_whole(store: Store, gateway) -> None:
    data = os.urandom(LARGE_BYTES)

    def chunks() -> Iterator[bytes]:
        yield data[: LARGE_BYTES // 2]
        gateway.lose_answers(1)
        yield data[LARGE_BYTES // 2 :]

    written = store.write("shared/1/a", chunks())

    assert gateway.answers_lost == 1
    read = store.read_verified("shared/1/a", written.length_bytes, written.crc32)
    assert read.to_pybytes() == data


def test_of_two_whose_answers_get_lost_all_the_time_exactly_one_wins(
    store: Store, other: Store, gateway
) -> None:
    won = {}
    for number in range(20):
        path = f"log/{number}"
        gateway.lose_answers(number % 3)
        rival = threading.Thread(
            target=lambda p=path: won.update({p: other.create_if_absent(p, b"rival")})
        )
        rival.start()
        mine = store.create_if_absent(path, b"mine")
        rival.join(30)

        assert won[path] is not mine, path
        assert store.read(path) == (b"mine" if mine else b"rival")


def test_a_server_that_is_down_is_said_within_a_bound_and_nothing_was_done(
    store: Store, other: Store, gateway
) -> None:
    gateway.close()
    began = time.monotonic()

    with pytest.raises(NotDone, match=r"cannot create s3://.*root/log/1: http.* cannot be reach"):
        store.create_if_absent("log/1", b"mine")

    assert time.monotonic() - began < 5 * Limits.of_request(1.0).patience_seconds
    assert other.list("log") == []


def test_what_is_asked_right_after_a_server_was_found_down_fails_at_once(
    store: Store, gateway
) -> None:
    gateway.close()
    with pytest.raises(StorageError):
        store.list("")

    began = time.monotonic()
    for number in range(20):
        with pytest.raises(NotDone, match=r"cannot delete .*/a: .* cannot be reached a moment ago"):
            store.below(f"chk-{number}").delete("a")

    assert time.monotonic() - began < Limits.of_request(1.0).patience_seconds


def test_a_server_that_comes_back_in_time_was_never_missed(store: Store, gateway) -> None:
    store.write("a", [b"a"])
    gateway.close()
    back = threading.Timer(0.3, gateway.open)
    back.start()

    try:
        assert store.read("a") == b"a"
    finally:
        back.join()


def test_a_server_that_comes_back_later_is_used_again(store: Store, gateway) -> None:
    gateway.close()
    with pytest.raises(StorageError):
        store.write("a", [b"a"])

    gateway.open()
    rest = Limits.of_request(1.0).rest_seconds
    deadline = time.monotonic() + 20 * rest
    while True:
        try:
            store.write("a", [b"a"])
            break
        except StorageError:
            assert time.monotonic() < deadline
            threading.Event().wait(rest / 4)

    assert store.read("a") == b"a"


def test_a_server_that_does_not_answer_leaves_it_open_whether_it_was_done(
    store: Store, other: Store, gateway
) -> None:
    gateway.stall()

    with pytest.raises(Unanswered, match=r"cannot create s3://.*: http.* did not answer in time"):
        store.create_if_absent("log/1", b"mine")

    gateway.flow()
    assert other.read("log/1") == b"mine", "here it was done"


def test_a_slow_answer_is_waited_for(store: Store, gateway) -> None:
    gateway.stall()
    slow = threading.Thread(target=lambda: (gateway.stalled.wait(10), gateway.flow()))
    slow.start()

    assert store.create_if_absent("log/1", b"mine")
    slow.join(10)


def test_a_large_file_that_was_torn_on_its_way_is_not_there(
    store: Store, other: Store, gateway
) -> None:
    gateway.cut_after(LARGE_BYTES // 2)

    with pytest.raises(StorageError, match=r"cannot write s3://.*root/shared/1/a: "):
        store.write("shared/1/a", [bytes(LARGE_BYTES // 4)] * 4)

    assert other.list("shared/1") == []
    assert other.write("shared/1/a", [bytes(LARGE_BYTES)]).length_bytes == LARGE_BYTES


def test_a_bucket_that_is_not_there_is_no_damage(s3_settings: dict[str, str]) -> None:
    store = open_store("s3://no-such-bucket/root", s3_settings)

    for act in (
        lambda: store.list(""),
        lambda: store.read("log/1"),
        lambda: store.create_if_absent("log/1", b""),
        lambda: store.write("chk-1/a", [bytes(LARGE_BYTES)]),
    ):
        with pytest.raises(StorageError, match=r"s3://no-such-bucket/root.*") as raised:
            act()
        assert type(raised.value) in (NotDone, Unanswered)
        assert "no such bucket" in str(raised.value)


def test_an_endpoint_that_is_no_storage_is_said_in_one_sentence(
    s3_bucket: str, s3_settings: dict[str, str]
) -> None:
    nowhere = {**s3_settings, "fs.s3a.endpoint": "http://localhost:1"}

    with pytest.raises(NotDone, match=r"http://localhost:1 cannot be reached") as raised:
        open_store(f"s3://{s3_bucket}/root", nowhere).list("")
    assert "\n" not in str(raised.value)
    assert raised.value.__cause__ is None


def test_no_secret_is_in_what_a_store_shows_of_itself(
    store: Store, gateway, s3_settings: dict[str, str]
) -> None:
    gateway.close()
    with pytest.raises(StorageError) as raised:
        store.read("a")

    shown = f"{store!r} {store.address} {raised.value!r} {raised.value}"
    assert s3_settings["fs.s3a.secret.key"] not in shown
    assert s3_settings["fs.s3a.access.key"] not in shown
