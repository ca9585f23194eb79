"""Functions without keys in their subtasks: lists, unions and copies through any parallelism."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stillframe import StreamFunction, SubtaskStates
from stillframe.errors import DataError, StartRefused, StillframeError, UserCodeError
from stillframe.graph.logical import ProcessStream
from stillframe.ids import Attempt, CheckpointId, Epoch, OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import Manifest, OperatorDescription, OperatorSnapshot
from stillframe.protocol.restore import starting_state
from stillframe.runtime.limiting import Limiting
from stillframe.runtime.restoring import read_copy, read_share
from stillframe.runtime.stream_processing import RestoredRows, StreamProcessing
from stillframe.storage.local import LocalStore

SCHEMA = pa.schema([("n", pa.int64())])
UID = OperatorUid("f")


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(numbers, pa.int64())], schema=SCHEMA)


def plainly(batches: Any) -> list[int]:
    return [n for each in batches for n in each["n"].to_pylist()]


class Job:
    """All subtasks of one function, fed by hand and restored from what they wrote last."""

    def __init__(self, make: Any, place: Path, parallelism: int = 1, attempt: int = 1) -> None:
        self.store = LocalStore(place)
        self.make = make
        self.attempt = attempt
        self.checkpoints = 0
        self.subtasks = self._subtasks(parallelism, None)

    def checkpoint(self) -> Manifest:
        self.checkpoints += 1
        number = CheckpointId(self.checkpoints)
        snapshots = []
        for subtask in self.subtasks:
            snapshots.append(subtask.described(number, subtask.snapshot(number)()))
            subtask.completed(number)
        described = OperatorDescription(UID, "processstream", "f", len(self.subtasks))
        return Manifest(
            "job", Attempt(self.attempt), number, Epoch(0), "checkpoint", 0, 0, 16,
            (described,), tuple(snapshots),
        )  # fmt: skip

    def again(self, parallelism: int, make: Any = None) -> None:
        """Restored, with as many subtasks."""
        manifest = self.checkpoint()
        self.make = make or self.make
        self.attempt += 1
        self.subtasks = self._subtasks(parallelism, manifest)

    def states(self, name: str) -> list[Any]:
        return [getattr(subtask._function, name) for subtask in self.subtasks]

    def _subtasks(self, parallelism: int, manifest: Manifest | None) -> list[StreamProcessing]:
        described = OperatorDescription(UID, "processstream", "f", parallelism)
        start = starting_state([described], 16, manifest, {})
        made = []
        for index in map(SubtaskIndex, range(parallelism)):
            restored: dict[str, RestoredRows] = {}
            given = start[UID, index]
            parts = [(copy, read_copy(self.store, copy)) for copy in given.broadcast]
            parts += [(share.state, read_share(self.store, share)) for share in given.dealt]
            for state, batches in parts:
                rows = restored.setdefault(state.name, RestoredRows(state.redistribution, []))
                rows.batches.extend(batches)
            operator = ProcessStream(self.make, "function")
            place = (UID, index, parallelism, Attempt(self.attempt))
            made.append(StreamProcessing(*place, operator, SCHEMA, self.store, restored))
        return made


class Holds(StreamFunction):
    """Holds all records back until the end; counts them; knows the same rules everywhere."""

    def open(self, states: SubtaskStates) -> None:
        self.held = states.list("held", "n long")
        self.counts = states.union_list("counts", "subtask int, n long")
        self.rules = states.broadcast("rules", "name string", "times struct<opened: int>")
        known = self.counts.get()
        mine = [row for row in known if row.subtask % states.parallelism == states.subtask]
        self.count = sum(row.n for row in mine)
        self.place = states.subtask
        self._keep()
        opened = self.rules.get(("opened",))
        self.rules.put(("opened",), ((1 if opened is None else opened.times.opened + 1,),))

    def process(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        self.held.extend((n,) for n in batch["n"].to_pylist())
        self.count += batch.num_rows
        self._keep()
        return []

    def finish(self) -> Iterator[pa.RecordBatch]:
        yield batch(*(row.n for row in self.held.get()))

    def _keep(self) -> None:
        self.counts.put([(self.place, self.count)])


def test_every_row_is_in_one_list_and_every_copy_the_same_at_any_parallelism(
    tmp_path: Path,
) -> None:
    job, given = Job(Holds, tmp_path, 2), 0
    for opened, parallelism in enumerate((2, 3, 1, 4), 1):
        if opened > 1:
            job.again(parallelism)
        for place, subtask in enumerate(job.subtasks):
            rows = 10 * (place + 1)
            assert plainly(subtask.process(batch(*range(given, given + rows)))) == []
            given += rows
        held = [[row.n for row in state.get()] for state in job.states("held")]
        assert Counter(n for rows in held for n in rows) == Counter(range(given))
        assert sum(job.states("count")) == given
        assert [s.get(("opened",)).times.opened for s in job.states("rules")] == (
            [opened] * parallelism
        )
    said = [n for subtask in job.subtasks for n in plainly(subtask.finish())]
    assert Counter(said) == Counter(range(given))


def test_a_limit_goes_on_counting_after_a_restore(tmp_path: Path) -> None:
    job = Job(partial(Limiting, 5), tmp_path)
    assert plainly(job.subtasks[0].process(batch(1, 2, 3))) == [1, 2, 3]
    job.again(1)
    assert plainly(job.subtasks[0].process(batch(4, 5, 6))) == [4, 5]
    assert plainly(job.subtasks[0].process(batch(7))) == []


def test_with_as_many_subtasks_each_keeps_its_list_in_its_order(tmp_path: Path) -> None:
    job = Job(Holds, tmp_path, 3)
    for place, subtask in enumerate(job.subtasks):
        list(subtask.process(batch(*range(place * 10, place * 10 + 5))))

    job.again(3)

    kept = [[row.n for row in state.get()] for state in job.states("held")]
    assert kept == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14], [20, 21, 22, 23, 24]]


def test_of_a_union_every_subtask_is_given_the_rows_of_all(tmp_path: Path) -> None:
    class Given(StreamFunction):
        def open(self, states: SubtaskStates) -> None:
            self.all = states.union_list("all", "n long")
            self.given = sorted(row.n for row in self.all.get())

        def process(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
            self.all.put((n,) for n in batch["n"].to_pylist())
            return []

    job = Job(Given, tmp_path, 2)
    for place, subtask in enumerate(job.subtasks):
        list(subtask.process(batch(place, place + 10)))
    job.again(3)

    assert job.states("given") == [[0, 1, 10, 11]] * 3


def test_a_list_of_many_files_and_batches_is_dealt_to_the_last_row(tmp_path: Path) -> None:
    job = Job(Holds, tmp_path, 2)
    list(job.subtasks[0].process(batch(*range(100_000))))
    list(job.subtasks[1].process(batch(*range(100_000, 150_001))))

    job.again(7)

    held = [[row.n for row in state.get()] for state in job.states("held")]
    assert {len(rows) for rows in held} == {21_428, 21_429}
    assert Counter(n for rows in held for n in rows) == Counter(range(150_001))


def test_after_the_end_lists_count_as_empty_and_copies_are_still_there(tmp_path: Path) -> None:
    job = Job(Holds, tmp_path, 2)
    for place, subtask in enumerate(job.subtasks):
        list(subtask.process(batch(place)))
    assert plainly(job.subtasks[0].finish()) == [0]

    job.again(2)

    assert [[row.n for row in state.get()] for state in job.states("held")] == [[], [1]]
    assert [state.get(("opened",)).times.opened for state in job.states("rules")] == [2, 2]


def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    job = Job(Holds, tmp_path)
    list(job.subtasks[0].process(batch(1)))

    def paths() -> dict[str, str]:
        (snapshot,) = job.checkpoint().snapshots
        return {state.name: state.file.path for state in snapshot.broadcast}

    first = paths()
    assert paths() == first
    list(job.subtasks[0].process(batch(2)))
    then = paths()
    assert then["rules"] == first["rules"]
    assert then["held"] != first["held"]


class Deaf(StreamFunction):
    """Declares nothing."""

    def process(self, batch: pa.RecordBatch) -> list[pa.RecordBatch]:
        return [batch]


class Forgets(Deaf):
    def open(self, states: SubtaskStates) -> None:
        for name in ("held", "counts", "rules", "never there"):
            states.delete(name)


def test_states_that_are_not_declared_any_more_are_kept_as_they_were_until_they_are_deleted(
    tmp_path: Path,
) -> None:
    job = Job(Holds, tmp_path, 2)
    for place, subtask in enumerate(job.subtasks):
        list(subtask.process(batch(place, place + 10)))
    job.again(3, Deaf)
    assert plainly(job.subtasks[0].process(batch(7))) == [7]
    job.again(2, Deaf)
    job.again(4, Holds)

    held = [row.n for state in job.states("held") for row in state.get()]
    assert sorted(held) == [0, 1, 10, 11]
    assert sum(job.states("count")) == 4

    job.again(2, Forgets)
    assert [snapshot.broadcast for snapshot in job.checkpoint().snapshots] == [(), ()]


@pytest.mark.parametrize(
    ("declare", "says"),
    [
        (lambda s: s.list("held", 7), "schema of state held is a StructType or a DDL string"),
        (lambda s: s.list("$held", "n long"), "choose a name without"),
        (lambda s: (s.list("a", "n long"), s.union_list("a", "n long")), "already been defined"),
        (lambda s: s.list("held", "n long").append(("x",)), "'x' is no whole number"),
        (lambda s: 1 / 0, "function function raised ZeroDivisionError"),
        (lambda s: s.union_list("held", "n long"), "is a list in the checkpoint, .* a union list"),
        (lambda s: s.broadcast("held", "k int", "n long"), "declares it as a broadcast state"),
        (lambda s: s.list("held", "n string"), "cannot become"),
    ],
)
def test_a_wrong_declaration_is_refused_in_one_sentence(
    tmp_path: Path, declare: Any, says: str
) -> None:
    class Declares(Deaf):
        def open(self, states: SubtaskStates) -> None:
            declare(states)

    job = Job(Holds, tmp_path)
    list(job.subtasks[0].process(batch(1)))
    with pytest.raises(StillframeError, match=says) as raised:
        job.again(1, Declares)
    if "checkpoint" in says:
        assert raised.type is StartRefused


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda f: None, "answered None: yield record batches"),
        (lambda f: batch(1), "answered a RecordBatch: yield record batches"),
        (lambda f: [7], "yielded a int"),
        (lambda f: f.states.list("late", "n long"), "declare all states in open"),
        (lambda f: 1 / 0, "raised ZeroDivisionError: division by zero \\("),
        (lambda f: [pa.record_batch({"m": [1]})], "declared n int64 but gave back m int64"),
    ],
)
def test_a_mistake_while_records_are_handled_names_the_function(
    tmp_path: Path, answer: Any, says: str
) -> None:
    class Mistaken(StreamFunction):
        def open(self, states: SubtaskStates) -> None:
            self.states = states

        def process(self, batch: pa.RecordBatch) -> Any:
            return answer(self)

    with pytest.raises((UserCodeError, DataError), match=says):
        list(Job(Mistaken, tmp_path).subtasks[0].process(batch(1)))


def test_what_makes_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserCodeError, match="made a dict: process wants what makes a StreamFunct"):
        Job(dict, tmp_path)


def test_a_subtask_that_ends_closes_its_function(tmp_path: Path) -> None:
    class Closes(Deaf):
        closed = 0

        def close(self) -> None:
            Closes.closed += 1

    job = Job(Closes, tmp_path, 2)
    for subtask in job.subtasks:
        subtask.close()
    assert Closes.closed == 2
    assert isinstance(job.checkpoint().snapshots[0], OperatorSnapshot)
