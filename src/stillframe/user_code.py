"""Calls of code that is not ours: what it raises names that code, its line and its record.

Rules of this file
------------------
1. Nothing here runs for each row. Which record an error is about is found out when it is raised.
2. Where code that is not ours is iterated, its `StopIteration` is an error and not an end. A
   generator's is one by itself; `map`, `filter`, `chain` and `starmap` take one out of the function
   they call for their own end, so they are iterated here in their stead (`lazily`).
"""

from __future__ import annotations

import os
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, starmap
from typing import Any, NoReturn, cast

from stillframe.errors import (
    PY4J_CALLED,
    Blame,
    StillframeError,
    UserCodeError,
    telling_line,
)
from stillframe.secrets import masked, shows_secret

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = tuple(
    os.path.abspath(path) + os.sep
    for name, path in sysconfig.get_paths().items()
    if name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_SURE_TO_COME_AGAIN = (
    TypeError,
    AttributeError,
    NameError,
    ImportError,
    SyntaxError,
    NotImplementedError,
    SystemExit,
)
"""Errors of the code itself, and what it raises on purpose: it will again."""
_FRAMES_MAX = 20
_TRACEBACK_CHARACTERS_MAX = 6_000
_SHOWN_CHARACTERS_MAX = 300
_SAID_CHARACTERS_MAX = 2_000


@contextmanager
def calling(code: str, record: str | None = None, *, operator: str | None = None) -> Iterator[None]:
    """What is raised in here names the user's code, not our insides; our own errors pass."""
    try:
        yield
    except StillframeError as error:
        raise_without_secrets(error)
    except (Exception, SystemExit) as error:  # sys.exit() ends no thread of ours
        fail(code, error, record, operator=operator)


def fail(
    code: str,
    error: BaseException,
    record: str | None = None,
    rows: range | None = None,
    row: str | None = None,
    *,
    operator: str | None = None,
    function: Callable[..., Any] | None = None,
) -> NoReturn:
    """Raise what is known of an error that `code` has raised; our own errors pass.

    `row` is the record without its place in a batch; None: `record` does not tell any. Where its
    `function` has left no line, it is named by the one where it begins.
    """
    if isinstance(error, StillframeError):
        raise_without_secrets(error)
    error, row = _stopped_by(error), row or record
    frames = _own_frames(error)
    line = _telling_line(frames) or _first_line(function)
    blame = Blame(
        code=code,
        error=type(error).__name__,
        heals=not isinstance(error, _SURE_TO_COME_AGAIN),
        line=line,
        traceback=_kept(_printed(error, frames)),
        operator=operator,
        record=None if record is None else _kept(record),
        rows=rows,
        row=None if row is None else _kept(row),
    )
    said = _kept(shown(_said_by(error), _SAID_CHARACTERS_MAX))
    raise UserCodeError(
        f"{code} raised {blame.error}{': ' if said else ''}{said}"
        f"{f' ({line})' if line else ''}{'' if blame.heals else _CORRECT_IT}",
        blame,
    ) from (None if shows_secret(error) else error)


def raise_without_secrets(error: StillframeError) -> NoReturn:
    """Raise our own error, in which a connector may have named what nobody may read."""
    if not shows_secret(error):
        raise error
    error.args = tuple(masked(str(each)) for each in error.args)
    raise error.with_traceback(None) from None


_CORRECT_IT = "; correct it and start the job again, it resumes from its last checkpoint"


def add_to_blame(error: UserCodeError, **known: Any) -> None:
    """Note what else is known of it, unless somebody nearer has."""
    if error.blame is None:
        return
    new = {name: value for name, value in known.items() if getattr(error.blame, name) is None}
    error.blame = replace(error.blame, **new)


def shown(value: Any, characters_max: int = _SHOWN_CHARACTERS_MAX) -> str:
    """A text, or the repr of anything else, of a bounded length; never raises."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception as error:  # it is the user's too
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= characters_max else text[:characters_max] + "…"


def _said_by(error: BaseException) -> str:
    """In one line: Spark's own errors bring pages of Java, and mostly the first says it."""
    try:
        first = str(error).strip().partition("\n")[0]
        return telling_line(str(error)) if first.startswith(PY4J_CALLED) else first
    except Exception as another:
        return f"(its text raised {type(another).__name__})"


def _kept(text: str) -> str:
    """As it can be written to a file, whatever the user's texts hold, and without secrets."""
    return masked(text).encode("utf-8", "backslashreplace").decode()


LAZY = (map, filter, chain, starmap)
"""The classes of what `lazily` is for; where it is asked for each key, these are compared first."""


def lazily(made: Iterable[Any]) -> Iterable[Any]:
    """The same, in which a `StopIteration` out of the user's function is an error."""
    if type(made) not in LAZY:
        return made
    parts = _parts_of(made)
    if parts is None:
        return made
    if type(made) is map:
        function, *inputs = parts
        return _mapped(function, [lazily(each) for each in inputs])
    if type(made) is filter:
        function, items = parts
        return _filtered(function, lazily(items))
    if type(made) is starmap:
        function, items = parts
        return _star_mapped(function, lazily(items))
    return _chained([lazily(each) for each in parts])


def _parts_of(made: Any) -> tuple[Any, ...] | None:
    """What it was made of; None: Python does not say, as for `itertools` from 3.14 on."""
    if type(made) in (map, filter):
        return cast(tuple[Any, ...], made.__reduce__()[1])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            _, arguments, *state = made.__reduce__()
    except TypeError:
        return None
    return cast(tuple[Any, ...], state[0] if state else arguments)


def _mapped(function: Callable[..., Any], inputs: list[Iterable[Any]]) -> Iterator[Any]:
    for values in zip(*inputs, strict=False):
        yield function(*values)


def _star_mapped(function: Callable[..., Any], inputs: Iterable[Any]) -> Iterator[Any]:
    for values in inputs:
        yield function(*values)


def _chained(parts: list[Iterable[Any]]) -> Iterator[Any]:
    """Of what is still to come and, if one of it has been begun, that one."""
    if not parts:
        return
    coming, *begun = parts
    yield from chain(*begun)
    for each in coming:
        yield from lazily(each)


def _filtered(function: Callable[[Any], Any] | None, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if item if function is None else function(item):
            yield item


def _stopped_by(error: BaseException) -> BaseException:
    """What a generator raises in place of a `StopIteration` is told as what it was."""
    cause = error.__cause__
    if isinstance(error, RuntimeError) and isinstance(cause, StopIteration | StopAsyncIteration):
        return cause
    return error


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith(_OURS)][-_FRAMES_MAX:]


def _telling_line(frames: list[traceback.FrameSummary]) -> str | None:
    """The innermost line that is in no library; of code that is in one, the outermost."""
    own = [frame for frame in frames if not _is_library(frame.filename)]
    if not frames:
        return None
    frame = own[-1] if own else frames[0]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _first_line(function: Callable[..., Any] | None) -> str | None:
    for each in (function, getattr(function, "func", None), vars(type(function)).get("__call__")):
        code = getattr(each, "__code__", None)
        if code is not None:
            return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
    return None


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or any(directory in file for directory in _PACKAGES)


def _printed(error: BaseException, frames: list[traceback.FrameSummary]) -> str:
    """As Python prints it; of what it was raised from, the same."""
    told: list[str] = []
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and not isinstance(cause, StopIteration):
        told += [*traceback.format_list(_own_frames(cause))]
        told += [*traceback.format_exception_only(cause), "\nwhich led to:\n\n"]
    told += ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    told += traceback.format_exception_only(error)
    text, most = "".join(told).rstrip(), _TRACEBACK_CHARACTERS_MAX
    return text if len(text) <= most else "…" + text[-most:]
