"""The contract of programs that handle one key after the other, with states that have names.

A user does not write one: `spark/processor_programs` makes one of a PySpark `StatefulProcessor`,
and `runtime/key_processing` one of a `KeyProcessor`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import pyarrow as pa

from stillframe.api.checkpoints import HearsOfCheckpoints
from stillframe.api.timers import TimerClock


@dataclass(frozen=True, slots=True)
class Groups:
    """The rows of a batch, key by key."""

    batch: pa.RecordBatch
    """The rows in the order in which they came."""
    order: pa.Array
    """Their places in it, key by key; those of one key in the order in which they came."""
    keys: pa.RecordBatch
    """The key columns, with a row for each key."""
    bounds: Sequence[int]
    """Where each key's rows begin, and where the last one's end."""
    enter: Callable[[int], None]

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the columns."""
        return tuple(self.batch.schema.names)

    def rows(self) -> pa.RecordBatch:
        """All columns, key by key."""
        return self.batch.take(self.order)

    def column(self, name: str) -> pa.Array:
        """One of them."""
        return self.batch.column(name).take(self.order)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Each key in turn, by its place among the keys, and where its rows begin and end.

        States and timers are those of the key that was answered last.
        """
        for place in range(self.keys.num_rows):
            self.enter(place)
            yield place, self.bounds[place], self.bounds[place + 1]


@dataclass(frozen=True, slots=True)
class Fired:
    """Timers that have fallen due, in the order of their times."""

    keys: pa.RecordBatch
    """The key columns, with a row for each timer."""
    times_ms: Sequence[int]
    enter: Callable[[int], bool]
    """Whether the timer in this place is still there; if so, its key is at hand."""
    delete: Callable[[int], None]
    clock: TimerClock = "event"

    def __iter__(self) -> Iterator[int]:
        """Each in turn, by its place, unless it was deleted meanwhile.

        States and timers are those of its key; the timer is there until the next is asked for.
        """
        for place in range(self.keys.num_rows):
            if self.enter(place):
                yield place
                self.delete(place)


class States(Protocol):
    """The states and timers of a program in one subtask, as handles of `state/handles`.

    `records` makes what makes a record with these fields, for structs that are handed out; with
    `named`, for rows too, and instants have their zone. With `refreshes` a read within a row's time
    to live starts it over.
    """

    @property
    def now_ms(self) -> int:
        """The clock on the wall, as it was when the rows or timers at hand were begun with."""

    @property
    def watermark_ms(self) -> int:
        """How far event time has come, 0 while nobody knows."""

    @property
    def watermark_us(self) -> int | None:
        """The same, None while nobody knows."""

    def value(
        self,
        name: str,
        schema: pa.Schema,
        ttl_ms: int | None,
        records: Any,
        *,
        named: bool = False,
        refreshes: bool = False,
    ) -> Any: ...

    def list(
        self,
        name: str,
        schema: pa.Schema,
        ttl_ms: int | None,
        records: Any,
        *,
        named: bool = False,
        refreshes: bool = False,
    ) -> Any: ...

    def map(
        self,
        name: str,
        user_key: pa.Schema,
        schema: pa.Schema,
        ttl_ms: int | None,
        records: Any,
        *,
        named: bool = False,
        refreshes: bool = False,
    ) -> Any: ...

    def reducing(
        self,
        name: str,
        schema: pa.Schema,
        reduce: str | Mapping[str, str],
        records: Any,
        *,
        named: bool = False,
    ) -> Any:
        """With reductions that have names, such as "sum", for all fields or for each."""

    def delete(self, name: str) -> None:
        """Forget a state of all keys, one of an older program too; there may be none."""

    def register_timer(self, time_ms: int, clock: TimerClock | None = None) -> None:
        """For the key at hand; a timer that is there already stays one.

        The clock is named where the program has two.
        """

    def delete_timer(self, time_ms: int, clock: TimerClock | None = None) -> None: ...

    def timers(self, clock: TimerClock | None = None) -> Iterator[int]:
        """Those of the key at hand, ascending."""


class KeyedProgram(HearsOfCheckpoints, ABC):
    """What a `Transform` calls. One object for each subtask and start, called by one thread."""

    sees_batches: ClassVar[bool] = False
    """Whether batches have to be left as they came, because it was written for those of another
    engine: they are not taken together then."""

    @abstractmethod
    def open(self, states: States) -> None:
        """Declare the states. Called once, before all other methods; no key is at hand."""

    @abstractmethod
    def handle(self, groups: Groups) -> Iterable[pa.RecordBatch]:
        """Take the rows of a batch; answer what follows from them."""

    @abstractmethod
    def handle_initial(self, groups: Groups) -> None:
        """Take what is known before the first rows. Called at most once in the job's life."""

    @abstractmethod
    def fire(self, fired: Fired) -> Iterable[pa.RecordBatch]:
        """Timers have fallen due; answer what follows from that."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Called once, also after a failure."""
