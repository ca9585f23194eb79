"""Looking into a checkpoint takes nothing of the job's own processes, and not for long."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
from waiting import wait_until

from stillframe.cli.last_steps import descendants_of
from stillframe.rest.lookups import Lookups
from stillframe.rest.refusals import Refused
from stillframe.storage.paths import SAVEPOINT_METADATA

SECONDS_MAX = 3.0


@pytest.fixture
def endless(tmp_path: Path) -> str:
    """A savepoint that nobody ever reads to its end."""
    os.mkfifo(tmp_path / SAVEPOINT_METADATA)
    return str(tmp_path)


def looking_at(place: str) -> list[int]:
    found = []
    for pid in descendants_of(os.getpid()):
        with contextlib.suppress(OSError):  # it has just ended
            if place.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_one_looks_at_a_time_behind_all_others_and_only_for_a_while(endless):
    lookups, refused = Lookups(SECONDS_MAX), []

    def look() -> None:
        with pytest.raises(Refused) as said:
            lookups.run(["inspect", endless], {})
        refused.append(said.value)

    first = threading.Thread(target=look)
    first.start()
    wait_until(lambda: bool(looking_at(endless)))
    [pid] = looking_at(endless)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, pid) == min(19, own + 10))
    look()
    first.join(60)

    assert [each.status for each in refused] == [429, 503]
    assert "somebody looks into a checkpoint now" in str(refused[0])
    assert "took longer than 3 s: use the command stillframe inspect" in str(refused[1])
    assert looking_at(endless) == []


def test_what_cannot_be_looked_into_is_told_in_the_words_of_the_command(tmp_path):
    with pytest.raises(Refused, match="holds neither a job log nor checkpoints") as said:
        Lookups().run(["inspect", str(tmp_path)], {})
    assert said.value.status == 409
