"""What must hold, whatever happens: checked as it happens, and at the end."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa

from stillframe.api.sources import Split
from stillframe.coordinator.history import (
    AttemptStarted,
    CheckpointCompleted,
    CheckpointFailed,
    Event,
)
from stillframe.ids import NO_CHECKPOINT, Attempt, CheckpointId, Mark, OperatorUid, Writer
from stillframe.json_values import JsonObject, JsonValue
from stillframe.protocol.joblog import JobRecord, decode_record
from stillframe.protocol.manifests import (
    ChannelState,
    DiskState,
    FileHandle,
    Manifest,
    PendingCommit,
    decode_manifest,
)
from stillframe.runtime.task import Subtask
from stillframe.state.channel_log import read_run
from stillframe.state.disk_reading import tables_in
from stillframe.state.duplicates import EXPIRES
from stillframe.state.reached import BEGINNING_US
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.local import TEMPORARY_PREFIX
from stillframe.storage.paths import (
    LOG_DIRECTORY,
    PREPARED_DIRECTORY,
    SAVEPOINT_METADATA,
    log_path,
    metadata_path,
    sequence_of,
)
from stillframe.storage.store import Store
from stillframe.testing.simulation.jobs import SOURCE, Branch, SimulatedJob, counts_of
from stillframe.testing.simulation.marked import MarkedOutside
from stillframe.testing.simulation.outside import (
    NO_RECORDS,
    OnVisible,
    Outside,
    Records,
    Row,
    place_of,
    split_index,
)
from stillframe.testing.simulation.past import Past, Shown
from stillframe.testing.simulation.shapes import ids_of, is_on_edge, told_by
from stillframe.testing.simulation.storage import Disk
from stillframe.testing.simulation.timed import Place, Results, Timed, is_most, seconds
from stillframe.testing.simulation.timed_pairs import Enriched

_DECODED_MAX = 32
_NO_TIMEOUT_SECONDS = 600
"""Nothing here takes so long: a checkpoint that does would never have ended."""

Counts = dict[int, tuple[int, int]]
"""Per key: how many records, and the sum of their ids."""
Times = dict[OperatorUid, int | None]
"""How far event time has come, in microseconds; None: nobody knows."""

Held = dict[str, Counter[tuple[object, ...]]]
"""What is in a checkpoint or savepoint, by operator or edge."""

# The same bytes are looked at many times.
_decode_record = lru_cache(_DECODED_MAX)(decode_record)
_decode_manifest = lru_cache(_DECODED_MAX)(decode_manifest)


class Violation(AssertionError):
    """A promise was broken; the message begins with the name of the checker that saw it."""


def _require(holds: bool, checker: str, what: str) -> None:
    if not holds:
        raise Violation(f"{checker}: {what}")


class Checkers:
    """All checkers of one run."""

    def __init__(
        self,
        job: SimulatedJob,
        disk: Disk,
        may_rescale: bool,
        new_directory: Callable[[], Path],
    ) -> None:
        self._may_rescale = may_rescale
        self._new_directory = new_directory
        self._job = job
        self._disk = disk
        self._mode = job.config.checkpoint_mode
        self._is_exact = job.is_exact
        self._never_twice = self._mode != "at-least-once"
        self._has_said_last_word = False
        """Whether the job has stopped with a savepoint and was not started again."""
        self._early: dict[str, Counts] = {}
        self._times: dict[Subtask, Times] = {}
        self._restored_times: dict[Attempt, Times] = {}
        self.completed: list[CheckpointId] = []
        self.restored: list[CheckpointId] = []
        self._announced: set[tuple[Attempt, CheckpointId]] = set()
        self._last_place: dict[tuple[str, int, int, int], int] = {}
        self._ordered = {branch.uid for branch in job.branches if self._keeps_order(branch)}
        self._seen: dict[str, Counter[Row]] = defaultdict(Counter)
        self._shown: dict[str, list[Row]] = defaultdict(list)
        self._last_said: dict[str, dict[Place, tuple[int, ...]]] = defaultdict(dict)
        self._let_go: dict[int, int] = {}
        """Up to where each split may have been forgotten, because a source was told so."""
        job.source.hearing.on_complete = self._on_told
        self._past = Past()
        for branch in job.branches:
            outside = job.outside[branch.uid]
            outside.on_visible = self._watcher(branch)

    def _keeps_order(self, branch: Branch) -> bool:
        """A split may change its reader with the number of slots, or when others have ended. One
        transaction for all subtasks has their rows in any order."""
        is_together = branch.at_coordinator and not isinstance(
            self._job.outside[branch.uid], Outside
        )
        return (
            self._never_twice
            and not self._may_rescale
            and self._job.source.appear_at_seconds is None
            and branch.passes_records
            and branch.has_one_way
            and not is_together
        )

    # --- as it happens ---

    def on_event(self, event: Event) -> None:
        match event:
            case CheckpointCompleted(checkpoint_id):
                _require(
                    not self.completed or checkpoint_id > self.completed[-1],
                    "ids",
                    f"checkpoint {checkpoint_id} completed after {self.completed[-1:]}",
                )
                self.completed.append(checkpoint_id)
                self._check_cut(checkpoint_id)
            case CheckpointFailed(checkpoint_id, reason) if "it took longer than" in reason:
                is_long = self._job.config.checkpoint_timeout_seconds >= _NO_TIMEOUT_SECONDS
                _require(not is_long, "liveness", f"checkpoint {checkpoint_id} hangs: {reason}")
            case AttemptStarted(attempt, checkpoint_id):
                self._note_went_back(checkpoint_id)
                self._restored_times.pop(attempt, None)  # of an attempt that a lost log knew
                if checkpoint_id is None:
                    return
                self._has_said_last_word = False
                self.restored.append(checkpoint_id)
                self._note_restored(attempt, checkpoint_id)

    def on_announced(self, attempt: Attempt, checkpoint_id: CheckpointId) -> None:
        """Slots are told of a checkpoint's completion once, and only if the log says so."""
        record = self._record()
        is_complete = record is not None and record.checkpoint(checkpoint_id) is not None
        _require(is_complete, "announced", f"checkpoint {checkpoint_id}, which is not complete")
        is_new = (attempt, checkpoint_id) not in self._announced
        _require(is_new, "announced", f"checkpoint {checkpoint_id} for the second time")
        self._announced.add((attempt, checkpoint_id))

    def _on_told(self, checkpoint_id: CheckpointId, splits: Sequence[Split]) -> None:
        """A reader is told of a completed checkpoint, and forgets what lies before its splits."""
        what = f"a source was told of checkpoint {checkpoint_id}, which is not complete"
        # A driver may have died between the entry in the log and saying so.
        is_complete = checkpoint_id in self.completed or checkpoint_id in self.restored
        _require(is_complete, "told", what)
        if self._past.is_left(checkpoint_id):
            return  # by a slot of a former life
        for split in splits:
            index = split_index(split.id)
            self._let_go[index] = max(_next(split.position), self._let_go.get(index, 0))

    def _check_not_let_go(self, manifest: Manifest) -> None:
        """Nothing is asked for again that a source was told it may forget."""
        positions = self._positions(manifest)
        for split, let_go in self._let_go.items():
            at = positions.get(split, 0)
            what = f"split {split} goes on from {at} and was let go up to {let_go}"
            _require(at >= let_go, "let go", what)

    def on_closed(
        self, subtasks: Iterable[Subtask], closed: Container[CheckpointId] | None
    ) -> None:
        """Of a checkpoint that is over nothing is kept; of any, once the job is (None)."""
        for subtask in subtasks:
            self._check_time(subtask)
            for checkpoint_id, what in subtask.holdings():
                is_over = closed is None or checkpoint_id is None or checkpoint_id in closed
                _require(not is_over, "leftovers", f"{subtask.name} has {what} for {checkpoint_id}")

    def on_started(self, attempt: Attempt, subtasks: Iterable[Subtask]) -> None:
        """No operator is behind what its checkpoint says of all its subtasks."""
        restored = self._restored_times.get(attempt, {})
        for subtask in subtasks:
            for uid, time_us in subtask.times_us().items():
                self._check_not_behind(f"{uid}, restored,", time_us, restored.get(uid))

    def _check_time(self, subtask: Subtask) -> None:
        """Event time never goes back in an attempt, and nothing is late, as nothing can be.

        At least once records are replayed that time has passed: those have been counted.
        """
        before, now = self._times.get(subtask, {}), subtask.times_us()
        for uid, time_us in now.items():
            self._check_not_behind(f"{uid} of {subtask.ref}", time_us, before.get(uid))
        self._times[subtask] = now
        late = subtask.records_late if self._never_twice else 0
        _require(not late, "time", f"{late} records are late at {subtask.name}")

    def _check_not_behind(self, who: str, time_us: int | None, before_us: int | None) -> None:
        is_behind = before_us is not None and (time_us is None or time_us < before_us)
        _require(not is_behind, "time", f"{who} went from {before_us} to {time_us}")

    def _watcher(self, branch: Branch) -> OnVisible:
        uid = branch.uid

        def watch(writer: str, rows: list[Row], prepared_for: CheckpointId | None) -> None:
            if prepared_for is not None:
                shown = Shown(uid, writer, prepared_for, rows)
                if not self._past.takes(shown):
                    return
            what = f"{uid} shows {rows[:3]} after the savepoint with which the job stopped"
            _require(not self._has_said_last_word, "last", what)
            self._show(branch, writer, rows)
            self._check_nothing_early(branch, rows)

        return watch

    def _show(self, branch: Branch, writer: str, rows: list[Row]) -> None:
        uid = branch.uid
        self._shown[uid] += rows
        for row in rows:
            self._seen[uid][row] += 1
            if not self._never_twice:
                continue
            _require(self._seen[uid][row] == 1, "duplicates", f"{uid} shows {row} twice")
            if not branch.passes_records:
                self._check_growth(branch, row)
        if uid in self._ordered:
            self._check_order(writer, rows)

    # --- a person has the job go back ---

    def go_back_to(self, checkpoint_id: CheckpointId) -> None:
        """Somebody wants the job to go on from here; 0: from the beginning. The next attempt tells
        whether it does, and until then nobody can say what belongs to it."""
        newest = self.completed[-1] if self.completed else NO_CHECKPOINT
        self._past.go_back_to(checkpoint_id, newest)

    def begin_elsewhere(self, taken_by: CheckpointId) -> None:
        """Another job goes on from a savepoint of this one; 0: from nothing, in its place.

        It has numbers of its own, and of what is visible it goes on after what came before.
        """
        self._past.go_back_to(taken_by, None)
        self._past.went_back()
        self._count_again()
        self.completed.clear()
        self._announced.clear()
        self._restored_times.clear()
        self._let_go.clear()
        self._has_said_last_word = False

    def _note_went_back(self, restored: CheckpointId | None) -> None:
        wanted = self._past.wanted
        if wanted is None:
            return
        if wanted == (restored or NO_CHECKPOINT):
            self._past.went_back()
            self._has_said_last_word = False
            self._let_go.clear()  # whoever goes back knows that the source still has it
        else:
            self._past.went_on()
        self._count_again()

    def _count_again(self) -> None:
        for seen in (self._seen, self._shown, self._last_said, self._last_place):
            seen.clear()
        branches = {branch.uid: branch for branch in self._job.branches}
        for shown in self._past.shown:
            self._show(branches[shown.uid], shown.writer, shown.rows)

    def _check_growth(self, branch: Branch, row: Row) -> None:
        """What is said again is more than before; what is said once is not said again."""
        timed, said = branch.timed, self._last_said[branch.uid]
        places = 1 if timed is None else timed.places
        place, values = row[:places], row[places:]
        if place in said:
            what = f"{branch.uid}: {place} from {said[place]} to {values}"
            _require(timed is None or not timed.says_once, "duplicates", what)
            _require(values[0] > said[place][0], "growth", what)
        said[place] = values

    def _check_order(self, writer: str, rows: list[Row]) -> None:
        """What took the same way from the same split to the same writer comes out in order."""
        for number, key in rows:
            split, place = place_of(number)
            way = (writer, split, key, number % 2)
            before = self._last_place.get(way, -1)
            what = f"{writer} shows record {place} of split {split} after {before}"
            _require(place > before, "order", what)
            self._last_place[way] = place

    def _check_nothing_early(self, branch: Branch, rows: list[Row]) -> None:
        """Nothing becomes visible before the checkpoint that holds it is complete."""
        uid = branch.uid
        record = self._record()
        newest = record.newest if record else None
        _require(newest is not None, "early", f"{uid} shows {rows[:3]} before any checkpoint")
        assert newest is not None
        if branch.passes_records and self._never_twice:
            stops = self._positions(self._manifest(newest.checkpoint_id, newest.attempt))
            places = ((row, *place_of(row[0])) for row in rows)
            early = [row for row, split, place in places if place >= stops.get(split, 0)]
            _require(not early, "early", f"{uid} shows {early[:3]} before it is complete")

    def _check_cut(self, checkpoint_id: CheckpointId) -> None:
        """The state of every operator is that of the records before the sources' positions."""
        record = self._record()
        assert record is not None
        completed = record.checkpoint(checkpoint_id)
        _require(completed is not None, "log", f"checkpoint {checkpoint_id} is not in the log")
        assert completed is not None
        manifest = self._manifest(checkpoint_id, completed.attempt)
        before = self._job.records_before(self._positions(manifest))
        for branch in self._job.branches:
            if branch.counts:
                expected = counts_of(branch.kept(before))
                found = self._counted(manifest, branch)
                _require(
                    self._fits(found, expected),
                    "cut",
                    f"checkpoint {checkpoint_id}, {branch.uid}: {_difference(found, expected)}",
                )
            if branch.shape == "broadcast" and self._is_exact:
                self._check_told(manifest, branch, before)
            self._check_prepared(manifest, branch)

    def _check_prepared(self, manifest: Manifest, branch: Branch) -> None:
        """What a checkpoint leaves to be committed is there to be committed, or was."""
        for part in manifest.snapshots_of(OperatorUid(f"write-{branch.uid}")):
            for kept in part.commits:
                _require(
                    self._is_prepared(branch, kept) or self._is_committed(manifest, branch, kept),
                    "transactions",
                    f"checkpoint {manifest.checkpoint_id} holds {kept}, which is gone",
                )

    def _is_prepared(self, branch: Branch, kept: PendingCommit) -> bool:
        outside = self._job.outside[branch.uid]
        if isinstance(outside, Outside):
            return str(kept.committable["transaction"]) in outside.prepared
        parts = cast(list[JsonObject], kept.committable["parts"])
        return all(self._is_staged(str(part["name"])) for part in parts)

    def _is_staged(self, name: str) -> bool:
        return self._disk.read(f"{PREPARED_DIRECTORY}/{name}") is not None

    def _is_committed(self, manifest: Manifest, branch: Branch, kept: PendingCommit) -> bool:
        outside = self._job.outside[branch.uid]
        if isinstance(outside, Outside):
            return str(kept.committable["transaction"]) in outside.committed
        assert kept.writer is not None
        mark = Mark(kept.writer, kept.checkpoint_id)
        if branch.at_coordinator:
            mark = Mark(replace(kept.writer, subtask=None), manifest.checkpoint_id)
        return outside.is_reported(mark) or self._is_staged(str(kept.committable["receipt"]))

    def _note_restored(self, attempt: Attempt, restored: CheckpointId) -> None:
        record = self._record()
        assert record is not None
        kept = record.checkpoint(restored)
        if kept is None:
            return
        manifest = self._manifest(restored, kept.attempt)
        self._restored_times[attempt] = _least_times(manifest)
        self._check_not_let_go(manifest)
        if self._mode == "at-least-once":
            self._note_early(manifest)

    def _note_early(self, manifest: Manifest) -> None:
        """What the restored checkpoint has counted and the sources will read again."""
        if self._is_damaged(manifest):
            return  # as the slots will see
        before = self._job.records_before(self._positions(manifest))
        self._early = {
            branch.uid: _without(self._counted(manifest, branch), counts_of(branch.kept(before)))
            for branch in self._job.branches
            if branch.counts
        }

    def _fits(self, found: Counts, expected: Counts) -> bool:
        if self._is_exact:
            return found == expected
        if self._mode == "at-most-once":
            return _is_at_least(expected, found)
        return _is_at_least(found, expected)

    def _counted(self, manifest: Manifest, branch: Branch) -> Counts:
        """What has been counted, is held back, or is under way to be counted."""
        records = [self._under_way(manifest, branch)]
        for batch in self._rows(manifest, OperatorUid(f"hold-{branch.uid}")):
            records.append(np.stack([column.to_numpy() for column in batch.columns], axis=1))
        counted = {
            key: (count, total)
            for batch in self._rows(manifest, OperatorUid(f"count-{branch.uid}"))
            for key, count, total in zip(*(c.to_pylist() for c in batch.columns), strict=True)
        }
        return _together(counted, counts_of(np.concatenate(records)))

    def _under_way(self, manifest: Manifest, branch: Branch) -> Records:
        """The records of a branch that barriers overtook, except those it drops."""
        parts = [NO_RECORDS]
        for state in manifest.channels:
            if state.edge.split(">")[1].partition("-")[2].split("/")[0].split("#")[0] == branch.uid:
                for batch in self._overtaken(state):
                    parts.append(
                        np.stack([ids_of(batch), batch.column("key").to_numpy()], axis=1)[
                            is_on_edge(state.edge, ids_of(batch))
                        ]
                    )
        return branch.kept(np.concatenate(parts))

    def _check_told(self, manifest: Manifest, branch: Branch, before: Records) -> None:
        """Every listener has been told everything, or will be by what is under way to it."""
        uid = OperatorUid(f"listen-{branch.uid}")
        expected = told_by(branch.entering(before)[:, 0])
        for part in manifest.snapshots_of(uid):
            told = [
                told
                for copy in part.broadcast
                for batch in read_keyed_snapshot(self._file(copy.file), copy.key_groups, range(1))
                for told in batch.column("id").to_pylist()
            ]
            for state in manifest.channels:
                before_it = (f"drop-{branch.uid}", f"control-{branch.uid}")
                is_shared = state.edge.split(">")[1] in before_it
                if is_shared or (state.edge.endswith(f"{uid}/1") and state.target == part.subtask):
                    for batch in self._overtaken(state):
                        ids = ids_of(batch)
                        told += told_by(ids[ids % branch.divisor != 0] if branch.divisor else ids)
            _require(
                sorted(told) == expected,
                "told",
                f"checkpoint {manifest.checkpoint_id}: listener {part.subtask} of {branch.uid}"
                f" knows {len(told)} of {len(expected)} records",
            )

    # --- at the end ---

    def check_end(self) -> None:
        if self._mode == "at-most-once":
            again = [number for number, times in self._job.emitted.items() if times > 1]
            _require(not again, "emitted", f"records {again[:3]} left the source more than once")
        records = self._job.all_records()
        for branch in self._job.branches:
            kept = branch.kept(records)
            visible = self._shown[branch.uid]
            if branch.timed is not None:
                self._check_timed(branch, branch.timed, kept, visible)
            elif branch.counts:
                last = {row[0]: (row[1], row[2]) for row in visible}
                exact = counts_of(kept)
                _require(self._fits(last, exact), "output", _difference(last, exact))
                self._check_surplus(branch, last, exact)
            else:
                lost = Counter(map(tuple, kept.tolist())) - Counter(visible)
                may_lose = self._mode == "at-most-once" and bool(self.restored)
                _require(not lost or may_lose, "output", f"{branch.uid} lost {list(lost)[:3]}")
                more = Counter(visible) - Counter(map(tuple, kept.tolist()))
                _require(
                    not more or not self._never_twice, "output", f"{branch.uid} has too many rows"
                )
            outside = self._job.outside[branch.uid]
            left = list(outside.prepared) if isinstance(outside, Outside) else []
            _require(not left, "transactions", f"{branch.uid} leaves {left[:3]} open")
        for system in self._job.marked:
            self._check_marks(system)

    def _check_marks(self, system: MarkedOutside) -> None:
        written = [each.mark for each in system.written]
        _require(system.noted == written, "marks", "there are rows without their mark")
        newest: dict[Writer, CheckpointId] = {}
        for mark in written:
            before = newest.get(mark.writer, NO_CHECKPOINT)
            _require(mark.checkpoint_id > before, "marks", f"{mark} comes after {before}")
            newest[mark.writer] = mark.checkpoint_id

    def _check_timed(self, branch: Branch, timed: Timed, kept: Records, visible: list[Row]) -> None:
        """Whatever went wrong, what is made by event time is what it would have been without.

        At least once: of each place at least that, and of no other. At most once: what can come
        of fewer records, as each kind says for itself.
        """
        expected = timed.expected(kept)
        found: Results = {}
        for row in visible:
            place, said = row[: timed.places], row[timed.places :]
            found[place] = max(said, found.get(place, said))
        if self._mode == "at-least-once":
            holds = found.keys() == expected.keys() and all(
                is_most(said, found[place]) for place, said in expected.items()
            )
        elif self._mode == "at-most-once" and self.restored:
            holds = timed.is_of_fewer(found, expected)
        else:
            holds = found == expected
        wrong = [
            (place, found.get(place), expected.get(place))
            for place in found.keys() | expected.keys()
            if found.get(place) != expected.get(place)
        ]
        what = f"{branch.uid}: {len(wrong)} wrong, (place, found, expected) {sorted(wrong)[:2]}"
        _require(holds, timed.name, what)
        if isinstance(timed, Enriched) and not (self._mode == "at-most-once" and self.restored):
            self._check_newest(branch.uid, timed.newest(kept))

    def _check_newest(self, uid: str, expected: dict[int, int]) -> None:
        """The last checkpoint has the newest record of each key."""
        record = self._record()
        newest = record.newest if record else None
        assert newest is not None
        manifest = self._manifest(newest.checkpoint_id, newest.attempt)
        if self._is_damaged(manifest):
            return  # and nobody has read it since
        found = {
            key: moment
            for batch in self._rows(manifest, OperatorUid(f"enrich-{uid}"))
            for key, moment in zip(
                batch.column("right_key").to_pylist(),
                seconds(batch.column("right_at")).to_pylist(),
                strict=True,
            )
        }
        _require(found == expected, "enriched", f"{uid} knows {found} for {expected}")

    def _check_surplus(self, branch: Branch, last: Counts, exact: Counts) -> None:
        """At least once: what counts twice is what the last recovery's checkpoint had early."""
        if self._mode == "at-least-once":
            early = self._early.get(branch.uid, {})
            surplus = _without(last, exact)
            _require(
                surplus == early, "surplus", f"{branch.uid}: {surplus} where {early} was early"
            )
        if self._mode == "at-most-once" and not self.restored:
            _require(last == exact, "output", _difference(last, exact))

    def check_savepoint(self, store: Store, *, is_last_word: bool) -> CheckpointId:
        """All it names is in its own directory, as it was written; answers its number."""
        found = decode_manifest(store.read(SAVEPOINT_METADATA))
        for file in found.files():
            store.read_verified(file.path, file.length_bytes, file.crc32)
        if any(part.disk is not None or part.commits for part in found.snapshots):
            raise Violation("savepoint: it holds a database, or something to commit")
        if is_last_word:
            self._check_last_word(found, store)
        return found.checkpoint_id

    def _check_last_word(self, savepoint: Manifest, store: Store) -> None:
        """What the job has committed by now is what the savepoint holds, and it commits no more.

        Its last checkpoint commits what it holds, and a job that goes on from that one is exact; so
        is one that starts from a savepoint that holds the same.
        """
        record = self._record()
        newest = record.newest if record else None
        is_newer = newest is not None and newest.checkpoint_id > savepoint.checkpoint_id
        _require(is_newer, "last", f"savepoint {savepoint.checkpoint_id} is not committed")
        assert newest is not None
        last = self._manifest(newest.checkpoint_id, newest.attempt)
        if self._is_damaged(last):
            return  # as whoever starts from it will see
        ours = self._held_in(savepoint, lambda file: _content(file, store.read))
        theirs = self._held_in(last, self._file)
        other = sorted(uid for uid in ours.keys() | theirs.keys() if ours[uid] != theirs[uid])
        what = f"{other} in savepoint {savepoint.checkpoint_id} and checkpoint {last.checkpoint_id}"
        _require(not other, "last", f"not the same of {what}")
        for branch in self._job.branches:
            for part in last.snapshots_of(OperatorUid(f"write-{branch.uid}")):
                for kept in part.commits:
                    is_committed = self._is_committed(last, branch, kept)
                    _require(is_committed, "last", f"{kept} is not committed")
        self._has_said_last_word = True

    def _held_in(self, manifest: Manifest, content: Callable[[FileHandle], pa.Buffer]) -> Held:
        """All rows, times, positions and records under way, by operator or edge."""
        held: Held = defaultdict(Counter)
        for part in manifest.snapshots:
            for state in (*part.keyed, *part.broadcast):
                groups = state.key_groups, range(1 << 15)
                for batch in read_keyed_snapshot(content(state.file), *groups):
                    held[part.uid].update(_rows_of(_remembered(batch, part.watermark_us)))
            if part.disk is not None:
                for batch in self._rows_of_database(part.disk):
                    held[part.uid].update(_rows_of(batch))
            held[part.uid][part.subtask, part.watermark_us] += 1
        for under in manifest.channels:
            for batch in read_run(content(under.file), under.offset_bytes, under.length_bytes):
                held[under.edge].update(_rows_of(batch))
        # Splits that are discovered meanwhile are dealt out, but nothing is read of them.
        begun = ((split, at) for split, at in self._positions(manifest).items() if at)
        held[SOURCE].update(begun)
        return held

    def check_staged(self) -> None:
        """All that was staged is committed, or swept."""
        staged = [path for path in self._disk.paths() if path.startswith(f"{PREPARED_DIRECTORY}/")]
        _require(not staged, "transactions", f"{staged[:3]} are left")

    def has_checkpoint(self) -> bool:
        """Whether the job has one of its own to begin with."""
        record = self._record()
        return record is not None and record.newest is not None

    def check_files(self) -> None:
        """The files on the storage are those the retained checkpoints need, and the log."""
        record = self._record()
        _require(record is not None, "log", "the log of a job that is over is gone")
        assert record is not None
        needed = set()
        for kept in record.checkpoints:
            needed.add(metadata_path(kept.checkpoint_id, kept.attempt))
            manifest = self._manifest(kept.checkpoint_id, kept.attempt)
            needed |= {file.path for file in manifest.files()}
        # A temporary name that came back with the power goes with its checkpoint's directory.
        unfinished = {path.removesuffix("_metadata") + TEMPORARY_PREFIX for path in needed}
        # What was deleted of staged output may be back too; the next start of the job sweeps it.
        may_stay = (f"{LOG_DIRECTORY}/", f"{PREPARED_DIRECTORY}/", *unfinished)
        found = {path for path in self._disk.paths() if not path.startswith(may_stay)}
        _require(found == needed, "files", f"left {sorted(found - needed)[:3]}, missing"
                 f" {sorted(needed - found)[:3]}")  # fmt: skip

    # --- reading the disk, without trouble ---

    def _record(self) -> JobRecord | None:
        found = map(sequence_of, self._disk.names(LOG_DIRECTORY))
        newest = max((sequence for sequence in found if sequence is not None), default=None)
        return _decode_record(self._read(log_path(newest))) if newest is not None else None

    def _manifest(self, checkpoint_id: CheckpointId, attempt: Attempt) -> Manifest:
        path = metadata_path(checkpoint_id, attempt)
        return _decode_manifest(self._read(path))

    def _positions(self, manifest: Manifest) -> dict[int, int]:
        """Those not yet discovered are left out; those dropped by their readers are at the end."""
        positions = dict(enumerate(self._job.source.lengths[: _found(manifest)]))
        items = [item for part in manifest.snapshots_of(SOURCE) for item in part.items]
        positions.update({split_index(str(item["id"])): _next(item["position"]) for item in items})
        return positions

    def _rows(self, manifest: Manifest, uid: OperatorUid) -> Iterator[pa.RecordBatch]:
        for part in manifest.snapshots_of(uid):
            for keyed in part.keyed:
                file = self._file(keyed.file)
                yield from read_keyed_snapshot(file, keyed.key_groups, range(1 << 15))
            if part.disk is not None:
                yield from self._rows_of_database(part.disk)

    def _rows_of_database(self, disk: DiskState) -> Iterator[pa.RecordBatch]:
        directory = self._new_directory()
        for each in disk.files:
            (directory / each.name).write_bytes(self._file(each.file))
        for table in tables_in(directory):
            yield from (batch for _, batch in table.batches_by_key_group())

    def _overtaken(self, state: ChannelState) -> list[pa.RecordBatch]:
        return read_run(self._file(state.file), state.offset_bytes, state.length_bytes)

    def _is_damaged(self, manifest: Manifest) -> bool:
        return any(zlib.crc32(self._file(f)) != f.crc32 for f in manifest.files())

    def _file(self, file: FileHandle) -> pa.Buffer:
        return _content(file, self._read)

    def _read(self, path: str) -> bytes:
        data = self._disk.read(path)
        _require(data is not None, "files", f"{path} is gone")
        assert data is not None
        return data


