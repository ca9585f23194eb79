"""What must hold, whatever happens: checked as it happens, and at the end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from stillframe.coordinator.history import AttemptStarted, CheckpointCompleted, Event
from stillframe.ids import Attempt, CheckpointId, OperatorUid
from stillframe.json_values import JsonValue
from stillframe.protocol.joblog import JobRecord, decode_record
from stillframe.protocol.manifests import Manifest, decode_manifest
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.paths import LOG_DIRECTORY, metadata_path
from stillframe.testing.simulation.jobs import SOURCE, SimulatedJob, counts_of
from stillframe.testing.simulation.outside import Row
from stillframe.testing.simulation.storage import Disk


class Violation(AssertionError):
    """A promise was broken; the message begins with the name of the checker that saw it."""


def _require(holds: bool, checker: str, what: str) -> None:
    if not holds:
        raise Violation(f"{checker}: {what}")


class Checkers:
    """All checkers of one run."""

    def __init__(self, job: SimulatedJob, disk: Disk) -> None:
        self._job = job
        self._disk = disk
        self._is_exact = job.config.checkpoint_mode == "exactly-once"
        self.completed: list[CheckpointId] = []
        self.restored: list[CheckpointId] = []
        self._announced: Counter[tuple[int, CheckpointId]] = Counter()
        self._seen = {branch.uid: Counter[Row]() for branch in job.branches}
        self._last_count: dict[str, dict[int, int]] = defaultdict(dict)
        for branch in job.branches:
            outside = job.outside[branch.uid]
            outside.on_visible = self._watcher(branch.uid, branch.counts)

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
            case AttemptStarted(restored_from=checkpoint_id) if checkpoint_id is not None:
                self.restored.append(checkpoint_id)

    def _watcher(self, uid: str, counts: bool) -> Callable[[list[Row]], None]:
        def watch(rows: list[Row]) -> None:
            for row in rows:
                self._seen[uid][row] += 1
                if not self._is_exact:
                    continue
                _require(self._seen[uid][row] == 1, "duplicates", f"{uid} shows {row} twice")
                if counts:
                    key, count = row[0], row[1]
                    before = self._last_count[uid].get(key, 0)
                    _require(count > before, "growth", f"{uid}: key {key} from {before} to {count}")
                    self._last_count[uid][key] = count
            self._check_nothing_early(uid, counts, rows)

        return watch

    def _check_nothing_early(self, uid: str, counts: bool, rows: list[Row]) -> None:
        """Nothing becomes visible before the checkpoint that holds it is complete."""
        record = self._record()
        newest = record.newest if record else None
        _require(newest is not None, "early", f"{uid} shows {rows[:3]} before any checkpoint")
        assert newest is not None
        if not counts and self._is_exact:
            positions = self._positions(self._manifest(newest.checkpoint_id, newest.attempt))
            allowed = set(self._job.records_before(positions))
            early = [row for row in rows if row not in allowed]
            _require(not early, "early", f"{uid} shows {early[:3]} before it is complete")

    def _check_cut(self, checkpoint_id: CheckpointId) -> None:
        """The state of every operator is that of the records before the sources' positions."""
        record = self._record()
        assert record is not None
        completed = record.checkpoint(checkpoint_id)
        _require(completed is not None, "log", f"checkpoint {checkpoint_id} is not in the log")
        assert completed is not None
        manifest = self._manifest(checkpoint_id, completed.attempt)
        before = list(self._job.records_before(self._positions(manifest)))
        for branch in self._job.branches:
            if branch.counts:
                expected = counts_of(row for row in before if branch.keeps(row))
                found = self._state(manifest, OperatorUid(f"count-{branch.uid}"))
                holds = found == expected if self._is_exact else _is_at_least(found, expected)
                _require(
                    holds,
                    "cut",
                    f"checkpoint {checkpoint_id}, {branch.uid}: {_difference(found, expected)}",
                )

    # --- at the end ---

    def check_end(self) -> None:
        records = self._job.all_records()
        for branch in self._job.branches:
            kept = [row for row in records if branch.keeps(row)]
            visible = self._job.outside[branch.uid].visible
            if branch.counts:
                last = {row[0]: (row[1], row[2]) for row in visible}
                exact = counts_of(kept)
                holds = last == exact if self._is_exact else _is_at_least(last, exact)
                _require(holds, "output", _difference(last, exact))
            else:
                lost = Counter(kept) - Counter(visible)
                _require(not lost, "output", f"{branch.uid} lost {list(lost)[:3]}")
                surplus = len(visible) - len(kept)
                _require(
                    not surplus or not self._is_exact, "output", f"{branch.uid} has too many rows"
                )
            _require(
                not self._job.outside[branch.uid].prepared,
                "transactions",
                f"{branch.uid} leaves {list(self._job.outside[branch.uid].prepared)[:3]} open",
            )

    def check_files(self) -> None:
        """The files on the storage are those the retained checkpoints need, and the log."""
        record = self._record()
        assert record is not None
        needed = set()
        for kept in record.checkpoints:
            needed.add(metadata_path(kept.checkpoint_id, kept.attempt))
            manifest = self._manifest(kept.checkpoint_id, kept.attempt)
            needed |= {file.path for file in manifest.files()}
        found = {path for path in self._disk.files if not path.startswith(f"{LOG_DIRECTORY}/")}
        _require(found == needed, "files", f"left {sorted(found - needed)[:3]}, missing"
                 f" {sorted(needed - found)[:3]}")  # fmt: skip

    # --- reading the disk, without trouble ---

    def _record(self) -> JobRecord | None:
        entries = sorted(path for path in self._disk.files if path.startswith(f"{LOG_DIRECTORY}/"))
        return decode_record(self._disk.files[entries[-1]]) if entries else None

    def _manifest(self, checkpoint_id: CheckpointId, attempt: Attempt) -> Manifest:
        path = metadata_path(checkpoint_id, attempt)
        _require(path in self._disk.files, "files", f"{path} of a retained checkpoint is gone")
        return decode_manifest(self._disk.files[path])

    def _positions(self, manifest: Manifest) -> dict[str, int]:
        items = [item for part in manifest.snapshots_of(SOURCE) for item in part.items]
        return {str(item["id"]): _next(item["position"]) for item in items}

    def _state(self, manifest: Manifest, uid: OperatorUid) -> dict[int, tuple[int, int]]:
        import pyarrow as pa

        found: dict[int, tuple[int, int]] = {}
        for part in manifest.snapshots_of(uid):
            for keyed in part.keyed:
                path = keyed.file.path
                _require(path in self._disk.files, "files", f"{path} is gone")
                buffer = pa.py_buffer(self._disk.files[path])
                for batch in read_keyed_snapshot(buffer, keyed.key_groups, range(1 << 15)):
                    for row in batch.to_pylist():
                        found[row["key"]] = (row["count"], row["total"])
        return found


def _is_at_least(found: dict[int, tuple[int, int]], expected: dict[int, tuple[int, int]]) -> bool:
    """Nothing is missing; records that were replayed may count twice."""
    return all(found.get(key, (0, 0)) >= counts for key, counts in expected.items())


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
