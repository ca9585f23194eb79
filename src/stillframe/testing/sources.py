"""Sources that follow a script, faults included: the fault is an item of the input.

    ScriptedSource(schema, ((batch, Die(marker), batch), (batch, Wait(gate), batch)))

reads two splits; the first kills its own slot after its first batch, once; the second stands still
until the gate is opened.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, cast

import pyarrow as pa

from stillframe.api.sources import (
    EndOfData,
    NothingYet,
    Polled,
    Source,
    SourceContext,
    SourceReader,
    Split,
)
from stillframe.errors import StorageError

_LOOK_AGAIN_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Gate:
    """Something a test opens and a slot, in whatever process, waits for: a file."""

    path: str

    def open(self) -> None:
        Path(self.path).touch()

    def close(self) -> None:
        Path(self.path).unlink(missing_ok=True)

    @property
    def is_open(self) -> bool:
        return os.path.exists(self.path)

    def await_open(self, seconds_max: float = 60.0) -> None:
        """Stand still, and all that this thread does with it. Raises if nobody opens it."""
        deadline = time.monotonic() + seconds_max
        while not self.is_open:
            if time.monotonic() > deadline:
                raise StorageError(f"nobody opened {self.path} within {seconds_max:g} s")
            time.sleep(_LOOK_AGAIN_SECONDS)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing comes until the gate is open."""

    gate: Gate


@dataclass(frozen=True, slots=True)
class Die:
    """Kill the process that reads this, as `kill -9` would; the first to read it opens the gate,
    and whoever reads it then passes."""

    once: Gate


@dataclass(frozen=True, slots=True)
class Fail:
    """Reading raises this error, every time."""

    error: Exception


Item: TypeAlias = pa.RecordBatch | Wait | Die | Fail


@dataclass(frozen=True)
class ScriptedSource(Source):
    """One split per script; a position counts the items that have been passed."""

    item_schema: pa.Schema
    scripts: tuple[tuple[Item, ...], ...]
    name: str = "scripted"

    @property
    def schema(self) -> pa.Schema:
        return self.item_schema

    def splits(self, parallelism: int) -> list[Split]:
        return [Split(f"script-{index}", {"next": 0}) for index in range(len(self.scripts))]

    def open(self, splits: Sequence[Split], context: SourceContext) -> SourceReader:
        return _ScriptedReader(self.scripts, splits)

    def describe(self) -> str:
        return self.name


class _ScriptedReader(SourceReader):
    def __init__(self, scripts: Sequence[Sequence[Item]], splits: Sequence[Split]) -> None:
        self._scripts = scripts
        self._next = {split.id: cast(int, split.position["next"]) for split in splits}
        self._turn = list(self._next)
        self._polled: str | None = None

    def poll(self) -> Polled:
        """The splits in turn, so that one that waits does not keep the others waiting."""
        waiting = False
        for split_id in list(self._turn):
            self._turn.remove(split_id)
            polled = self._advance(split_id)
            if isinstance(polled, EndOfData):
                continue
            self._turn.append(split_id)
            if isinstance(polled, pa.RecordBatch):
                self._polled = split_id
                return polled
            waiting = True
        return NothingYet(_LOOK_AGAIN_SECONDS) if waiting else EndOfData()

    def splits(self) -> list[Split]:
        return [Split(split_id, {"next": at}) for split_id, at in self._next.items()]

    def open_splits(self) -> frozenset[str]:
        return frozenset(
            split_id
            for split_id in self._turn
            if self._next[split_id] < len(self._script(split_id))
        )

    def polled_split(self) -> str | None:
        return self._polled

    def close(self) -> None:
        """Nothing is held."""

    def _script(self, split_id: str) -> Sequence[Item]:
        return self._scripts[int(split_id.removeprefix("script-"))]

    def _advance(self, split_id: str) -> Polled:
        script = self._script(split_id)
        while self._next[split_id] < len(script):
            item = script[self._next[split_id]]
            match item:
                case Wait(gate) if not gate.is_open:
                    return NothingYet(_LOOK_AGAIN_SECONDS)
                case Die(once) if not once.is_open:
                    once.open()
                    os.kill(os.getpid(), signal.SIGKILL)
                case Fail(error):
                    raise error
            self._next[split_id] += 1
            if isinstance(item, pa.RecordBatch):
                return item
        return EndOfData()