def _content(file: FileHandle, read: Callable[[str], bytes]) -> pa.Buffer:
    return pa.py_buffer(read(file.path) if file.data is None else file.data)


def _rows_of(batch: pa.RecordBatch) -> Iterator[tuple[str, ...]]:
    return zip(*(map(str, column.to_pylist()) for column in batch.columns), strict=True)


def _remembered(batch: pa.RecordBatch, time_us: int | None) -> pa.RecordBatch:
    """Without keys that are due to be forgotten: a file that is shared may still have them."""
    if EXPIRES not in batch.schema.names or time_us is None:
        return batch
    return batch.filter(batch.column(EXPIRES).to_numpy() > time_us)


def _least_times(manifest: Manifest) -> Times:
    """How far event time had come in all subtasks of an operator."""
    least: dict[OperatorUid, int] = {}
    for part in manifest.snapshots:
        if part.watermark_us is not None:
            least[part.uid] = min(part.watermark_us, least.get(part.uid, part.watermark_us))
    return {uid: None if time_us == BEGINNING_US else time_us for uid, time_us in least.items()}


def _is_at_least(found: Counts, expected: Counts) -> bool:
    """Nothing is missing; records that were replayed may count twice."""
    return all(found.get(key, (0, 0)) >= counts for key, counts in expected.items())


