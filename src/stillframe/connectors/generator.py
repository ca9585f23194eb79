"""A source from a Python generator that says with each row where it is.

    def orders(position):
        for number in itertools.count(0 if position is None else position):
            yield (number, price_of(number)), number + 1

Rows are gathered to batches, and a batch goes on when it is large, when some time has passed or
when the generator yields None. Several splits are several generators of one function, read in turn
by one thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import pyarrow as pa

from stillframe.api.sources import BlockingReader, ReadItem, Source, SourceContext, Split
from stillframe.errors import UserCodeError
from stillframe.json_values import JsonObject
from stillframe.user_code import lazily, shown

_BATCH_ROWS_MAX = 4_096
_TURN_SECONDS = 0.05
"""How long rows are gathered, and how long other splits wait, unless the generator itself waits."""
_PAUSE_SECONDS = 0.02
"""When no generator has anything."""
_ONLY = "generator"


@dataclass(frozen=True, eq=False)
class GeneratorSource(Source):
    """Made by `stillframe.from_generator`, which says what the function is."""

    function: Callable[..., Any]
    name: str
    names: tuple[str, ...] | None
    """Of its splits; None: there is one, and the function is called without a name."""
    row_schema: pa.Schema
    to_batch: Callable[[Sequence[Any]], pa.RecordBatch]
    """Makes a batch of rows, or says in a sentence why it cannot."""
    to_fit: Callable[[pa.RecordBatch], pa.RecordBatch]
    """The same for a batch."""

    @property
    def schema(self) -> pa.Schema:
        return self.row_schema

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(name, {"at": None}) for name in self.names or (_ONLY,)]

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return _GeneratorReader(self, splits)

    def describe(self) -> str:
        return f"generator {self.name}"


class _GeneratorReader(BlockingReader):
    def __init__(self, source: GeneratorSource, splits: Sequence[Split]) -> None:
        self._source = source
        self._splits = splits
        self._ending = threading.Event()

    def has_ended(self, split: Split) -> bool:
        return bool(split.position.get("ended"))

    def read(self) -> Iterator[ReadItem]:
        turns = [_Turns(self._source, split) for split in self._splits if not self.has_ended(split)]
        try:
            while turns and not self._ending.is_set():
                gave = False
                for each in turns:
                    for item in each.next_batches():
                        gave = True
                        yield item
                turns = [each for each in turns if not each.has_ended]
                if not gave and turns:
                    self._ending.wait(_PAUSE_SECONDS)
                    yield None
        finally:
            for each in turns:
                each.close()

    def interrupt(self) -> None:
        self._ending.set()

    def close(self) -> None:
        self._ending.set()


class _Turns:
    """One generator, from which a batch is gathered whenever it is its turn."""

    def __init__(self, source: GeneratorSource, split: Split) -> None:
        self.has_ended = False
        self._source = source
        self._split = split.id
        self._at = split.position.get("at")
        arguments = (self._at,) if source.names is None else (split.id, self._at)
        made = source.function(*arguments)
        if not hasattr(made, "__iter__"):
            self._refuse(f"returned {shown(made)}, which is no generator")
        self._generator = made
        self._items = iter(lazily(made))

    def next_batches(self) -> Iterator[ReadItem]:
        """The rows of one turn, and the batches that the generator has made itself."""
        rows: list[Any] = []
        until = time.monotonic() + _TURN_SECONDS
        while len(rows) < _BATCH_ROWS_MAX:
            try:
                item = next(self._items)
            except StopIteration:
                self.has_ended = True
                break
            if item is None:
                break
            if not isinstance(item, tuple) or len(item) != 2:
                self._refuse(f"yielded {shown(item)}")
            given, at = item
            if isinstance(given, pa.RecordBatch):
                if rows:
                    yield self._read(self._source.to_batch(rows))
                self._at = at
                yield self._read(self._source.to_fit(given))
                return
            rows.append(given)
            self._at = at
            if time.monotonic() >= until:
                break
        if rows or self.has_ended:
            yield self._read(self._source.to_batch(rows) if rows else None)

    def close(self) -> None:
        if isinstance(self._generator, Generator):
            self._generator.close()

    def _read(self, batch: pa.RecordBatch | None) -> ReadItem:
        ended: JsonObject = {"ended": True} if self.has_ended else {}
        return Split(self._split, {"at": self._at, **ended}), batch

    def _refuse(self, what: str) -> NoReturn:
        raise UserCodeError(
            f"{self._source.describe()} {what}: yield (row, position), (RecordBatch, position), or"
            " None if there is nothing now"
        )
