"""The threads that touch the store: in order, bounded, and a deletion that hangs delays nothing."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from stillframe.coordinator.ledger_mail import (
    LedgerEvent,
    LedgerFailed,
    SavepointEmptied,
    SavepointRefused,
)
from stillframe.coordinator.ledger_thread import _DELETIONS_MAX, LedgerThread
from stillframe.errors import Fenced, StorageError, Unsettled

SECONDS_MAX = 30.0


class Store:
    """What was done, in its order; some of it stands at a gate first."""

    def __init__(self) -> None:
        self.mail: queue.Queue[LedgerEvent] = queue.Queue()
        self.thread = LedgerThread(self.mail.put, writes_max=32)
        self.done: list[str] = []
        self.gate = threading.Event()
        self.arrived = threading.Event()

    def does(self, what: str) -> Callable[[], None]:
        return lambda: self.done.append(what)

    def at_the_gate(self, what: str) -> Callable[[], None]:
        def letter() -> None:
            self.arrived.set()
            assert self.gate.wait(SECONDS_MAX)
            self.done.append(what)

        return letter

    def refuses(self, reason: str) -> Callable[[], SavepointRefused]:
        """A letter with an answer."""
        return lambda: SavepointRefused(reason)

    def next_mail(self) -> LedgerEvent:
        return self.mail.get(timeout=SECONDS_MAX)

    def failed(self) -> Exception:
        event = self.next_mail()
        assert isinstance(event, LedgerFailed)
        return event.error


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.gate.set()
    made.thread.close(SECONDS_MAX)


def raises(error: BaseException) -> Callable[[], None]:
    def letter() -> None:
        raise error

    return letter


def test_letters_are_carried_out_in_their_order_and_their_answers_are_mail(store: Store) -> None:
    for number in range(20):
        store.thread.write(store.does(f"write {number}"))
    store.thread.write(store.refuses("the last"))

    assert store.next_mail() == SavepointRefused("the last")
    assert store.done == [f"write {number}" for number in range(20)]


def test_a_deletion_that_hangs_delays_nothing_that_is_written(store: Store) -> None:
    store.thread.delete(store.at_the_gate("delete"))
    assert store.arrived.wait(SECONDS_MAX)
    store.thread.write(store.does("write"))
    store.thread.write(store.refuses("answered"))

    assert store.next_mail() == SavepointRefused("answered")
    assert store.done == ["write"]


def test_whoever_waits_for_what_is_written_does_not_wait_for_deletions(store: Store) -> None:
    store.thread.delete(store.at_the_gate("delete"))
    store.thread.write(store.does("write"))

    assert store.thread.await_writes(SECONDS_MAX)
    assert store.done == ["write"]


def test_whoever_waits_is_told_when_the_store_does_not_answer(store: Store) -> None:
    store.thread.write(store.at_the_gate("write"))
    assert store.arrived.wait(SECONDS_MAX)

    assert not store.thread.await_writes(0.01)
    assert store.thread.busy_seconds() > 0
    store.gate.set()
    assert store.thread.await_writes(SECONDS_MAX)
    assert store.thread.busy_seconds() == 0


def test_a_letter_that_fails_is_told_and_the_next_is_carried_out(store: Store) -> None:
    error = StorageError("disk full")
    store.thread.write(raises(error))
    store.thread.write(store.does("write"))
    store.thread.delete(raises(error))
    store.thread.delete(store.does("delete"))

    assert [store.failed(), store.failed()] == [error, error]
    store.thread.close(SECONDS_MAX)
    assert sorted(store.done) == ["delete", "write"]


@pytest.mark.parametrize("error", [Fenced("over"), Unsettled("unknown"), ValueError("a mistake")])
def test_a_driver_that_is_fenced_writes_and_deletes_nothing_any_more(
    store: Store, error: Exception
) -> None:
    store.thread.delete(store.at_the_gate("the one it is at"))
    assert store.arrived.wait(SECONDS_MAX)
    store.thread.delete(store.does("delete"))
    store.thread.write(raises(error))
    store.thread.write(store.does("write"))

    assert store.failed() is error
    store.thread.write(store.does("write"))
    store.gate.set()
    store.thread.close(SECONDS_MAX)
    assert store.done == ["the one it is at"]


def test_a_thread_is_not_ended_by_whatever_a_letter_raises(store: Store) -> None:
    store.thread.delete(raises(SystemExit("done")))
    store.thread.delete(store.does("delete"))

    assert "SystemExit('done')" in str(store.failed())
    store.thread.close(SECONDS_MAX)
    assert store.done == ["delete"]


def test_what_waits_to_be_deleted_is_deleted_before_it_is_closed(store: Store) -> None:
    for number in range(5):
        store.thread.delete(store.does(f"delete {number}"))
    store.thread.delete(lambda: store.thread.write(store.does("what follows from it")))
    store.thread.close(SECONDS_MAX)

    assert store.done == [*(f"delete {number}" for number in range(5)), "what follows from it"]


def test_deletions_that_take_too_long_at_the_end_are_given_up_and_heard_of_no_more(
    store: Store,
) -> None:
    def hangs() -> SavepointEmptied:
        store.arrived.set()
        assert store.gate.wait(SECONDS_MAX)
        return SavepointEmptied("somewhere")

    store.thread.delete(hangs)
    store.thread.delete(store.does("delete"))
    assert store.arrived.wait(SECONDS_MAX)
    store.thread.close(0.01)
    store.gate.set()
    for thread in threading.enumerate():
        if thread.name == "stillframe-deletions":
            thread.join(SECONDS_MAX)

    assert store.done == []
    assert store.mail.empty()


def test_if_more_is_to_be_deleted_than_the_store_can_the_oldest_is_given_up_with_a_word(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.thread.delete(store.at_the_gate("the one it is at"))
    assert store.arrived.wait(SECONDS_MAX)
    with caplog.at_level(logging.WARNING, "stillframe"):
        for number in range(_DELETIONS_MAX + 2):
            store.thread.delete(store.does(f"delete {number}"))

    assert "the storage deletes so slowly" in caplog.text
    store.gate.set()
    store.thread.close(SECONDS_MAX)
    assert store.done[:2] == ["the one it is at", "delete 2"]
    assert len(store.done) == _DELETIONS_MAX + 1
