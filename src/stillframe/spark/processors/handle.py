"""PySpark's `StatefulProcessorHandle`, and the states that it hands out, over ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import (
    ListState,
    MapState,
    StatefulProcessorHandle,
    ValueState,
)
from pyspark.sql.types import StructType

from stillframe.api.ddl import schema_of_ddl
from stillframe.api.programs import States
from stillframe.errors import UserCodeError
from stillframe.spark.processors.rows import row_maker
from stillframe.spark.types import to_arrow_schema
from stillframe.state.handles import (
    AggregatingHandle,
    ListHandle,
    MapHandle,
    ReducingHandle,
    ValueHandle,
)


class ProcessorHandle(StatefulProcessorHandle):
    """PySpark's handle, over our states."""

    def __init__(self, states: States) -> None:
        self._states = states

    def getValueState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ValueState:
        return ProcessorValueState(self._value(stateName, schema, ttlDurationMs))

    def getListState(
        self, stateName: str, schema: StructType | str, ttlDurationMs: int | None = None
    ) -> ListState:
        declared = arrow_schema_of(stateName, schema)
        return ProcessorListState(self._states.list(stateName, declared, ttlDurationMs, row_maker))

    def getMapState(
        self,
        stateName: str,
        userKeySchema: StructType | str,
        valueSchema: StructType | str,
        ttlDurationMs: int | None = None,
    ) -> MapState:
        user_key = arrow_schema_of(stateName, userKeySchema)
        declared = arrow_schema_of(stateName, valueSchema)
        return ProcessorMapState(
            self._states.map(stateName, user_key, declared, ttlDurationMs, row_maker),
            row_maker(tuple(declared.names)),
        )

    def getReducingState(
        self,
        stateName: str,
        schema: StructType | str,
        reduce: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]],
        ttlDurationMs: int | None = None,
    ) -> ReducingHandle[Any]:
        """Our own: `add` puts `reduce` of what is there and what is added in its place."""
        return ReducingHandle(self._value(stateName, schema, ttlDurationMs), reduce)

    def getAggregatingState(
        self,
        stateName: str,
        schema: StructType | str,
        add: Callable[[tuple[Any, ...] | None, Any], tuple[Any, ...]],
        result: Callable[[tuple[Any, ...]], Any],
        ttlDurationMs: int | None = None,
    ) -> AggregatingHandle[Any]:
        """Our own: `schema` is that of the accumulator, which `add` makes anew with each value
        (of None at first), and of which `result` makes what `get` answers."""
        return AggregatingHandle(self._value(stateName, schema, ttlDurationMs), add, result)

    def registerTimer(self, expiryTimestampMs: int) -> None:
        self._states.register_timer(expiryTimestampMs)

    def deleteTimer(self, expiryTimestampMs: int) -> None:
        self._states.delete_timer(expiryTimestampMs)

    def listTimers(self) -> Iterator[int]:
        return self._states.timers()

    def deleteIfExists(self, stateName: str) -> None:
        self._states.delete(stateName)

    def _value(self, name: str, schema: StructType | str, ttl_ms: int | None) -> ValueHandle[Any]:
        declared = arrow_schema_of(name, schema)
        return cast(ValueHandle[Any], self._states.value(name, declared, ttl_ms, row_maker))


def arrow_schema_of(state: str, schema: StructType | str) -> pa.Schema:
    """A schema as PySpark takes it; no JVM is asked, as executors have none."""
    if isinstance(schema, StructType):
        return to_arrow_schema(schema)
    if isinstance(schema, str):
        return schema_of_ddl(schema)
    raise UserCodeError(
        f"the schema of state {state} is a StructType or a DDL string, not {schema!r}: write for"
        ' example "count long"'
    )


class ProcessorValueState(ValueState):
    def __init__(self, handle: ValueHandle[Any]) -> None:
        self._handle = handle

    def exists(self) -> bool:
        return self._handle.exists()

    def get(self) -> tuple[Any, ...] | None:
        return self._handle.get()

    def update(self, newValue: tuple[Any, ...]) -> None:
        self._handle.update(newValue)

    def clear(self) -> None:
        self._handle.clear()


class ProcessorListState(ListState):
    def __init__(self, handle: ListHandle[Any]) -> None:
        self._handle = handle

    def exists(self) -> bool:
        return self._handle.exists()

    def get(self) -> Iterator[tuple[Any, ...]]:
        return self._handle.get()

    def put(self, newState: list[tuple[Any, ...]]) -> None:
        self._handle.put(newState)

    def appendValue(self, newState: tuple[Any, ...]) -> None:
        self._handle.append(newState)

    def appendList(self, newState: list[tuple[Any, ...]]) -> None:
        self._handle.extend(newState)

    def clear(self) -> None:
        self._handle.clear()


class ProcessorMapState(MapState):
    def __init__(self, handle: MapHandle[Any], make: Callable[[Iterable[Any]], Any]) -> None:
        self._handle = handle
        self._make = make

    def exists(self) -> bool:
        return self._handle.exists()

    def getValue(self, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        found = self._handle.get(key)
        return None if found is None else self._make(found)

    def containsKey(self, key: tuple[Any, ...]) -> bool:
        return self._handle.contains(key)

    def updateValue(self, key: tuple[Any, ...], value: tuple[Any, ...]) -> None:
        self._handle.put(key, value)

    def iterator(self) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
        return self._handle.items()

    def keys(self) -> Iterator[tuple[Any, ...]]:
        return (user_key for user_key, _ in self._handle.items())

    def values(self) -> Iterator[tuple[Any, ...]]:
        return (value for _, value in self._handle.items())

    def removeKey(self, key: tuple[Any, ...]) -> None:
        self._handle.remove(key)

    def clear(self) -> None:
        self._handle.clear()
