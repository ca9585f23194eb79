"""State handles: value, list, map, reducing, aggregating and opaque state of the key at work.

Theory of operation
-------------------
A handle is one state of a program. Which key it speaks of is the *scene*'s to say: the operator
sets the scene for each key before it calls the program, with the time of the batch. Rows are
checked and frozen on their way in and thawed on their way out (`state/rows`); where they are kept
is the backend's business.

With a time to live every write says when its row expires: the time of the batch plus the time to
live. A row whose time has come is not there for any reader, and is given up in passing.

Where reads count as well (`refreshes`), what `get` and `items` answer lives on from now. That makes
a write of a read, and a change to be snapshotted, so it is only done where the row gains more than
a tenth of its time to live: read all the time, it is written ten times in that span. A row so lives
at least nine tenths of its time to live after it was last read. Whether it would gain that much is
asked by its own name: a row that is still there at a later time needs nothing.

A program reads and writes its value state for every row it takes, and has many rows of one key at
a time. So a value handle takes the key's row *in hand* when it is first asked for, answers from
there, and puts what has changed back once, when the scene changes: another key, no key, another
time. While something is in hand the table does not have it. A snapshot is taken between two
batches, when there is no key; the table has the handle put back what it holds all the same, before
it is frozen.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic

import pyarrow as pa

from stillframe.errors import UserCodeError
from stillframe.state.backends import Key, ListTable, MapTable, ReducingTable, ValueTable
from stillframe.state.rows import Row

PICKLED = "$pickled"
"""The one field of an opaque state. No other state may have one of this name, and it is never null:
so what another state of the same name has written is not taken for a pickle."""
OPAQUE_SCHEMA = pa.schema([pa.field(PICKLED, pa.binary(), nullable=False)])
_REFRESHED_PER_TTL = 10
_NOT_IN_HAND: Any = object()
"""What a value handle has that knows nothing of the key yet; None is that there is no row."""


class Scene(Generic[Key]):
    """Which key is at work, and what time it is for it."""

    def __init__(self) -> None:
        self._key: Key | None = None
        self._now_ms = 0
        self._in_hand: list[ValueHandle[Key]] = []
        """Those that have taken something of this key in hand."""

    def enter(self, key: Key) -> None:
        for handle in self._in_hand:
            handle.put_back()
        self._in_hand.clear()
        self._key = key

    def leave(self) -> None:
        self.settle()
        self._key = None

    def settle(self) -> None:
        """Have all that is in hand put back where it is kept."""
        in_hand, self._in_hand = self._in_hand, []
        for handle in in_hand:
            handle.put_back()

    def take_in_hand(self, handle: ValueHandle[Key]) -> Key:
        """The key whose row it takes; it is told when to put it back."""
        if self._key is None:
            raise _no_key()
        self._in_hand.append(handle)
        return self._key

    @property
    def now_ms(self) -> int:
        return self._now_ms

    @now_ms.setter
    def now_ms(self, now_ms: int) -> None:
        self.settle()  # what was written lives from the time at which it was
        self._now_ms = now_ms

    @property
    def key(self) -> Key:
        if self._key is None:
            raise _no_key()
        return self._key


def _no_key() -> UserCodeError:
    return UserCodeError(
        "Implicit key not found in state store: a state belongs to a key, and none is at"
        " work here, so read and change states only while rows or timers are handled"
    )


class _Handle(Generic[Key]):
    """What all handles have in common."""

    def __init__(self, scene: Scene[Key], what: str, ttl_ms: int | None, refreshes: bool) -> None:
        assert ttl_ms is not None or not refreshes, "what does not expire is not refreshed"
        self._scene = scene
        self._what = what
        """What it is called in errors."""
        self._ttl_ms = ttl_ms
        self._refreshes = refreshes
        """Whether a read counts as well as a write."""

    def _expires_ms(self) -> int | None:
        return None if self._ttl_ms is None else self._scene.now_ms + self._ttl_ms

    def _fresh_ms(self) -> int:
        """What is still there at this time does not gain enough by a read."""
        assert self._ttl_ms is not None
        return self._scene.now_ms + self._ttl_ms - self._ttl_ms // _REFRESHED_PER_TTL - 1


class ValueHandle(_Handle[Key]):
    """One row for each key."""

    def __init__(
        self,
        scene: Scene[Key],
        table: ValueTable[Key],
        ttl_ms: int | None = None,
        *,
        refreshes: bool = False,
    ) -> None:
        super().__init__(scene, f"value state {table.declared.name}", ttl_ms, refreshes)
        self._table = table
        self._freeze = table.declared.value.frozen
        self._thaw = table.declared.value.thaw
        self._key: Key
        self._row: Row | None = _NOT_IN_HAND
        self._has_changed = False
        table.settle = scene.settle

    def exists(self) -> bool:
        if self._row is _NOT_IN_HAND:  # and stays there: to look is not to read
            return self._table.get(self._scene.key, self._scene.now_ms) is not None
        return self._row is not None

    def get(self) -> Row | None:
        row = self._row
        if row is _NOT_IN_HAND:
            row = self._taken()
        thaw = self._thaw
        return row if thaw is None or row is None else thaw(row)

    def update(self, row: Any) -> None:
        frozen = self._freeze(row, self._what)
        if self._row is _NOT_IN_HAND:
            self._key = self._scene.take_in_hand(self)
        self._row = frozen
        self._has_changed = True

    def clear(self) -> None:
        if self._row is _NOT_IN_HAND:
            self._key = self._scene.take_in_hand(self)
        self._row = None
        self._has_changed = True

    def put_back(self) -> None:
        """The key is about to change, or somebody looks at the table."""
        row, self._row = self._row, _NOT_IN_HAND
        if not self._has_changed:
            return
        self._has_changed = False
        if row is None:
            self._table.clear(self._key)
        else:
            expires_ms = None if self._ttl_ms is None else self._expires_ms()
            self._table.put(self._key, row, expires_ms)

    def _taken(self) -> Row | None:
        scene = self._scene
        self._key = key = scene.take_in_hand(self)
        if self._refreshes:
            self._row = self._refreshed(key)
        else:
            self._row = self._table.get(key, scene.now_ms)
        return self._row

    def _refreshed(self, key: Key) -> Row | None:
        row = self._table.get(key, self._fresh_ms())
        if row is None:
            row = self._table.get(key, self._scene.now_ms)
            self._has_changed = row is not None
        return row


class ListHandle(_Handle[Key]):
    """Rows in the order in which they came, for each key."""

    def __init__(
        self,
        scene: Scene[Key],
        table: ListTable[Key],
        ttl_ms: int | None = None,
        *,
        refreshes: bool = False,
    ) -> None:
        super().__init__(scene, f"list state {table.declared.name}", ttl_ms, refreshes)
        self._table = table
        self._type = table.declared.value

    def exists(self) -> bool:
        return bool(self._table.get(self._scene.key, self._scene.now_ms))

    def get(self) -> Iterator[Row]:
        rows = self._table.get(self._scene.key, self._scene.now_ms)
        if self._refreshes and rows:
            self._refresh(rows)
        return map(self._type.thawed, rows)

    def _refresh(self, rows: Sequence[Row]) -> None:
        """All of them, as one list is written as a whole."""
        if len(self._table.get(self._scene.key, self._fresh_ms())) < len(rows):
            self._table.put(self._scene.key, rows, self._expires_ms())

    def put(self, rows: Iterable[Any]) -> None:
        self._table.put(self._scene.key, self._frozen(rows), self._expires_ms())

    def append(self, row: Any) -> None:
        frozen = self._type.frozen(row, self._what)
        self._table.append(self._scene.key, [frozen], self._expires_ms())

    def extend(self, rows: Iterable[Any]) -> None:
        self._table.append(self._scene.key, self._frozen(rows), self._expires_ms())

    def clear(self) -> None:
        self._table.clear(self._scene.key)

    def _frozen(self, rows: Iterable[Any]) -> list[Row]:
        frozen = [self._type.frozen(row, self._what) for row in rows]
        if not frozen:
            raise UserCodeError(
                f"{self._what} is given an empty list (Spark: Cannot write empty list values to"
                " State Store): call clear() for a list that has nothing in it"
            )
        return frozen


class MapHandle(_Handle[Key]):
    """Rows by user keys, for each key."""

    def __init__(
        self,
        scene: Scene[Key],
        table: MapTable[Key],
        ttl_ms: int | None = None,
        *,
        refreshes: bool = False,
    ) -> None:
        super().__init__(scene, f"map state {table.declared.name}", ttl_ms, refreshes)
        assert table.declared.user_key is not None, "a map is found by user keys"
        self._table = table
        self._user_key = table.declared.user_key
        self._type = table.declared.value

    def exists(self) -> bool:
        return next(self._table.items(self._scene.key, self._scene.now_ms), None) is not None

    def get(self, user_key: Any) -> Row | None:
        found_by = self._found_by(user_key)
        row = self._table.get(self._scene.key, found_by, self._scene.now_ms)
        if self._refreshes and row is not None:
            self._refresh(found_by, row)
        return None if row is None else self._type.thawed(row)

    def _refresh(self, found_by: Row, row: Row) -> None:
        if self._table.get(self._scene.key, found_by, self._fresh_ms()) is None:
            self._table.put(self._scene.key, found_by, row, self._expires_ms())

    def contains(self, user_key: Any) -> bool:
        found_by = self._found_by(user_key)
        return self._table.get(self._scene.key, found_by, self._scene.now_ms) is not None

    def put(self, user_key: Any, row: Any) -> None:
        frozen = self._type.frozen(row, self._what)
        self._table.put(self._scene.key, self._found_by(user_key), frozen, self._expires_ms())

    def remove(self, user_key: Any) -> None:
        self._table.remove(self._scene.key, self._found_by(user_key))

    def items(self) -> Iterator[tuple[Row, Row]]:
        thaw_key, thaw = self._user_key.thawed, self._type.thawed
        rows = self._table.items(self._scene.key, self._scene.now_ms)
        if self._refreshes:
            found = list(rows)
            for each in found:
                self._refresh(*each)
            rows = iter(found)
        return ((thaw_key(user_key), thaw(row)) for user_key, row in rows)

    def clear(self) -> None:
        self._table.clear(self._scene.key)

    def _found_by(self, user_key: Any) -> Row:
        return self._user_key.frozen(user_key, f"the user key of {self._what}")


def _stopped() -> RuntimeError:
    """As in a generator: whatever iterates the program must not take it for an end."""
    return RuntimeError("the function of a state raised StopIteration")


class ReducingHandle(Generic[Key]):
    """One row for each key, made of all that were added by a function of two rows."""

    def __init__(self, value: ValueHandle[Key], reduce: Callable[[Row, Row], Any]) -> None:
        self._value = value
        self._reduce = reduce

    def exists(self) -> bool:
        return self._value.exists()

    def get(self) -> Row | None:
        return self._value.get()

    def add(self, row: Any) -> None:
        before = self._value.get()
        try:
            reduced = row if before is None else self._reduce(before, row)
        except StopIteration as error:
            raise _stopped() from error
        self._value.update(reduced)

    def clear(self) -> None:
        self._value.clear()


class NamedReducingHandle(Generic[Key]):
    """One row for each key, made of all that were added by reductions the engine knows."""

    def __init__(self, scene: Scene[Key], table: ReducingTable[Key]) -> None:
        self._scene = scene
        self._table = table
        self._type = table.declared.value
        self._what = f"reducing state {table.declared.name}"

    def exists(self) -> bool:
        return self._table.get(self._scene.key) is not None

    def get(self) -> Row | None:
        row = self._table.get(self._scene.key)
        return None if row is None else self._type.thawed(row)

    def add(self, row: Any) -> None:
        self._table.add(self._scene.key, self._type.frozen(row, self._what))

    def clear(self) -> None:
        self._table.clear(self._scene.key)


class AggregatingHandle(Generic[Key]):
    """One accumulator for each key; what is added and what is answered may be anything."""

    def __init__(
        self,
        value: ValueHandle[Key],
        add: Callable[[Row | None, Any], Any],
        result: Callable[[Row], Any],
    ) -> None:
        self._value = value
        self._add = add
        self._result = result

    def exists(self) -> bool:
        return self._value.exists()

    def get(self) -> Any:
        """The result, or None where nothing has been added."""
        kept = self._value.get()
        try:
            return None if kept is None else self._result(kept)
        except StopIteration as error:
            raise _stopped() from error

    def add(self, value: Any) -> None:
        """`add` is called with the accumulator, None at first, and the value."""
        kept = self._value.get()
        try:
            added = self._add(kept, value)
        except StopIteration as error:
            raise _stopped() from error
        self._value.update(added)

    def clear(self) -> None:
        self._value.clear()


class OpaqueHandle(Generic[Key]):
    """One Python object for each key, whatever it is: kept as its pickle.

    It is pickled when it is put and unpickled whenever it is asked for, so that what is done to an
    object afterwards stays between the program and itself until `update`.
    """

    def __init__(self, value: ValueHandle[Key], name: str) -> None:
        self._value = value
        self._name = name

    def exists(self) -> bool:
        return self._value.exists()

    def get(self) -> Any:
        """A new object each time, or None where nothing has been put."""
        kept = self._value.get()
        if kept is None:
            return None
        try:
            return pickle.loads(kept[0])
        except Exception as error:
            raise UserCodeError(
                f"opaque state {self._name} holds an object that cannot be made here"
                f" ({type(error).__name__}: {error}): let its class be where it was, or give the"
                " state another name and start over"
            ) from error

    def update(self, value: Any) -> None:
        try:
            pickled = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise UserCodeError(
                f"opaque state {self._name} is given a {type(value).__name__} that cannot be"
                f" pickled ({type(error).__name__}: {error}): give an object whose class is in a"
                " module that executors can import"
            ) from error
        self._value.update((pickled,))

    def clear(self) -> None:
        self._value.clear()
