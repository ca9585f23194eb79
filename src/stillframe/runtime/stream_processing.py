"""The user's function over a stream without keys, as an operator: its lists and copies kept.

What a checkpoint holds for this subtask is there when the function declares its states, in `open`.
States that the function does not declare any more are carried along, as they were, until it deletes
them; of a list of which every subtask was given all, each carries a share, so that it stays one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import pyarrow as pa

from stillframe.api.stream_functions import StreamFunction, SubtaskStates
from stillframe.errors import BuildError, StartRefused, UserCodeError
from stillframe.graph.logical import ProcessStream
from stillframe.ids import Attempt, CheckpointId, OperatorUid, SubtaskIndex
from stillframe.protocol.manifests import OperatorSnapshot, Redistribution
from stillframe.runtime.key_processing import OtherSchema, schema_given
from stillframe.runtime.keyed_functions import RowsAtRest
from stillframe.runtime.operators import Background, StatefulOperator
from stillframe.runtime.row_functions import fitted, in_batch, record_maker
from stillframe.runtime.state_files import StateFiles
from stillframe.state.backends import Declared, Kind
from stillframe.state.rows import RowType
from stillframe.state.subtask_rows import SubtaskList, SubtaskMap
from stillframe.storage.paths import quoted_name
from stillframe.storage.store import Store
from stillframe.user_code import calling, fail, lazily

_IN_WORDS: Mapping[Redistribution | None, str] = {
    None: "state by key",
    "dealt": "list",
    "united": "union list",
    "copied": "broadcast state",
}


@dataclass(frozen=True, slots=True)
class RestoredRows:
    """What a checkpoint holds of one state for one subtask."""

    how: Redistribution
    batches: list[pa.RecordBatch]


class StreamProcessing(StatefulOperator):
    """Calls the user's function; what it raises names the function, not our insides."""

    def __init__(
        self,
        uid: OperatorUid,
        subtask: SubtaskIndex,
        parallelism: int,
        attempt: Attempt,
        operator: ProcessStream,
        schema: pa.Schema,
        store: Store | None,
        restored: Mapping[str, RestoredRows],
    ) -> None:
        self._uid = uid
        self._subtask = subtask
        self._operator = operator
        self._name = f"function {operator.name}"
        self._schema = schema
        self._has_finished = False
        self._files = StateFiles(uid, subtask, attempt, store)
        self._states = _SubtaskStates(subtask, parallelism, restored, operator.other_schema)
        self._function = self._made()
        self._answer_of(lambda: self._function.open(self._states))
        self._states.is_open = False

    def process(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._made_of(self._function.process(batch))
        except (Exception, SystemExit) as error:
            fail(self._name, error, *in_batch(batch))

    def finish(self) -> Iterator[pa.RecordBatch]:
        if not self._has_finished:
            with calling(self._name, "the end of all records"):
                yield from self._made_of(self._function.finish())
        self._has_finished = True

    def close(self) -> None:
        self._answer_of(self._function.close)

    # --- snapshots

    def snapshot(self, checkpoint_id: CheckpointId, savepoint: Store | None = None) -> Background:
        self._answer_of(lambda: self._function.on_snapshot(checkpoint_id))
        kept = [
            (
                how,
                self._files.write(checkpoint_id, name, state.version, state.freeze, savepoint),
            )
            for name, how, state in self._states.kept(self._has_finished)
        ]
        return lambda: [(how, write()) for how, write in kept]

    def described(self, checkpoint_id: CheckpointId, written: Any) -> OperatorSnapshot:
        files = tuple(
            replace(state, redistribution=how)
            for how, named in written
            for state in self._files.written(checkpoint_id, [named])
        )
        return OperatorSnapshot(self._uid, self._subtask, broadcast=files)

    def completed(self, checkpoint_id: CheckpointId) -> None:
        self._files.completed(checkpoint_id)
        self._answer_of(lambda: self._function.on_checkpoint_complete(checkpoint_id))

    def aborted(self, checkpoint_id: CheckpointId) -> None:
        self._files.aborted(checkpoint_id)

    # --- calls

    def _made(self) -> StreamFunction:
        function = self._answer_of(self._operator.make)
        if not isinstance(function, StreamFunction):
            raise UserCodeError(
                f"{self._operator.name} made a {type(function).__name__}: process wants what makes"
                " a StreamFunction"
            )
        return function

    def _made_of(self, answer: Any) -> Iterator[pa.RecordBatch]:
        for made in lazily(self._iterable(answer)):
            if not isinstance(made, pa.RecordBatch):
                self._refuse(f"yielded a {type(made).__name__}: yield pyarrow.RecordBatch ones")
            yield fitted(made, self._schema, self._operator.name)

    def _iterable(self, answer: Any) -> Iterable[Any]:
        if answer is None or isinstance(answer, pa.RecordBatch | pa.Table):
            seen = "None" if answer is None else f"a {type(answer).__name__}"
            self._refuse(f"answered {seen}: yield record batches, or answer a list of them")
        made: Iterable[Any] = answer
        return made

    def _refuse(self, what: str) -> NoReturn:
        raise UserCodeError(f"function {self._operator.name} {what}")

    def _answer_of(self, call: Callable[[], Any]) -> Any:
        with calling(self._name):
            return call()


# --- states


def declared_states(operator: ProcessStream) -> list[tuple[Declared, Redistribution]]:
    """What the user's function keeps: it is opened for that, without rows, and closed again."""
    function = operator.make()
    states = _SubtaskStates(SubtaskIndex(0), 1, {}, operator.other_schema)
    try:
        function.open(states)
        return list(states.declared)
    finally:
        with contextlib.suppress(Exception):
            function.close()


class _Carried:
    """The rows of a state that the function does not declare."""

    version = 0

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows

    def freeze(self) -> _Carried:
        return self

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    @property
    def snapshot_schema(self) -> pa.Schema:
        return self._rows.schema

    def batches_by_key_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        return RowsAtRest(self._rows, None, 1).batches_by_key_group()

    def release(self) -> None:
        """Nothing was taken."""


_State = SubtaskList | SubtaskMap | _Carried


class _SubtaskStates(SubtaskStates):
    """What a function is given; what it declares is checked here."""

    def __init__(
        self,
        subtask: SubtaskIndex,
        parallelism: int,
        restored: Mapping[str, RestoredRows],
        other_schema: OtherSchema | None,
    ) -> None:
        self.is_open = True
        """Whether states may still be declared."""
        self._subtask = subtask
        self._parallelism = parallelism
        self._other_schema = other_schema
        self._restored = dict(restored)
        self._declared: dict[str, tuple[Redistribution, SubtaskList | SubtaskMap]] = {}
        self._carried: dict[str, tuple[Redistribution, _Carried]] | None = None

    @property
    def subtask(self) -> int:
        return self._subtask

    @property
    def parallelism(self) -> int:
        return self._parallelism

    def list(self, name: str, schema: Any) -> SubtaskList:
        return self._list(name, schema, "dealt")

    def union_list(self, name: str, schema: Any) -> SubtaskList:
        return self._list(name, schema, "united")

    def broadcast(self, name: str, key_schema: Any, value_schema: Any) -> SubtaskMap:
        self._refuse(name, "copied")
        key, value = self._rows(name, key_schema), self._rows(name, value_schema)
        made = SubtaskMap(Declared(name, Kind.MAP, value, key))
        self._restore(made, "copied")
        return made

    @property
    def declared(self) -> Iterator[tuple[Declared, Redistribution]]:
        return ((state.declared, how) for how, state in self._declared.values())

    def delete(self, name: str) -> None:
        self._restored.pop(name, None)
        if self._carried is not None:
            self._carried.pop(name, None)

    def kept(self, has_finished: bool) -> Iterator[tuple[str, Redistribution, _State]]:
        """All that belongs into a snapshot.

        After the end no list does: a restored job must not say again what was in it. But copies are
        still read by those who restore them.
        """
        if self._carried is None:
            self._carried = {
                name: (rows.how, _Carried(self._own_part(rows)))
                for name, rows in self._restored.items()
            }
        for name, (how, state) in self._declared.items():
            if how == "copied" or not has_finished:
                yield name, how, state
        for name, (how, carried) in self._carried.items():
            yield name, how, carried

    def _own_part(self, rows: RestoredRows) -> pa.Table:
        table = pa.Table.from_batches(rows.batches)
        if rows.how != "united":
            return table
        return table.take(
            pa.array(range(self._subtask, table.num_rows, self._parallelism), pa.int64())
        )

    def _list(self, name: str, schema: Any, how: Redistribution) -> SubtaskList:
        self._refuse(name, how)
        made = SubtaskList(Declared(name, Kind.LIST, self._rows(name, schema)))
        self._restore(made, how)
        return made

    def _restore(self, state: SubtaskList | SubtaskMap, how: Redistribution) -> None:
        name = state.declared.name
        self._declared[name] = (how, state)
        rows = self._restored.pop(name, None)
        for batch in [] if rows is None else rows.batches:
            state.restore(batch)

    def _rows(self, name: str, schema: Any) -> RowType:
        found = schema_given(f"state {name}", schema, self._other_schema)
        return RowType(found, record_maker, named=True)

    def _refuse(self, name: str, how: Redistribution) -> None:
        if not self.is_open:
            raise UserCodeError(
                f"state {name} is declared while records are handled: declare all states in open"
            )
        if not isinstance(name, str) or name.startswith("$"):
            raise UserCodeError(f"a state cannot be named {name!r}: choose a name without $")
        quoted_name(name, "state name", kept="_.")
        if name in self._declared:
            raise BuildError(f"State variable with name {name} has already been defined: rename it")
        found = self._restored.get(name)
        if found is not None:
            refuse_other_redistribution(name, found.how, how)


def refuse_other_redistribution(
    name: str, found: Redistribution | None, declared: Redistribution | None
) -> None:
    """Rows that one subtask had are not those that every subtask had; None: they have keys."""
    if found != declared:
        raise StartRefused(
            f"state {name!r} is a {_IN_WORDS[found]} in the checkpoint, and the function declares"
            f" it as a {_IN_WORDS[declared]}: give the new one another name, or its operator"
            " another uid"
        )
