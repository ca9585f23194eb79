"""A job with one sink that things happen to, one after the other.

Rules of this file
------------------
1. What a sink prepared goes through a checkpoint's metadata and back, and `protocol/restore` deals
   it out; checkpoints complete and commits follow in the order that `protocol/checkpoints` keeps.
2. Each attempt gets copies of the sink, as each process does. Nothing is closed where a process
   dies: its objects live on as zombies, or are dropped if it died in the middle of a call.
3. A method without an underscore is a step. It takes numbers, of which 0 is the simplest, and
   passes over what makes no sense now, so that any part of a schedule is one too.
"""

from __future__ import annotations

import gc
import json
import pickle
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from stillframe.api.sinks import (
    Committer,
    CommitterContext,
    Prepared,
    Sink,
    SinkContext,
    SinkWriter,
    Staging,
)
from stillframe.coordinator.sinks import pending_committables, prepared_by_all
from stillframe.errors import Unavailable
from stillframe.ids import Attempt, CheckpointId, Epoch, Mark, OperatorUid, SubtaskIndex
from stillframe.protocol.commits import Commit
from stillframe.protocol.manifests import Manifest, PendingCommit
from stillframe.runtime.writing import parts_of
from stillframe.testing.conformance.checkpoints import UID, dealt, stored
from stillframe.testing.conformance.faults import Fault, Killed, Pause
from stillframe.testing.conformance.outside import Outside
from stillframe.testing.conformance.promises import Broken, Diary, keeping
from stillframe.testing.conformance.sink_neighbours import Neighbour
from stillframe.testing.conformance.sink_slots import (
    COMMITS,
    HANGS_SECONDS,
    SWEEPS,
    Running,
    Slot,
    await_commit,
)

_IN_FLIGHT_MAX = 3
_RETAINED = 3
_MEETS_SECONDS = 0.05
"""How long the successor of a committer that stands still is waited for: it may be in its way."""

OpenWriter = Callable[[Sink, SinkContext], SinkWriter]


