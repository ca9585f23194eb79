"""When a snapshot may refer to a file that an older checkpoint holds."""

from __future__ import annotations

import random
from collections.abc import Iterable

from stillframe.ids import CheckpointId
from stillframe.protocol.sharing import SharedFiles, Sharing

ONE, TWO, THREE, FOUR = map(CheckpointId, range(1, 5))


def taken(sharing: Sharing[str], checkpoint_id: CheckpointId, version: int) -> str:
    """The file the snapshot holds, written for it if need be."""
    held = sharing.on_snapshot(checkpoint_id, version)
    if held is None:
        held = f"file-{checkpoint_id}"
        sharing.on_written(checkpoint_id, held)
    return held


def test_unchanged_state_refers_to_what_the_last_completed_checkpoint_holds() -> None:
    sharing = Sharing[str]()
    assert taken(sharing, ONE, version=7) == "file-1"
    sharing.on_completed(ONE)

    assert taken(sharing, TWO, version=7) == "file-1"
    sharing.on_completed(TWO)
    assert taken(sharing, THREE, version=7) == "file-1"
    sharing.on_completed(THREE)
    assert taken(sharing, FOUR, version=8) == "file-4"


def test_a_checkpoint_not_known_to_be_complete_is_never_built_on() -> None:
    sharing = Sharing[str]()
    taken(sharing, ONE, version=7)
    assert taken(sharing, TWO, version=7) == "file-2"
    sharing.on_aborted(ONE)

    assert taken(sharing, THREE, version=7) == "file-3"


def test_a_base_that_may_have_been_dropped_meanwhile_is_not_built_on() -> None:
    sharing = Sharing[str]()
    taken(sharing, ONE, version=7)
    taken(sharing, TWO, version=7)
    sharing.on_completed(ONE)

    # Checkpoint 2 may be complete by now, and 1 with its file gone.
    assert taken(sharing, THREE, version=7) == "file-3"
    sharing.on_aborted(TWO)
    sharing.on_aborted(THREE)
    assert taken(sharing, FOUR, version=7) == "file-1"


def test_several_checkpoints_in_flight_may_build_on_the_same_base() -> None:
    sharing = Sharing[str]()
    taken(sharing, ONE, version=7)
    sharing.on_completed(ONE)

    assert [taken(sharing, each, version=7) for each in (TWO, THREE, FOUR)] == ["file-1"] * 3


def test_an_aborted_snapshot_that_is_written_late_is_no_base() -> None:
    sharing = Sharing[str]()
    taken(sharing, ONE, version=6)
    sharing.on_completed(ONE)
    assert sharing.on_snapshot(TWO, version=7) is None
    sharing.on_aborted(TWO)
    sharing.on_written(TWO, "file-2")

    assert taken(sharing, THREE, version=7) == "file-3"


def test_the_checkpoint_an_attempt_was_restored_from_is_no_base() -> None:
    sharing = Sharing[str]()
    sharing.on_completed(THREE)

    assert sharing.on_snapshot(FOUR, version=0) is None


def test_in_random_schedules_nothing_is_referred_to_after_it_was_dropped() -> None:
    """The coordinator keeps only the newest; its news comes late, barriers overtake it."""
    shared = 0
    for seed in range(400):
        shared += _play(random.Random(seed))
    assert shared > 400, "or the schedules prove nothing"


def _play(chance: random.Random) -> int:
    sharing, news, shared = Sharing[str](), list[tuple[bool, CheckpointId]](), 0
    pending: dict[CheckpointId, str] = {}
    newest, stored, version, number = "", set[str](), 0, 0
    for _ in range(60):
        match chance.choice(["change", *["begin"] * 3, *["complete"] * 2, "abort", *["news"] * 4]):
            case "change":
                version += 1
            case "begin" if len(pending) < 3:
                number += 1
                checkpoint_id = CheckpointId(number)
                held = taken(sharing, checkpoint_id, version)
                if held == f"file-{number}":
                    stored.add(held)
                shared += held != f"file-{number}"
                pending[checkpoint_id] = held
            case "complete" if pending:
                completed = chance.choice(sorted(pending))
                for older in [each for each in pending if each < completed]:
                    del pending[older]
                    news.append((False, older))
                newest = pending.pop(completed)
                assert newest in stored
                # Nothing is acknowledged before it completes: the worst a coordinator may do.
                stored = {newest} | {f"file-{each}" for each in pending}
                news.append((True, completed))
            case "abort" if pending:
                aborted = chance.choice(sorted(pending))
                del pending[aborted]
                news.append((False, aborted))
            case "news" if news:
                is_complete, of = news.pop(0)
                (sharing.on_completed if is_complete else sharing.on_aborted)(of)
    return shared


