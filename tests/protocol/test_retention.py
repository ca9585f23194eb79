"""Which shared files may be deleted, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stillframe.ids import CheckpointId
from stillframe.protocol.retention import Retention


def retention(**retained: set[str] | None) -> Retention:
    """`c5={"a"}`: checkpoint 5 is retained and uses the file `a`."""
    made = Retention()
    made.on_started({CheckpointId(int(name[1:])): files for name, files in retained.items()})
    return made


def acknowledge(made: Retention, checkpoint_id: int, *files: str) -> None:
    made.on_triggered(CheckpointId(checkpoint_id))
    assert made.on_acknowledged(CheckpointId(checkpoint_id), files) == set()


def test_a_file_is_deleted_with_its_last_user() -> None:
    made = retention(c5={"a", "b"})
    acknowledge(made, 6, "b", "c")

    assert made.on_completed(CheckpointId(6), {"b", "c"}, dropped=[CheckpointId(5)]) == {"a"}
    acknowledge(made, 7, "d")
    assert made.on_completed(CheckpointId(7), {"d"}, dropped=[CheckpointId(6)]) == {"b", "c"}
    assert made.retained_files() == {"d"}


def test_what_a_pending_checkpoint_has_acknowledged_is_not_taken_from_it() -> None:
    made = retention(c5={"a"})
    acknowledge(made, 6, "b")
    acknowledge(made, 7, "a")

    assert made.on_completed(CheckpointId(6), {"b"}, dropped=[CheckpointId(5)]) == set()
    assert made.on_aborted(CheckpointId(7)) == {"a"}


def test_an_aborted_checkpoint_takes_nothing_from_a_completed_one() -> None:
    made = retention(c5={"a"})
    acknowledge(made, 6, "a", "b")

    assert made.on_aborted(CheckpointId(6)) == {"b"}
    assert made.on_aborted(CheckpointId(6)) == set(), "the second time there is nothing left"
    assert made.retained_files() == {"a"}


def test_an_acknowledgement_after_the_abort_gives_its_own_files_back_only() -> None:
    made = retention(c5={"a"})
    acknowledge(made, 6)
    made.on_aborted(CheckpointId(6))

    assert made.on_acknowledged(CheckpointId(6), {"a", "b"}) == {"b"}


def test_an_acknowledgement_that_comes_again_after_completion_deletes_nothing() -> None:
    made = retention()
    acknowledge(made, 6, "a")
    assert made.on_completed(CheckpointId(6), {"a"}, dropped=[]) == set()

    assert made.on_acknowledged(CheckpointId(6), {"a"}) == set()


def test_nothing_is_deleted_while_a_retained_checkpoint_cannot_be_read() -> None:
    made = retention(c4=None, c5={"a"})
    assert made.retained_files() is None
    acknowledge(made, 6, "b")
    assert made.on_completed(CheckpointId(6), {"b"}, dropped=[]) == set()
    acknowledge(made, 7, "c")
    assert made.on_aborted(CheckpointId(7)) == set()
    assert made.on_acknowledged(CheckpointId(7), {"d"}) == set()

    acknowledge(made, 8, "e")
    gone = [CheckpointId(4), CheckpointId(5)]
    assert made.on_completed(CheckpointId(8), {"e"}, gone) == {"a"}
    assert made.retained_files() == {"b", "e"}


def test_an_attempt_that_begins_forgets_what_was_pending_before() -> None:
    made = retention(c5={"a"})
    acknowledge(made, 6, "b")

    made.on_started({CheckpointId(5): {"a"}})

    assert made.on_aborted(CheckpointId(6)) == set(), "its files are left to the sweep"


steps = st.lists(st.tuples(st.sampled_from(["complete", "abort"]), st.sets(st.sampled_from("xy"))))


@given(steps)
def test_in_any_history_exactly_the_files_of_retained_checkpoints_are_left(
    history: list[tuple[str, set[str]]],
) -> None:
    """Each checkpoint writes a file of its own or refers to some the newest complete one holds."""
    made, stored, newest = Retention(), set[str](), (CheckpointId(0), set[str]())
    made.on_started({})
    for number, (fate, referred) in enumerate(history, start=1):
        checkpoint_id = CheckpointId(number)
        files = {file for file in newest[1] if file[0] in referred} | {
            f"{'xy'[number % 2]}{number}"
        }
        stored |= files
        acknowledge(made, checkpoint_id, *files)
        if fate == "abort":
            stored -= made.on_aborted(checkpoint_id)
        else:
            dropped = [newest[0]] if newest[0] else []
            stored -= made.on_completed(checkpoint_id, files, dropped)
            newest = (checkpoint_id, files)
        assert stored == newest[1] == made.retained_files()


def test_before_it_is_told_what_is_retained_nobody_may_sweep():
    retention = Retention()

    assert retention.retained_files() is None
    retention.on_started({})
    assert retention.retained_files() == frozenset()