class SinkJob:
    """`eased` names the adversities that are spared (`sinks.py` says which there are)."""

    def __init__(
        self,
        sink: Sink,
        outside: Outside,
        staging_of: Callable[[str], Staging],
        diary: Diary,
        eased: frozenset[str],
        open_writer: OpenWriter = lambda sink, context: sink.open_writer(context),
    ) -> None:
        self._sink = sink
        self._at_coordinator = sink.commits_at_coordinator
        self._outside = outside
        self._diary = diary
        self._eased = eased
        self._open_writer = open_writer
        # Not drawn from the seed: two runs against the same outside are two jobs.
        self._name = f"conformance {secrets.token_hex(6)}"
        self._staging_of = staging_of
        self._staging = staging_of(self._name)
        self._neighbours: list[Neighbour] = []
        self._incarnation = secrets.token_hex(6)
        self._incarnations = self._attempts = self._checkpoints = self._epochs = 0
        self._completed: list[Manifest] = []
        self._rows: dict[Mark, list[int]] = {}
        self._forgotten: set[str] = set()
        self._zombies: list[Running] = []
        self._all: list[Running] = []
        self._now: Running
        self._start(2)

    def check(self) -> None:
        self._outside.check()

    def close(self) -> None:
        """Give back what everybody holds, the dead too."""
        for running in self._all:
            running.abandon()

    def settle(self) -> None:
        """Nothing fails any more: all that was written comes out, once, and stays."""
        self.whole_checkpoint(0)
        self.check()
        self.restart(0, 0, 0, 0)
        self._commit_all()
        self.check()
        self._diary.tell("the job is over")
        self._sweep(self._now.number + 1, None, Fault(0))
        self.check()
        self._end(closes=True)
        for neighbour in self._neighbours:
            neighbour.commit()
        self.check()

    # --- attempts

    def restart(self, more: int, back: int, closes: int, dies_at: int) -> None:
        """Another attempt, of the newest checkpoint or one before it, with 1 subtask and `more`."""
        self._end(closes=bool(closes))
        older = self._completed[: len(self._completed) - back]
        if back and older and "older" not in self._eased and not self._has_forgotten(older[-1]):
            self._completed = older
            self._diary.add(f"somebody restores checkpoint {older[-1].checkpoint_id}")
        self._start(None if "rescale" in self._eased else 1 + more, self._line(dies_at))

    def begin_anew(self, more: int) -> None:
        """The log is lost: under its name it begins with the numbers of the first time."""
        self._end(closes=False)
        self._diary.add("the job's log is lost with them")
        self._incarnation = secrets.token_hex(6)
        self._incarnations += 1
        self._completed = []
        self._neighbours = [each for each in self._neighbours if each.context.job != self._name]
        if "begin anew" not in self._eased:
            self._attempts = self._checkpoints = 0
        self._start(1 + more)

    def _start(self, parallelism: int | None = None, dies_at: int = 0) -> None:
        """A new attempt; with as many subtasks as the one before, if none are given."""
        manifest = self._completed[-1] if self._completed else None
        parallelism = parallelism or max(1, len(self._now.slots))
        self._epochs = manifest.epoch + 1 if manifest else 0
        self._attempts += 1
        from_ = f"checkpoint {manifest.checkpoint_id}" if manifest else "nothing"
        self._diary.tell(
            f"attempt {self._attempts} begins with {parallelism} subtask(s), from {from_}"
        )
        driver = self._opened_committer()
        self._now = Running(Attempt(self._attempts), self._incarnation, driver, manifest)
        self._all.append(self._now)
        if manifest is not None and self._at_coordinator:
            self._now.to_commit.append(manifest)
            self._commit_at_coordinator(Fault(0))
        fault = Fault(dies_at)
        try:
            self._sweep(self._now.number, manifest, fault)
        except Killed:
            self._diary.add(f"its driver dies in sweep, at {fault.at}")
            self._start(parallelism)
            return
        for index, state in enumerate(dealt(parallelism, manifest)):
            self._open_slot(SubtaskIndex(index), state.commits, manifest)

    def _open_slot(
        self, subtask: SubtaskIndex, restored: tuple[PendingCommit, ...], manifest: Manifest | None
    ) -> None:
        slot = Slot(self._context(subtask), self._copy(), self._open_writer, restored)
        self._now.slots.append(slot)
        if manifest is not None and self._at_coordinator:
            slot.writing.on_committed(manifest.checkpoint_id)
        elif manifest is not None:
            commit = slot.writing.on_complete(manifest.checkpoint_id)
            slot.to_commit.append((manifest.epoch, commit))

    def _context(self, subtask: SubtaskIndex) -> SinkContext:
        return SinkContext(
            self._name, self._now.number, UID, subtask, self._incarnation, self._staging
        )

    def _copy(self) -> Sink:
        """What another process gets of the sink."""
        if "copies" in self._eased:
            return self._sink
        copied: Sink = pickle.loads(pickle.dumps(self._sink))
        return copied

    def _opened_committer(self, context: CommitterContext | None = None) -> Committer:
        # A handler may stay on the driver: there the sink is the one that was given.
        sink = self._sink if self._at_coordinator else self._copy()
        with keeping(COMMITS, "open_committer"):
            return sink.open_committer(context or CommitterContext(self._name, self._staging))

    def _sweep(self, older_than: int, manifest: Manifest | None, fault: Fault) -> None:
        if "sweep" in self._eased:
            return
        driver, keep = self._now.driver, pending_committables(UID, manifest)
        with keeping(SWEEPS, "sweep"):
            fault.during(lambda: driver.sweep(self._name, UID, Attempt(older_than), keep))

    def _end(self, closes: bool) -> None:
        if closes:
            self._diary.tell(f"attempt {self._now.number} is closed")
            self._now.close()
        else:
            self._diary.tell(f"the processes of attempt {self._now.number} are given up")
            self._zombies = [*self._zombies[-1:], self._now]

    def _die(self, slot: Slot | None, fault: Fault) -> None:
        """One process is dead, and so are its objects; those of the others live on."""
        self._diary.add(f"and dies at {fault.at}")
        parallelism = len(self._now.slots)
        if slot is not None:
            self._now.slots.remove(slot)
        self._end(closes=False)
        gc.collect(1)  # what the dead hold, such as a connection, goes with them
        self._start(parallelism)

    def _line(self, dies_at: int) -> int:
        return 0 if "death in a call" in self._eased else dies_at

    # --- checkpoints

    def write(self, subtask: int, more: int) -> None:
        """A row and `more`; an empty batch, if there would be more than three."""
        slot = self._now.slots[subtask % len(self._now.slots)]
        where = f"written by {slot} in attempt {self._now.number}"
        batch, rows = self._outside.batch((1 + more) % 4, where)
        said = f"row(s) {', '.join(map(str, rows))}" if rows else "an empty batch"
        self._diary.tell(f"{slot} writes {said}")
        slot.write(batch, rows)

    def trigger(self) -> None:
        now = self._now
        if len(now.in_flight) < _IN_FLIGHT_MAX:
            self._checkpoints += 1
            now.in_flight.append(CheckpointId(self._checkpoints))
            self._diary.tell(f"checkpoint {self._checkpoints} begins: every writer rotates")
            for slot in now.slots:
                slot.rotate(CheckpointId(self._checkpoints))

    def prepare(self, subtask: int, which: int, dies_at: int) -> None:
        """The background part of a rotation: perhaps not the oldest, perhaps not to its end."""
        slots = [slot for slot in self._now.slots if slot.unprepared]
        if not slots:
            return
        slot = slots[subtask % len(slots)]
        waiting = sorted(slot.unprepared)
        which = 0 if "out of order" in self._eased else which
        checkpoint_id = waiting[which % len(waiting)]
        self._diary.tell(f"{slot} prepares for checkpoint {checkpoint_id}")
        self._rows[Mark(slot.context.writer, checkpoint_id)] = slot.rows[checkpoint_id]
        fault = Fault(self._line(dies_at))
        try:
            slot.prepare(checkpoint_id, fault)
        except Killed:
            self._die(slot, fault)

    def complete(self, which: int) -> None:
        now = self._now
        ready = [each for each in now.in_flight if all(each in s.snapshots for s in now.slots)]
        if ready and now.is_settled:
            self._complete(ready[which % len(ready)])

    def abort(self, which: int) -> None:
        """What is prepared for it comes out with the next one."""
        if self._now.in_flight:
            checkpoint_id = self._now.in_flight.pop(which % len(self._now.in_flight))
            self._diary.tell(f"checkpoint {checkpoint_id} is aborted")

    def whole_checkpoint(self, leaves_commits: int) -> None:
        self._commit_all()
        self.trigger()
        while any(slot.unprepared for slot in self._now.slots):
            self.prepare(0, 0, 0)
        self.complete(-1)
        if not leaves_commits:
            self._commit_all()

    def _complete(self, checkpoint_id: CheckpointId) -> None:
        now, epoch = self._now, Epoch(self._epochs)
        self._epochs += 1
        self._diary.tell(f"checkpoint {checkpoint_id} is complete, as epoch {epoch}")
        now.in_flight = [each for each in now.in_flight if each > checkpoint_id]
        parts = [slot.snapshots.pop(checkpoint_id) for slot in now.slots]
        manifest = stored(checkpoint_id, parts, job=self._name, attempt=now.number, epoch=epoch)
        self._completed = [*self._completed, manifest][-_RETAINED:]
        if self._sink.is_whole:
            self._outside.need_not_show()
        pending = set(_marks(manifest))
        for slot in now.slots:
            self._allow(slot, checkpoint_id, pending)
            if self._at_coordinator:
                slot.writing.on_committed(checkpoint_id)
            else:
                slot.to_commit.append((epoch, slot.writing.on_complete(checkpoint_id)))
        if self._at_coordinator:
            now.to_commit.append(manifest)
        if not now.has_swept:
            now.has_swept = True
            self._sweep(now.number, manifest, Fault(0))

    def _allow(self, slot: Slot, checkpoint_id: CheckpointId, pending: set[Mark]) -> None:
        """What the slot has rotated until this barrier may be seen from now on."""
        for each in [each for each in slot.rows if each <= checkpoint_id]:
            rows = slot.rows.pop(each)
            if each == checkpoint_id or not self._sink.is_whole:
                self._outside.may_show(rows)
                if Mark(slot.context.writer, each) not in pending:  # nobody will commit it
                    self._outside.must_show(rows)

    # --- commits

    def commit(self, subtask: int, dies_at: int) -> None:
        """In one subtask or at the coordinator; one that dies in it has something to commit."""
        line = self._line(dies_at)
        if line:
            self._see_to_work()
        fault, slot = Fault(line), None
        try:
            if self._at_coordinator:
                self._commit_at_coordinator(fault)
            elif slots := self._committing():
                slot = slots[subtask % len(slots)]
                self._commit_in(slot, fault)
        except Killed:
            self._die(slot, fault)

    def commit_again(self) -> None:
        """By a committer that knows nothing, as after a crash behind the commit."""
        if self._completed:
            manifest, epoch = self._completed[-1], self._completed[-1].epoch
            self._diary.tell(f"somebody else commits checkpoint {manifest.checkpoint_id}")
            parts = parts_of(_pending(manifest))
            if self._at_coordinator:
                parts = [prepared_by_all(UID, manifest, self._incarnation)]
            committer = self._opened_committer()
            with keeping(COMMITS, "commit"):
                self._commit_parts(committer, epoch, parts)
                committer.close()
            self._require(_marks(manifest))

    def race(self, subtask: int, line: int) -> None:
        """A commit stands still at one of its lines while a new attempt commits the same."""
        self._see_to_work()
        old, pause = self._now, Pause(0 if "race" in self._eased else max(1, line))
        if self._at_coordinator:
            first = self._begin_at_coordinator(old, pause)
        elif slots := self._committing():
            first = self._begin_in(old, slots[subtask % len(slots)], pause)
        else:
            return
        pause.stands.wait(HANGS_SECONDS)
        if pause.at is not None:
            self._diary.add(f"it stands still at {pause.at}")
        try:
            self._end(closes=False)
            with ThreadPoolExecutor(1) as other:
                second = other.submit(self._succeed, pause, first)
                with suppress(TimeoutError):
                    second.result(_MEETS_SECONDS)
                pause.go_on()
                second.result()
        finally:
            pause.go_on()
            with suppress(Exception):  # it was given up, and may find that out
                first.result(HANGS_SECONDS)
        self._diary.add(f"attempt {old.number} goes on")

    def _succeed(self, pause: Pause, first: Future[None]) -> None:
        """The next attempt, to which the other system may say that somebody is in its way."""
        try:
            self._start()
            self._commit_all()
        except Broken as broken:
            if not isinstance(broken.__cause__, Unavailable):
                raise
            pause.go_on()
            with suppress(Exception):
                first.result(HANGS_SECONDS)
            if not self._now.slots:
                self._start()
            self._commit_all()

    def _see_to_work(self) -> None:
        """That there is something to commit."""
        if not self._now.to_commit and not self._committing():
            for subtask in range(len(self._now.slots)):
                self.write(subtask, 0)
            self.whole_checkpoint(1)

    def _committing(self) -> list[Slot]:
        """Those with something to commit; if there are none, those with nothing but the order."""
        ordered = [slot for slot in self._now.slots if slot.to_commit]
        return [slot for slot in ordered if slot.to_commit[0][1].prepared]

    def _commit_all(self) -> None:
        self._commit_at_coordinator(Fault(0))
        for slot in self._now.slots:
            while slot.to_commit:
                self._commit_in(slot, Fault(0))

    def _commit_in(self, slot: Slot, fault: Fault, running: Running | None = None) -> None:
        await_commit(self._begin_in(running or self._now, slot, fault))
        _, commit = slot.to_commit.popleft()
        slot.writing.on_committed(commit.checkpoint_id)
        self._require([part.mark for part in parts_of(commit.prepared)])
        self._forgotten |= {json.dumps(each) for each in commit.settled}

    def _begin_in(self, running: Running, slot: Slot, fault: Fault) -> Future[None]:
        epoch, commit = slot.to_commit[0]
        if "forget" in self._eased:
            commit = replace(commit, settled=())
        if commit.prepared:
            self._tell_commit(str(slot), running, commit.checkpoint_id)
        if "epochs" in self._eased:
            return running.begin_commit(lambda: self._commit_with_other_epochs(slot, commit), fault)
        return running.begin_commit(lambda: slot.writing.commit(epoch, commit), fault)

    def _commit_with_other_epochs(self, slot: Slot, commit: Commit) -> None:
        committer, nothing = slot.writing.committer, Epoch(0)
        self._commit_parts(committer, nothing, parts_of(commit.prepared))
        if commit.settled:
            committer.forget(commit.settled)

    def _commit_parts(self, committer: Committer, epoch: Epoch, parts: list[Prepared]) -> None:
        if "epochs" not in self._eased:
            committer.commit(epoch, parts)
            return
        for part in parts:  # as if epochs were what marks are
            never_twice = self._incarnations * 1_000_000 + part.mark.checkpoint_id
            committer.commit(Epoch(never_twice), [part])

    def _commit_at_coordinator(self, fault: Fault, running: Running | None = None) -> None:
        running = running or self._now
        if running.to_commit:
            await_commit(self._begin_at_coordinator(running, fault))
            self._require(_marks(running.to_commit.popleft()))

    def _begin_at_coordinator(self, running: Running, fault: Fault) -> Future[None]:
        manifest = running.to_commit[0]
        self._tell_commit("the coordinator", running, manifest.checkpoint_id)
        part = prepared_by_all(UID, manifest, running.incarnation)
        return running.begin_commit(
            lambda: self._commit_parts(running.driver, manifest.epoch, [part]), fault
        )

    def _tell_commit(self, who: str, running: Running, checkpoint_id: CheckpointId) -> None:
        of = "" if running is self._now else f" of attempt {running.number}, which is over,"
        self._diary.tell(f"{who}{of} commits checkpoint {checkpoint_id}")

    def _require(self, marks: list[Mark]) -> None:
        for mark in marks:
            self._outside.must_show(self._rows.get(mark, ()))

    def _has_forgotten(self, manifest: Manifest) -> bool:
        held = {json.dumps(each) for each in pending_committables(UID, manifest)}
        forgets = type(self._now.driver).forget is not Committer.forget
        return forgets and not held.isdisjoint(self._forgotten)

    # --- others

    def neighbour(self, is_of_this_job: int) -> None:
        """Another sink has prepared something in the same place; it is committed at the end."""
        if "neighbours" in self._eased or self._sink.is_whole:
            return
        name = f"beside {secrets.token_hex(6)}"
        if is_of_this_job:
            context = replace(self._context(SubtaskIndex(0)), uid=OperatorUid(name))
        else:
            staging = self._staging_of(name)
            context = SinkContext(name, Attempt(1), UID, SubtaskIndex(0), name, staging)
        sink, open_committer = self._copy(), self._opened_committer
        writer = self._open_writer(sink, context)
        self._neighbours.append(
            Neighbour(sink, writer, open_committer, context, self._outside, self._diary)
        )

    # --- the past

    def zombie_writes(self, subtask: int, later: int, closes: int) -> None:
        """A writer of an older attempt goes on, for the newest checkpoint id or the next; no
        writer sees a barrier twice."""
        zombie = self._zombies[-1] if self._zombies else None
        if zombie is None or not zombie.slots or "zombies" in self._eased:
            return
        slot = zombie.slots[subtask % len(zombie.slots)]
        where = f"written by attempt {zombie.number} when it was over"
        batch, rows = self._outside.batch(1, where)
        its_id = CheckpointId(max(slot.rotated_last + 1, self._checkpoints + later))
        slot.rotated_last = its_id
        self._diary.tell(
            f"{slot} of attempt {zombie.number}, which is over, writes row {rows[0]} and prepares"
            f" for checkpoint {its_id}"
        )
        with suppress(Exception):  # the outside may have shut it out
            slot.writer.write(batch)
            background = [*slot.unprepared.values(), slot.writer.rotate(its_id)]
            slot.unprepared.clear()
            for prepare in background:
                prepare()
            if closes:
                self._diary.add("and is closed")
                slot.writer.close()

    def zombie_commits(self) -> None:
        """An older attempt makes the commits that it was asked for."""
        if not self._zombies or "zombies" in self._eased:
            return
        zombie = self._zombies[-1]
        with suppress(Broken):  # the outside may have shut it out
            self._commit_at_coordinator(Fault(0), zombie)
            for slot in zombie.slots:
                asked = [json.dumps(each.committable) for each in _asked(slot)]
                if asked and self._forgotten.isdisjoint(asked):
                    self._commit_in(slot, Fault(0), zombie)


def _asked(slot: Slot) -> tuple[PendingCommit, ...]:
    return slot.to_commit[0][1].prepared if slot.to_commit else ()


def _pending(manifest: Manifest) -> list[PendingCommit]:
    return [each for snapshot in manifest.snapshots_of(UID) for each in snapshot.commits]


def _marks(manifest: Manifest) -> list[Mark]:
    return [part.mark for part in parts_of(_pending(manifest))]