def _together(first: Counts, second: Counts) -> Counts:
    sums = dict.fromkeys(first.keys() | second.keys(), (0, 0))
    for counts in (first, second):
        for key, (count, total) in counts.items():
            sums[key] = (sums[key][0] + count, sums[key][1] + total)
    return sums


def _without(found: Counts, expected: Counts) -> Counts:
    less = {key: (-count, -total) for key, (count, total) in expected.items()}
    return {key: counts for key, counts in _together(found, less).items() if counts != (0, 0)}


def _found(manifest: Manifest) -> int:
    """How many splits the source's enumerator had found."""
    state = manifest.enumerators.get(SOURCE, {}).get("state")
    return cast(int, state["found"]) if isinstance(state, dict) else 0


def _next(position: JsonValue) -> int:
    assert isinstance(position, dict)
    assert isinstance(position["next"], int)
    return position["next"]


def _difference(found: dict[int, tuple[int, int]], expected: dict[int, tuple[int, int]]) -> str:
    wrong = {
        key: (found.get(key), expected.get(key))
        for key in found.keys() | expected.keys()
        if found.get(key) != expected.get(key)
    }
    return f"{len(wrong)} of {len(expected)} keys are wrong, such as (found, expected)" + str(
        dict(list(wrong.items())[:2])
    )
