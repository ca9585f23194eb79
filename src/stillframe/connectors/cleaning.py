"""What becomes of source files that have been read: Spark's `cleanSource`.

A file is let go when a checkpoint is complete that has all of it behind it. A restart never asks
for it again; a person who restores an older checkpoint or a savepoint may, and has to bring it
back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stillframe.errors import BuildError, StorageError
from stillframe.storage.places import address_of, is_on_disk, place_of

log = logging.getLogger("stillframe")


@dataclass(frozen=True, slots=True)
class Cleaning:
    archive: str | None = None
    """Where files go, each below its own path; None: nowhere, they are deleted."""

    def check(self, paths: Sequence[str]) -> None:
        """Raise BuildError where what is archived would be read again, or cannot get there."""
        if self.archive is None:
            return
        archive = address_of(self.archive)
        for path in map(address_of, paths):
            if _root(path) != _root(archive):
                raise BuildError(
                    f"sourceArchiveDir {archive} is on another storage than {path}: archiving moves"
                    " files, so give a directory of the same one"
                )
            if f"{archive}/".startswith(f"{path}/") or f"{path}/".startswith(f"{archive}/"):
                raise BuildError(
                    f"sourceArchiveDir {archive} is inside {path}, or around it: what is archived"
                    " would be read again, give another directory"
                )

    def let_go(self, path: str, changed_at_ms: int, settings: Mapping[str, str]) -> None:
        """Of this file, unless somebody has put another one there since."""
        place = place_of(path, settings)
        try:
            facts = place.facts(path)
            if facts is None or facts.changed_at_ms != changed_at_ms:
                return
            if self.archive is None:
                place.delete(path)
            else:
                below = path.removeprefix(_root(path)).lstrip("/")
                place.move(path, f"{address_of(self.archive)}/{below}")
        except (OSError, StorageError) as error:
            log.warning("%s has been read and stays where it is: %s", path, error)


def _root(address: str) -> str:
    if is_on_disk(address):
        return ""
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"
