"""The contract of functions that are called key by key and have states with names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol

from stillframe.api.checkpoints import HearsOfCheckpoints
from stillframe.api.timers import TimerClock

TtlRefresh = Literal["write", "read and write"]
"""What begins the time to live of a row anew."""
Reduction = Literal["sum", "min", "max"]
"""What makes one value of two without a function of yours; null counts for nothing."""


class ValueState(Protocol):
    """One row for each key."""

    def exists(self) -> bool: ...

    def get(self) -> Any:
        """The row, a named tuple with the fields of its schema, or None where there is none."""

    def update(self, row: tuple[Any, ...], /) -> None: ...

    def clear(self) -> None:
        """Forget the row of this key."""


class ListState(Protocol):
    """Rows in the order in which they came, for each key; each expires by itself."""

    def exists(self) -> bool: ...

    def get(self) -> Iterator[Any]: ...

    def put(self, rows: Iterable[tuple[Any, ...]], /) -> None:
        """These, and none of those before."""

    def append(self, row: tuple[Any, ...], /) -> None: ...

    def extend(self, rows: Iterable[tuple[Any, ...]], /) -> None: ...

    def clear(self) -> None: ...


class MapState(Protocol):
    """Rows by user keys, which are rows too, for each key; each expires by itself."""

    def exists(self) -> bool: ...

    def get(self, user_key: tuple[Any, ...], /) -> Any:
        """The row, or None where there is none."""

    def contains(self, user_key: tuple[Any, ...], /) -> bool: ...

    def put(self, user_key: tuple[Any, ...], row: tuple[Any, ...], /) -> None: ...

    def remove(self, user_key: tuple[Any, ...], /) -> None:
        """Forget one; there may be none."""

    def items(self) -> Iterator[tuple[Any, Any]]:
        """All there are now, whatever is put or removed meanwhile."""

    def clear(self) -> None: ...


class MergingState(Protocol):
    """What was added, made into one row for each key: reducing and aggregating state."""

    def exists(self) -> bool: ...

    def get(self) -> Any:
        """What has become of all that was added, or None where nothing was."""

    def add(self, value: Any, /) -> None: ...

    def clear(self) -> None: ...


class OpaqueState(Protocol):
    """One Python object for each key."""

    def exists(self) -> bool: ...

    def get(self) -> Any:
        """A new copy each time, or None where there is none: `update` it to keep a change."""

    def update(self, value: Any, /) -> None: ...

    def clear(self) -> None: ...


class KeyStates(ABC):
    """The states and timers of a `KeyProcessor` in one subtask, as `open` is given them.

    A state is declared once, in `open`, under a name of its own, and speaks of the key whose rows
    or timer are being handled; elsewhere it raises. Schemas are DDL such as
    `"n long, last timestamp"` or a `StructType`, with arrays, maps and structs in them as you like.
    Rows are put in as tuples and come out as named tuples, instants as `datetime` in UTC. What is
    handed out is a copy: only what is put back is kept.

    `ttl` is how long a row lives, `'1 hour'` or a `timedelta`, by the clock on the wall; from the
    moment it has expired no call answers it, and it is cleaned up in the background. With
    `ttl_refresh='write'` it lives that long after it was written, with `'read and write'` also
    after `get` or `items` answered it (`exists` and `contains` only look). As such a read has to be
    written down, that is done when the row gains more than a tenth of its time: it lives at least
    nine tenths of it after it was last read.
    """

    @abstractmethod
    def value(
        self,
        name: str,
        schema: Any,
        *,
        ttl: str | timedelta | None = None,
        ttl_refresh: TtlRefresh = "write",
    ) -> ValueState:
        """One row for each key."""

    @abstractmethod
    def list(
        self,
        name: str,
        schema: Any,
        *,
        ttl: str | timedelta | None = None,
        ttl_refresh: TtlRefresh = "write",
    ) -> ListState:
        """Rows in the order in which they came."""

    @abstractmethod
    def map(
        self,
        name: str,
        key_schema: Any,
        value_schema: Any,
        *,
        ttl: str | timedelta | None = None,
        ttl_refresh: TtlRefresh = "write",
    ) -> MapState:
        """Rows by user keys."""

    @abstractmethod
    def reducing(
        self,
        name: str,
        schema: Any,
        reduce: Callable[[Any, Any], tuple[Any, ...]] | Reduction | Mapping[str, Reduction],
        *,
        ttl: str | timedelta | None = None,
        ttl_refresh: TtlRefresh = "write",
    ) -> MergingState:
        """What is added are rows of the schema; `reduce` makes one of two.

        It is a function, or `"sum"`, `"min"` or `"max"` for all fields, or a dict with one of these
        for each field. With such a name the rows of all keys are columns of numbers, which take a
        fraction of the memory and the time: of whole numbers, floats and doubles, booleans, dates
        and timestamps; a sum is a `long` or a `double`. Null counts for nothing; a sum that leaves
        the range of a long fails the job. There is no `ttl` with a name.
        """

    @abstractmethod
    def aggregating(
        self,
        name: str,
        schema: Any,
        add: Callable[[Any, Any], tuple[Any, ...]],
        result: Callable[[Any], Any],
        *,
        ttl: str | timedelta | None = None,
        ttl_refresh: TtlRefresh = "write",
    ) -> MergingState:
        """What is added may be anything, and so may be what `get` answers.

        `schema` is that of the accumulator; `add` makes a new one of the old one, None at first,
        and what is added; `result` makes of it what `get` answers.
        """

    @abstractmethod
    def opaque(
        self,
        name: str,
        *,
        ttl: str | timedelta | None = None,
        ttl_refresh: TtlRefresh = "write",
    ) -> OpaqueState:
        """Any Python object that can be pickled; its class is in a module executors can import.

        Nobody but Python can read it, no schema says what it is, and a class that has changed may
        no longer fit: prefer a schema. Whoever can write to the checkpoint's directory can make an
        unpickling program run code of theirs, so nothing is unpickled by itself: only what the
        program declares here, by name, and only what was written as an opaque state. Use it where
        you would run code from that directory.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Forget a state of all keys, one of an older program too; there may be none."""

    @abstractmethod
    def register_timer(self, time: datetime, clock: TimerClock = "event") -> None:
        """Call `on_timer` for the key at hand when event time, or the clock, has come this far.

        To the millisecond, and never early. A timer that is there already stays one; one for a time
        that has passed fires before the next rows are handled.
        """

    @abstractmethod
    def delete_timer(self, time: datetime, clock: TimerClock = "event") -> None:
        """Forget this timer of the key at hand; there may be none."""

    @abstractmethod
    def timers(self, clock: TimerClock = "event") -> Iterator[datetime]:
        """Those of the key at hand that have not fired, ascending."""

    @property
    @abstractmethod
    def now(self) -> datetime:
        """The clock on the wall, as it was when the rows or timers at hand were begun with."""

    @property
    @abstractmethod
    def watermark(self) -> datetime | None:
        """How far event time has come, None while nobody knows; `datetime.max` at its end."""


class KeyProcessor(HearsOfCheckpoints, ABC):
    """What `stream.groupBy(...).process(...)` calls with the rows of one key after the other.

    One object is made on an executor for each subtask, at every start; all its methods are called
    there, by one thread. One more is made where the job is built and its `open` and `close` are
    called, to know its states and to find mistakes before anything runs. Whatever must survive a
    failure is kept in `states`; anything else is lost. The classic mistake is to keep something of
    a key in the object itself: after a failure, or with another parallelism, it is not there.
    """

    def open(self, states: KeyStates) -> None:
        """Declare the states and keep them. Called once, before all other methods.

        No key is at hand here, so states cannot be read yet.
        """

    @abstractmethod
    def process(self, key: Any, rows: Iterator[Any]) -> Iterable[Any] | None:
        """Take rows of one key, in the order in which they came; answer rows of the output schema.

        `key` and the rows are named tuples, `row.app_id` or `row["app_id"]`; what is answered are
        tuples, dicts or named tuples. Called once for each batch and key, so nothing is promised
        about how many rows come together.
        """

    def on_timer(self, key: Any, time: datetime, clock: TimerClock) -> Iterable[Any] | None:
        """A timer of this key has fallen due; answer rows of the output schema.

        Called in the order of times. Those of event time fire when the watermark has reached them,
        and at the end of all records; those of processing time never early, late if the subtask is
        busy, and not at all once the records have ended.
        """
        raise NotImplementedError(
            f"{type(self).__name__} registers timers but has no on_timer: write it"
        )

    def close(self) -> None:
        """Give everything back. Called once, also after a failure."""
