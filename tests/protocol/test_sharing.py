"""When a snapshot may refer to a file that an older checkpoint holds."""

from __future__ import annotations

import random

from stillframe.ids import CheckpointId
from stillframe.protocol.sharing import Sharing

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
