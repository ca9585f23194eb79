"""The seam between state handles and where state is kept.

Theory of operation
-------------------
A backend keeps the states of one operator in one subtask. It names keys as it likes: `keys_of`
takes the keys of a whole batch as columns and answers a name for each of them, which is good until
`tidy` answers others; the heap answers small numbers, another backend bytes. All else is said with
these names: (state, key) or (state, key, user key) -> row.

Rows and user keys are frozen ones of `state/rows`. `expires_ms` is when a row stops being there, in
milliseconds since 1970, or None; who asks says what time it is, and never gets a row whose time has
come, whether it has been cleaned up or not.

Rules of this file
------------------
1. All methods are called by the loop thread.
2. How a snapshot is taken is for each backend to say: the heap freezes state by state, a database
   as a whole. What was frozen holds what was there then, and is read by a background thread.
3. A snapshot has the same columns whoever wrote it (`snapshot_schema`), so that one backend
   restores what another wrote.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

import pyarrow as pa

from stillframe.api.processors import Reduction
from stillframe.key_groups import Positions
from stillframe.state.key_places import keyed_by
from stillframe.state.rows import Row, RowType

USER_KEY = "__user_key"
VALUE = "__value"
EXPIRES = "__expires"
EXPIRES_TYPE = pa.timestamp("ms", "UTC")

Key = TypeVar("Key", bound=Hashable)


class Kind(StrEnum):
    """What a state is for its key."""

    VALUE = "value"
    LIST = "list"
    MAP = "map"


@dataclass(frozen=True)
class Declared:
    """A state as the program declares it."""

    name: str
    kind: Kind
    value: RowType
    user_key: RowType | None = None
    """Of a map: what its rows are found by."""
    expires: bool = False
    """Whether rows are written with a time at which they expire."""

    def snapshot_schema(self, key_schema: pa.Schema) -> pa.Schema:
        """Key columns, then the user key, the value, and when it expires. A list has one row for
        each of its elements, in their order."""
        fields = [pa.field(field.name, field.type) for field in key_schema]
        if self.user_key is not None:
            fields.append(pa.field(USER_KEY, self.user_key.type))
        fields.append(pa.field(VALUE, self.value.type))
        if self.expires:
            fields.append(pa.field(EXPIRES, EXPIRES_TYPE))
        schema = pa.schema(fields, {"kind": str(self.kind)})
        return keyed_by(schema, range(len(key_schema)))


class Table(ABC, Generic[Key]):
    """One state, of all keys of the subtask."""

    declared: Declared
    settle: Callable[[], None] | None = None
    """Has a handle put back what it holds of this state; called before all of it is looked at."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Another number after each change: two snapshots of one version hold the same."""

    @abstractmethod
    def clear(self, key: Key) -> None:
        """Forget all that is kept for this key."""

    @abstractmethod
    def restore(self, batch: pa.RecordBatch) -> None:
        """Take rows of a snapshot back."""


class ValueTable(Table[Key]):
    """At most one row for each key."""

    @abstractmethod
    def get(self, key: Key, now_ms: int) -> Row | None: ...

    @abstractmethod
    def put(self, key: Key, row: Row, expires_ms: int | None) -> None: ...


class ListTable(Table[Key]):
    """Rows in the order in which they came."""

    @abstractmethod
    def get(self, key: Key, now_ms: int) -> Sequence[Row]: ...

    @abstractmethod
    def put(self, key: Key, rows: Sequence[Row], expires_ms: int | None) -> None:
        """These, and none of those before."""

    @abstractmethod
    def append(self, key: Key, rows: Sequence[Row], expires_ms: int | None) -> None: ...

    @abstractmethod
    def entries(self, now_ms: int) -> Iterator[tuple[Key, Sequence[Row]]]:
        """All lists that are not empty; none of them changes meanwhile."""


class MapTable(Table[Key]):
    """At most one row for each user key of each key."""

    @abstractmethod
    def get(self, key: Key, user_key: Row, now_ms: int) -> Row | None: ...

    @abstractmethod
    def put(self, key: Key, user_key: Row, row: Row, expires_ms: int | None) -> None: ...

    @abstractmethod
    def remove(self, key: Key, user_key: Row) -> None:
        """Forget one; there may be none."""

    @abstractmethod
    def items(self, key: Key, now_ms: int) -> Iterator[tuple[Row, Row]]:
        """All there are when this is called, whatever is put or removed meanwhile."""


class ReducingTable(Table[Key]):
    """At most one row for each key, made of all that were added by reductions with names."""

    @abstractmethod
    def get(self, key: Key) -> Row | None: ...

    @abstractmethod
    def add(self, key: Key, row: Row) -> None: ...


class Backend(ABC, Generic[Key]):
    """All states of one operator in one subtask."""

    @abstractmethod
    def keys_of(self, columns: Sequence[pa.Array]) -> tuple[Positions, Sequence[Key]]:
        """A small number for each row, the same for the same key; and by it the key's name."""

    @abstractmethod
    def columns_of(self, keys: Sequence[Key]) -> list[pa.Array]:
        """The key columns of these keys."""

    @abstractmethod
    def values(self, declared: Declared) -> ValueTable[Key]: ...

    @abstractmethod
    def lists(self, declared: Declared) -> ListTable[Key]: ...

    @abstractmethod
    def maps(self, declared: Declared) -> MapTable[Key]: ...

    @abstractmethod
    def reduced(self, declared: Declared, functions: Sequence[Reduction]) -> ReducingTable[Key]:
        """With the reduction of each field; it is snapshotted as a value is."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Forget this state of all keys; it may be none."""

    @property
    @abstractmethod
    def tables(self) -> Sequence[Table[Key]]: ...

    @abstractmethod
    def tidy(self, now_ms: int) -> Mapping[Key, Key] | None:
        """Clean up a little. Names of keys that were answered before are void if this answers new
        ones: those by the old ones, of all keys that have any state."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Called once, also after a failure."""
