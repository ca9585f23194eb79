"""What the input holds up to some positions: the generator, recounted by whoever asks.

Theory of operation. A click is a pure function of its partition and its index in it, so nobody has
to watch the job to know what it has read: up to the positions of a checkpoint the clicks are made
once more and counted by app. What was counted before is kept at the end of each whole chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from stillframe.connectors.generate import ClickSource, clicks_table

APPS = 8
PARTITIONS = 4
RECORDS_PER_SECOND = 20_000

Positions = Mapping[int, int]
"""By partition: the index of the next click that is to be read."""
Counts = Mapping[str, int]
"""By app."""

_CHUNK_ROWS = 65_536


def click_source(seed: int = 0) -> ClickSource:
    """The input of the playground's job."""
    return ClickSource(
        records_per_second=RECORDS_PER_SECOND, partitions=PARTITIONS, apps=APPS, skew=2, seed=seed
    )


class Truth:
    """Counts the input. For one thread at a time."""

    def __init__(self, source: ClickSource) -> None:
        self._source = source
        self._chunks: list[list[Counter[str]]] = [[Counter()] for _ in range(source.partitions)]
        """By partition: what the first 0, 1, 2 … chunks hold."""

    def counts(self, positions: Positions) -> Counter[str]:
        """How often each app was clicked before these positions."""
        total: Counter[str] = Counter()
        for partition, stop in positions.items():
            chunks, rest = divmod(stop, _CHUNK_ROWS)
            known = self._chunks[partition]
            while len(known) <= chunks:
                done = (len(known) - 1) * _CHUNK_ROWS
                known.append(known[-1] + self._made(partition, done, done + _CHUNK_ROWS))
            total += known[chunks] + self._made(partition, stop - rest, stop)
        return total

    def _made(self, partition: int, start: int, stop: int) -> Counter[str]:
        if start == stop:
            return Counter()
        batch = clicks_table(self._source, partition, start, stop, ("app_id",))
        found = batch.column(0).value_counts()
        return Counter({each["values"].as_py(): each["counts"].as_py() for each in found})