# --- a database: many files


def uploaded(
    shared: SharedFiles[str], checkpoint_id: CheckpointId, names: Iterable[str]
) -> set[str]:
    """The files the snapshot of a database with these names holds, written for it if need be."""
    referable = shared.on_snapshot(checkpoint_id)
    files = {name: referable.get(name, f"{name}-{checkpoint_id}") for name in names}
    shared.on_written(checkpoint_id, files)
    return set(files.values())


def test_of_a_database_only_files_that_no_completed_checkpoint_has_are_written() -> None:
    shared = SharedFiles[str]()
    assert uploaded(shared, ONE, ["a", "b"]) == {"a-1", "b-1"}
    shared.on_completed(ONE)

    assert uploaded(shared, TWO, ["a", "b", "c"]) == {"a-1", "b-1", "c-2"}
    shared.on_completed(TWO)
    assert uploaded(shared, THREE, ["c", "d"]) == {"c-2", "d-3"}


def test_the_files_of_a_checkpoint_that_failed_are_written_again() -> None:
    shared = SharedFiles[str]()
    uploaded(shared, ONE, ["a"])
    shared.on_completed(ONE)
    uploaded(shared, TWO, ["a", "b"])
    shared.on_aborted(TWO)

    assert uploaded(shared, THREE, ["a", "b"]) == {"a-1", "b-3"}


def test_a_file_that_an_undecided_snapshot_dropped_is_written_again() -> None:
    shared = SharedFiles[str]()
    uploaded(shared, ONE, ["a", "b"])
    shared.on_completed(ONE)
    uploaded(shared, TWO, ["a"])

    # If checkpoint 2 is complete by now, 1 may be dropped, and b with it.
    assert uploaded(shared, THREE, ["a", "b"]) == {"a-1", "b-3"}


def test_while_a_snapshot_is_being_written_nothing_is_referred_to() -> None:
    shared = SharedFiles[str]()
    uploaded(shared, ONE, ["a"])
    shared.on_completed(ONE)
    shared.on_snapshot(TWO)

    assert uploaded(shared, THREE, ["a"]) == {"a-3"}


def test_a_database_that_goes_on_with_what_was_restored_refers_to_that() -> None:
    shared = SharedFiles({"a": "a-1"})
    shared.on_completed(ONE)

    assert uploaded(shared, TWO, ["a", "b"]) == {"a-1", "b-2"}


def test_in_random_schedules_no_file_of_a_database_is_referred_to_after_it_was_dropped() -> None:
    referred = sum(_play_files(random.Random(seed)) for seed in range(400))
    assert referred > 400, "or the schedules prove nothing"


def _play_files(chance: random.Random) -> int:
    shared, news = SharedFiles[str](), list[tuple[bool, CheckpointId]]()
    pending: dict[CheckpointId, set[str]] = {}
    newest, stored, names, number, referred = set[str](), set[str](), ["0"], 0, 0
    for step in range(80):
        match chance.choice(["change", *["begin"] * 3, *["complete"] * 2, "abort", *["news"] * 4]):
            case "change":
                names = [name for name in names if chance.random() < 0.8] + [str(step)]
            case "begin" if len(pending) < 3:
                number += 1
                held = uploaded(shared, CheckpointId(number), names)
                written = {file for file in held if file.endswith(f"-{number}")}
                referred += len(held - written)
                stored |= written
                pending[CheckpointId(number)] = held
            case "complete" if pending:
                completed = chance.choice(sorted(pending))
                for older in [each for each in pending if each < completed]:
                    del pending[older]
                    news.append((False, older))
                newest = pending.pop(completed)
                assert newest <= stored
                own = {f for each, held in pending.items() for f in held if f.endswith(f"-{each}")}
                stored = newest | own
                news.append((True, completed))
            case "abort" if pending:
                aborted = chance.choice(sorted(pending))
                stored -= {f for f in pending.pop(aborted) if f.endswith(f"-{aborted}")} - newest
                news.append((False, aborted))
            case "news" if news:
                is_complete, of = news.pop(0)
                (shared.on_completed if is_complete else shared.on_aborted)(of)
    return referred
