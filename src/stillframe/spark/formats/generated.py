"""`stillframe.from_generator`: a source out of a Python generator, with a schema of any kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from stillframe.api.sources import Source
from stillframe.connectors.generator import GeneratorSource
from stillframe.errors import BuildError
from stillframe.runtime.key_processing import schema_given
from stillframe.runtime.row_functions import batch_of, fitted, name_of
from stillframe.spark.types import to_arrow_schema


def from_generator(
    function: Callable[..., Any],
    schema: Any,
    *,
    splits: Sequence[str] | None = None,
    name: str | None = None,
) -> Source:
    """A source from a generator that yields rows with positions: `still.stream(from_generator(…))`.

    `function(position)` is called on an executor at every start, with None at first and then with
    the last position that a checkpoint has. It yields `(row, position)`: the row as a tuple, dict
    or named tuple of the schema, or a whole `RecordBatch`; and where to go on *after* it, any JSON
    value. It must yield the same rows after the same position each time. With `splits`, names of
    parts that are read side by side and spread over the slots, it is `function(split, position)`.

    Where there is nothing now it yields None: what was gathered goes on, other splits have their
    turn, and it is asked again. The end of the generator is the end of its split, for good. It runs
    in a thread of its own, so it may wait; while it does, rows that it has yielded may wait too.
    The classic mistake is to yield the position *of* the row: after a failure it comes twice.

    `schema` is a DDL string, a `StructType` or an Arrow schema; `name` is for people and for going
    on after a change of the job, the function's own name unless it is given.
    """
    called = name or name_of(function)
    found = schema_given(f"generator {called}", schema, to_arrow_schema)
    names = None if splits is None else tuple(splits)
    if names is not None and (not names or len(set(names)) < len(names)):
        raise BuildError(f"splits of generator {called} are different names, not {splits!r}")
    fits = {"schema": found, "function": called}
    return GeneratorSource(
        function, called, names, found, partial(batch_of, **fits), partial(fitted, **fits)
    )
