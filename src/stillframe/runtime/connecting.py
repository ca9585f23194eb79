"""The user's function over two streams, as an operator: fed batch by batch, its rows kept."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np
import pyarrow as pa

from stillframe.api.functions import TwoInputFunction
from stillframe.errors import StillframeError, UserCodeError
from stillframe.graph.logical import Connect
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.key_groups import hash_columns, key_groups_of
from stillframe.protocol.manifests import KeyedState, OperatorSnapshot
from stillframe.runtime.operators import Background, StatefulOperator, described_file
from stillframe.runtime.row_functions import fitted
from stillframe.state.snapshots import write_keyed_snapshot
from stillframe.storage.paths import state_path
from stillframe.storage.store import Store


class TwoInputOperator(StatefulOperator):
    """An operator that is fed by two inputs; it stands at the head of its task."""

    @abstractmethod
    def process_second(self, batch: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        """Take one batch of the second input, answer what follows from it."""


class Connecting(TwoInputOperator):
    """Calls the user's function; what it raises names the function, not our insides."""

    STATE = "function"

    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        attempt: Attempt,
        operator: Connect,
        input_schema: pa.Schema,
        schema: pa.Schema,
        store: Store | None,
        max_parallelism: int,
    ) -> None:
        self._uid = uid
        self._subtask = subtask
        self._attempt = attempt
        self._operator = operator
        keys = operator.keys
        self._key_schema = None if keys is None else pa.schema(map(input_schema.field, keys))
        self._schema = schema
        self._store = store
        self._max_parallelism = max_parallelism
        self._has_finished = False
        self._function = self._made()

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        return self._called(lambda: self._function.process_first(batch))

    def process_second(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        return self._called(lambda: self._function.process_second(batch))

    def finish(self) -> Iterator[pa.RecordBatch]:
        if self._operator.keys is not None and not self._has_finished:
            yield from self._called(self._function.finish)
        self._has_finished = True

    def restore(self, batch: pa.RecordBatch) -> None:
        self._answer_of(lambda: self._function.restore(batch))

    def snapshot(self, checkpoint_id: CheckpointId) -> Background:
        rows = self._rows()
        if rows is None or rows.num_rows == 0:
            return lambda: ()
        assert self._store is not None, "a snapshot was asked for without a place to keep it"
        store = self._store
        path = state_path(checkpoint_id, self._uid, self._subtask, self._attempt, self.STATE)
        frozen = _Rows(rows, self._keys_of(rows), self._max_parallelism)
        return lambda: (described_file(self.STATE, write_keyed_snapshot(store, path, frozen)),)

    def described(
        self, checkpoint_id: CheckpointId, written: tuple[KeyedState, ...]
    ) -> OperatorSnapshot:
        if self._operator.keys is None:
            return OperatorSnapshot(self._uid, self._subtask, broadcast=written)
        return OperatorSnapshot(self._uid, self._subtask, keyed=written)

    def _rows(self) -> pa.Table | None:
        """Nothing once it has finished by key: a restored job must not finish those keys again."""
        if self._has_finished and self._operator.keys is not None:
            return None
        rows = self._answer_of(self._function.snapshot)
        if rows is None:
            return None
        if not isinstance(rows, pa.RecordBatch | pa.Table):
            raise UserCodeError(
                f"the snapshot of function {self._operator.name} is a {type(rows).__name__}: answer"
                " a pyarrow RecordBatch or Table, or None"
            )
        self._refuse_repeated(rows.schema.names)
        missing = set(self._operator.keys or ()) - set(rows.schema.names)
        if missing:
            raise UserCodeError(
                f"the snapshot of function {self._operator.name} has no column"
                f" {sorted(missing)[0]!r}: its rows must have the keys they are found by"
            )
        return pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows

    def _refuse_repeated(self, names: list[str]) -> None:
        if len(set(names)) < len(names):
            raise UserCodeError(
                f"the snapshot of function {self._operator.name} has two columns of one name"
                f" ({', '.join(names)}): give each its own"
            )

    def _keys_of(self, rows: pa.Table) -> pa.Table | None:
        """The keys with the types they have in the streams: by others they would not be found.

        Whoever goes by way of pandas gets times in other units, and numbers as floats.
        """
        if self._key_schema is None:
            return None
        keys = rows.select(self._key_schema.names)
        if keys.schema.types == self._key_schema.types:
            return keys
        nullable = pa.schema([field.with_nullable(True) for field in self._key_schema])
        try:
            return keys.cast(nullable)
        except pa.ArrowException as error:
            raise UserCodeError(
                f"the snapshot of function {self._operator.name} has keys of other types than the"
                f" streams ({_in_words(keys.schema)}, not {_in_words(nullable)}), and they cannot"
                f" be cast ({error}): answer keys as they came"
            ) from error

    def _called(self, call: Callable[[], Iterable[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        try:
            yield from map(self._checked, self._iterable(call()))
        except StillframeError:
            raise
        except Exception as error:
            raise self._raised(error) from error

    def _answer_of(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            raise self._raised(error) from error

    def _made(self) -> TwoInputFunction:
        function = self._answer_of(self._operator.make)
        if not isinstance(function, TwoInputFunction):
            raise UserCodeError(
                f"{self._operator.name} made a {type(function).__name__}: connect wants what makes"
                " a TwoInputFunction"
            )
        return function

    def _raised(self, error: Exception) -> UserCodeError:
        return UserCodeError(
            f"function {self._operator.name} raised {type(error).__name__}: {error};"
            " correct it and start the job again, it resumes from its last checkpoint"
        )

    def _iterable(self, answer: Any) -> Iterable[Any]:
        if answer is None or isinstance(answer, pa.RecordBatch | pa.Table):
            raise UserCodeError(
                f"function {self._operator.name} answered"
                f" {'None' if answer is None else 'a ' + type(answer).__name__}: yield record"
                " batches, or answer a list of them, which may be empty"
            )
        return cast(Iterable[Any], answer)

    def _checked(self, made: Any) -> pa.RecordBatch:
        if not isinstance(made, pa.RecordBatch):
            raise UserCodeError(
                f"function {self._operator.name} yielded a {type(made).__name__}: connect wants"
                " pyarrow.RecordBatch objects"
            )
        return fitted(made, self._schema, self._operator.name)


class _Rows:
    """Rows at rest, to be written by key group; all in one where there are no keys."""

    def __init__(self, rows: pa.Table, keys: pa.Table | None, max_parallelism: int) -> None:
        self._rows = rows.combine_chunks()
        self._keys = keys
        self._max_parallelism = max_parallelism

    @property
    def snapshot_schema(self) -> pa.Schema:
        return self._rows.schema

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        if self._keys is None:
            yield 0, _one_batch(self._rows)
            return
        columns = _one_batch(self._keys).columns
        groups = key_groups_of(hash_columns(columns), self._max_parallelism)
        order = np.argsort(groups, kind="stable")
        bounds = np.searchsorted(groups.take(order), np.arange(self._max_parallelism + 1))
        for group in np.flatnonzero(np.diff(bounds)).tolist():
            rows = order[bounds[group] : bounds[group + 1]]
            yield group, _one_batch(self._rows.take(pa.array(rows)))


def _one_batch(rows: pa.Table) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [column.combine_chunks() for column in rows.columns], schema=rows.schema
    )


def _in_words(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
