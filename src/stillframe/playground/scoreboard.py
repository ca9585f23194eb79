"""The scoreboard: what the job shows and holds, against the truth, at committed checkpoints only.

Theory of operation. Between two checkpoints nobody can say what should be visible. At a committed
one it is exact: every number before its positions is in the files of our sink, once; the naive sink
shows them too, and some behind them; the state holds the counts of the input up to there. So the
board is compared each time a checkpoint is committed, and says up to which one.

A prediction is what will be wrong if the job goes back to a checkpoint now: its state beside the
truth at its positions, and the rows that sinks show behind these positions. These come again.

Rules of this file: it reads files and never asks the job what it thinks of itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from stillframe.playground.checkpoints import Checkpoints
from stillframe.playground.numbers import Numbers, NumbersSeen, Seen
from stillframe.playground.truth import Counts, Positions, Truth

_OURS = re.compile(r"part-.*-(\d{10})-\d{5}-\d+-[0-9a-f]+-\d{5}\.parquet$")
"""Behind job and operator: checkpoint, subtask, attempt, a token and a number."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a restart from a checkpoint will leave wrong for good."""

    checkpoint: int
    counts: Mapping[str, int]
    """By app: how many too many, of those that are not right."""
    ours: int
    """Rows of our sink that will come twice."""
    naive: int

    @property
    def sentence(self) -> str:
        parts = [
            f"the count of {app} will be wrong by {_signed(surplus)}"
            for app, surplus in sorted(self.counts.items())
        ]
        parts.append(f"our sink will show {self.ours:,} rows twice")
        parts.append(f"the naive one {self.naive:,}")
        return f"if the job goes back to checkpoint {self.checkpoint} now, {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class Score:
    """The board after one committed checkpoint."""

    checkpoint: int
    attempt: int
    ours: Seen
    naive: Seen
    state: Mapping[str, int]
    truth: Mapping[str, int]
    positions: Positions = field(default_factory=dict)

    @property
    def surplus(self) -> dict[str, int]:
        """By app: how many too many the state has, of those that are not right."""
        return surplus(self.state, self.truth)

    @property
    def is_exact(self) -> bool:
        return self.ours.is_exact and not self.surplus

    def to_json(self) -> dict[str, Any]:
        return {
            "checkpoint": self.checkpoint,
            "attempt": self.attempt,
            "exact": self.is_exact,
            "ours": {**asdict(self.ours), "exact": self.ours.is_exact},
            "naive": asdict(self.naive),
            "apps": {
                app: {"state": self.state.get(app, 0), "truth": self.truth.get(app, 0)}
                for app in sorted({*self.state, *self.truth})
            },
            "surplus": self.surplus,
        }


def surplus(state: Counts, truth: Counts) -> dict[str, int]:
    apps = sorted({*state, *truth})
    found = {app: state.get(app, 0) - truth.get(app, 0) for app in apps}
    return {app: by for app, by in found.items() if by}


class Scoreboard:
    """Of one output directory; `base`: where the job began to write there. For one thread."""

    def __init__(
        self, truth: Truth, checkpoints: Checkpoints, output: Path, base: Positions
    ) -> None:
        self._truth = truth
        self._checkpoints = checkpoints
        self._base = base
        self._ours, self._naive = NumbersSeen(), NumbersSeen()
        self._clicks, self._shown = output / "clicks", output / "naive"
        self._read: set[str] = set()

    def look(self, checkpoint_id: int) -> Score:
        """The board at a checkpoint that is committed and retained."""
        checkpoint = self._checkpoints.read(checkpoint_id)
        self._ours.add(self._new(self._clicks, checkpoint_id))
        self._naive.add(self._new(self._shown, None))
        return Score(
            checkpoint.checkpoint_id,
            checkpoint.attempt,
            self._ours.against(self._base, checkpoint.positions),
            self._naive.against(self._base, checkpoint.positions),
            dict(checkpoint.counts),
            dict(self._truth.counts(checkpoint.positions)),
            checkpoint.positions,
        )

    def predict(self, checkpoint_id: int | None = None) -> Prediction:
        """For a restart from this checkpoint, by default from the newest, as things are now."""
        checkpoints = self._checkpoints
        checkpoint = (
            checkpoints.read_newest() if checkpoint_id is None else checkpoints.read(checkpoint_id)
        )
        self.refresh()
        return Prediction(
            checkpoint.checkpoint_id,
            surplus(checkpoint.counts, self._truth.counts(checkpoint.positions)),
            self._ours.against(self._base, checkpoint.positions).behind,
            self._naive.against(self._base, checkpoint.positions).behind,
        )

    def refresh(self) -> None:
        """Read all that is visible now."""
        self._ours.add(self._new(self._clicks, None))
        self._naive.add(self._new(self._shown, None))

    def reached(self) -> dict[int, int]:
        """By partition: what some sink has shown up to, at the last look."""
        ours, naive = self._ours.reached(), self._naive.reached()
        return {partition: max(end, naive[partition]) for partition, end in ours.items()}

    def doubled(self) -> int:
        """Rows of the naive sink that are there twice, at the last look."""
        return self._naive.against(self._base, {}).doubled

    def _new(self, directory: Path, up_to: int | None) -> Iterator[Numbers]:
        """The numbers in files that were not read before, up to a checkpoint's."""
        for path in sorted(directory.glob("[!.]*.parquet")):
            match = _OURS.search(path.name)
            is_later = match is not None and up_to is not None and int(match[1]) > up_to
            if str(path) in self._read or is_later:
                continue
            column = pq.read_table(path, columns=["id"]).column(0)
            self._read.add(str(path))
            yield column.to_numpy().astype(np.int64, copy=False)


def _signed(number: int) -> str:
    return f"{number:+,}"
