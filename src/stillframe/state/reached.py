"""How far event time had come for single key groups before a restore.

After a restore a subtask goes on from where event time was for the former subtask that was
furthest behind. Where a barrier overtook watermarks, some were further: what they had dropped as
late must stay dropped, and what they had closed must not come out again. So their key groups are
remembered until event time has come as far again; also in snapshots taken before that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from stillframe.key_groups import Words, key_groups_of

BEGINNING_US = -(2**63)
"""A watermark that nothing is older than."""
END_US = 2**63 - 1
"""The last time there is."""

GroupSpan = tuple[int, int, int]
"""The first key group, the one after the last, and how far event time had come for them."""


class Reached:
    """Key groups for which event time had come further."""

    def __init__(self, max_parallelism: int, further: Iterable[GroupSpan]) -> None:
        self._times_us = np.full(max_parallelism, BEGINNING_US, dtype=np.int64)
        for first, stop, group_us in further:
            groups = self._times_us[first:stop]
            np.maximum(groups, group_us, out=groups)

    @classmethod
    def beyond(
        cls, watermark_us: int | None, max_parallelism: int, further: Iterable[GroupSpan]
    ) -> Reached | None:
        """None where no key group had come further than this."""
        reached = cls(max_parallelism, further)
        now_us = BEGINNING_US if watermark_us is None else watermark_us
        return None if reached.is_passed_by(now_us) else reached

    def is_passed_by(self, watermark_us: int) -> bool:
        """Whether event time has come as far again for all."""
        return int(self._times_us.max()) <= watermark_us

    def times_of(self, hashes: Words) -> npt.NDArray[np.int64]:
        """For each of these hashes of keys, how far event time had come."""
        return self._times_us[key_groups_of(hashes, len(self._times_us))]

    def spans(self) -> Iterator[GroupSpan]:
        """All that is remembered, in order."""
        times_us = self._times_us
        starts = np.flatnonzero(np.diff(times_us, prepend=times_us[0] ^ 1)).tolist()
        for first, stop in zip(starts, [*starts[1:], len(times_us)], strict=True):
            if times_us[first] > BEGINNING_US:
                yield first, stop, int(times_us[first])
