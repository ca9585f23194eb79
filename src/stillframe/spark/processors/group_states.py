"""`applyInPandasWithState`: a function with PySpark's `GroupState`, as a processor.

What the function sees of a key is one value and one timeout. Both are kept as a processor keeps
them: two values, and a timer where a timeout is set.

Rules of this file
------------------
1. A timeout is said with each call, or there is none, as in Spark: a call that says none takes the
   one before away.
2. A timer that was set for another timeout than the one that is kept says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)
from pyspark.sql.types import StructType

from stillframe.errors import BuildError
from stillframe.user_code import lazily

if TYPE_CHECKING:
    import pandas

    Frames = Iterator[pandas.DataFrame]

TIME_MODES = {
    GroupStateTimeout.NoTimeout: "processingTime",  # which a function may ask for all the same
    GroupStateTimeout.ProcessingTimeTimeout: "processingTime",
    GroupStateTimeout.EventTimeTimeout: "eventTime",
}
_NONE = GroupState.NO_TIMESTAMP


def refuse_timeout(given: str) -> None:
    if given not in TIME_MODES:
        raise BuildError(
            f"applyInPandasWithState has no timeout {given!r}: say one of {', '.join(TIME_MODES)}"
        )


class WithGroupState(StatefulProcessor):
    """Calls the function with all rows of a key that come together, and when the key times out."""

    def __init__(
        self,
        function: Callable[[Any, Frames, GroupState], Iterable[pandas.DataFrame]],
        schema: StructType,
        timeout: str,
        columns: Sequence[str],
        *,
        has_watermark: bool,
    ) -> None:
        """`columns` are those of the rows that it is called with."""
        self._function = function
        self._schema = schema
        self._timeout = timeout
        self._columns = list(columns)
        self._has_watermark = has_watermark

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._value = handle.getValueState("state", self._schema)
        self._times_out = handle.getValueState("timeout", "at_ms long")

    def handleInputRows(
        self, key: Any, rows: Any, timerValues: TimerValues
    ) -> Iterator[pandas.DataFrame]:
        state = self._state(timerValues, has_timed_out=False)
        return self._called(key, rows, state)

    def handleExpiredTimer(
        self, key: Any, timerValues: TimerValues, expiredTimerInfo: ExpiredTimerInfo
    ) -> Iterator[pandas.DataFrame]:
        if self._timeout_ms() != expiredTimerInfo.getExpiryTimeInMs():
            return iter(())
        self._times_out.clear()
        import pandas

        no_rows = pandas.DataFrame(columns=self._columns)
        state = self._state(timerValues, has_timed_out=True)
        return self._called(tuple(key), iter((no_rows,)), state)

    def _called(self, key: Any, rows: Frames, state: GroupState) -> Frames:
        yield from lazily(self._function(key, rows, state))
        self._keep(state)

    def _state(self, times: TimerValues, *, has_timed_out: bool) -> GroupState:
        value = self._value.get() if self._value.exists() else None
        return GroupState(
            optionalValue=value,  # type: ignore[arg-type]
            batchProcessingTimeMs=times.getCurrentProcessingTimeInMs(),
            eventTimeWatermarkMs=times.getCurrentWatermarkInMs() if self._has_watermark else _NONE,
            timeoutConf=self._timeout,
            hasTimedOut=has_timed_out,
            watermarkPresent=self._has_watermark,
            defined=value is not None,
            updated=False,
            removed=False,
            timeoutTimestamp=_NONE,
            keyAsUnsafe=b"",
            valueSchema=self._schema,
        )

    def _keep(self, state: GroupState) -> None:
        if state._removed:
            self._value.clear()
        elif state._updated:
            self._value.update(tuple(state._value))
        before, now = self._timeout_ms(), int(state._timeout_timestamp)
        if now == before:
            return
        if before != _NONE:
            self._handle.deleteTimer(before)
        if now == _NONE:
            self._times_out.clear()
        else:
            self._times_out.update((now,))
            self._handle.registerTimer(now)

    def _timeout_ms(self) -> int:
        found = self._times_out.get() if self._times_out.exists() else None
        return _NONE if found is None else int(found[0])

    def close(self) -> None: ...
