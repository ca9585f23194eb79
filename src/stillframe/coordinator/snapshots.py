"""The job's directory, seen from the driver: metadata written last, read back checked, swept."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

from stillframe.errors import StorageError
from stillframe.ids import NO_CHECKPOINT, Attempt, CheckpointId, Epoch
from stillframe.protocol.joblog import CompletedCheckpoint, Shown
from stillframe.protocol.manifests import Manifest, decode_manifest, encode_manifest
from stillframe.storage.paths import (
    HISTORY_DIRECTORIES,
    SHARED_DIRECTORY,
    attempt_directory,
    attempt_of,
    checkpoint_directory,
    checkpoint_of,
    metadata_path,
    number_of_file,
    numbers_in_history,
)
from stillframe.storage.store import Store


class Snapshots:
    """The checkpoints of one job on its store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def write_manifest(self, manifest: Manifest) -> CompletedCheckpoint:
        """The last file of a checkpoint; it still is not complete before the log says so."""
        written = self._store.write(
            metadata_path(manifest.checkpoint_id, manifest.attempt), [encode_manifest(manifest)]
        )
        return CompletedCheckpoint(
            checkpoint_id=manifest.checkpoint_id,
            epoch=manifest.epoch,
            attempt=manifest.attempt,
            manifest_crc32=written.crc32,
            manifest_length_bytes=written.length_bytes,
        )

    def read_manifest(self, completed: CompletedCheckpoint) -> Manifest:
        """Raises `SnapshotDamaged` if it is not what the log says it was."""
        path = metadata_path(completed.checkpoint_id, completed.attempt)
        data = self._store.read_verified(
            path, completed.manifest_length_bytes, completed.manifest_crc32
        )
        return decode_manifest(data.to_pybytes(), f"{self._store.address}/{path}")

    def highest_id(self) -> CheckpointId:
        """The highest checkpoint number that ever left something here."""
        numbers = [of[0] for name in self._store.list("") if (of := checkpoint_of(name))]
        numbers += [number for path in self._shared() if (number := number_of_file(path))]
        return max(numbers, default=NO_CHECKPOINT)

    def shown(self) -> Iterator[Shown]:
        """All numbers that files here show to have been used, whatever state the files are in."""
        for name in self._store.list(""):
            if (of := checkpoint_of(name)) is not None:
                yield Shown(of[1], of[0], self._epoch(*of))
        for attempt in self._attempts():
            yield Shown(attempt)
        yield Shown(checkpoint_id=self.highest_id())
        for directory in HISTORY_DIRECTORIES:
            for name in self._store.list(directory):
                if (found := numbers_in_history(directory, name)) is not None:
                    yield Shown(found[1], found[0] or NO_CHECKPOINT)

    def _epoch(self, checkpoint_id: CheckpointId, attempt: Attempt) -> Epoch | None:
        path = metadata_path(checkpoint_id, attempt)
        try:
            return decode_manifest(self._store.read(path), path).epoch
        except StorageError:
            return None

    def sweep(
        self,
        keep: Collection[CompletedCheckpoint],
        keep_files: Collection[str] | None,
        attempt: Attempt,
    ) -> None:
        """Delete what this attempt and those before it left behind and no kept checkpoint needs.

        `keep_files` are the shared files that the kept checkpoints need, None if that is not
        known: then all of them stay. What a newer attempt wrote is never touched: it may belong to
        another driver by now.
        """
        kept = {(completed.checkpoint_id, completed.attempt) for completed in keep}
        with contextlib.suppress(StorageError):
            for name in self._store.list(""):
                of = checkpoint_of(name)
                if of is not None and of[1] <= attempt and of not in kept:
                    self.delete(*of)
        if keep_files is not None:
            self._sweep_shared(keep_files, attempt)

    def settle(self) -> None:
        """Wait until nothing that was deleted, by whomever, can come back with the power."""
        with contextlib.suppress(StorageError):
            places = [SHARED_DIRECTORY, *map(attempt_directory, self._attempts())]
            for directory in ("", *places):
                self._store.settle(directory)

    def delete(self, checkpoint_id: CheckpointId, attempt: Attempt) -> None:
        """What cannot be deleted now is left for the next sweep."""
        with contextlib.suppress(StorageError):
            self._store.delete_directory(checkpoint_directory(checkpoint_id, attempt))

    def delete_files(self, paths: Iterable[str]) -> None:
        """What cannot be deleted now is left for the next sweep."""
        for path in sorted(paths):
            with contextlib.suppress(StorageError):
                self._store.delete(path)

    def _sweep_shared(self, keep_files: Collection[str], attempt: Attempt) -> None:
        with contextlib.suppress(StorageError):
            for each in self._attempts():
                if each <= attempt:
                    self._sweep_attempt(each, keep_files)

    def _sweep_attempt(self, attempt: Attempt, keep_files: Collection[str]) -> None:
        directory = attempt_directory(attempt)
        paths = {f"{directory}/{name}" for name in self._store.list(directory)}
        with contextlib.suppress(StorageError):
            if paths.isdisjoint(keep_files):
                self._store.delete_directory(directory)
            else:
                self.delete_files(paths.difference(keep_files))
                self._store.delete_unfinished(directory)

    def _shared(self) -> Iterator[str]:
        for attempt in self._attempts():
            directory = attempt_directory(attempt)
            yield from (f"{directory}/{name}" for name in self._store.list(directory))

    def _attempts(self) -> list[Attempt]:
        """Those that have left shared files."""
        return [of for name in self._store.list(SHARED_DIRECTORY) if (of := attempt_of(name))]
