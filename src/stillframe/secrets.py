"""Values that nobody may read (passwords, keys, tokens), and how they are kept out of texts.

Rules of this file
------------------
1. A secret is read on the driver: from the environment, a file or Spark's configuration, or it is
   the text itself. Executors are sent the value, inside the pickled plan, as S3's keys are.
2. Whatever is made of a `Secret` without `reveal` shows `***`: its text, its repr, a format.
3. Every value that this process has seen is remembered, so that `masked` finds it in the text of
   an error which somebody else has written.
"""

from __future__ import annotations

import json
import os
import re
import traceback
from collections.abc import Callable
from urllib.parse import quote, quote_plus

from stillframe.errors import BuildError

HIDDEN = "***"
_NAMES = re.compile(
    r"^(?!.*credentials\.provider$).*(pass(word|wd|phrase)|pwd|secret|token|credential|authorization|jaas"
    r"|(access|account|api|encryption|private|shared|signing)[._-]?key|connection[._-]?string)",
    re.IGNORECASE,
)
_IN_ADDRESS = re.compile(r"://[^/\s:@]*:[^/\s@]+@|[?&;]\s*(password|pwd|token|secret)\s*=", re.I)
_SHORT = 4
_patterns: dict[str, re.Pattern[str]] = {}

Conf = Callable[[str], str | None]
"""Spark's configuration by name; None: it is not set."""


class Secret:
    """A value that shows as `***` wherever it is printed.

    Keep the object, and call `reveal` where the other system asks for the value. It survives
    pickling. On the driver a secret of the environment or a file is read again each time, so that
    one that was changed holds from the next attempt on.
    """

    __slots__ = ("_read",)

    def __init__(self, value: str) -> None:
        hide(value)
        self._read: Callable[[], str] = lambda: value

    @classmethod
    def from_option(cls, name: str, text: str, conf: Conf) -> Secret:
        """The one that an option's text names or is; raises if it is not where it should be."""
        kind, _, place = text.partition(":")
        readers = {"env": _of_environment, "file": _of_file}
        if kind == "conf":
            return cls(_of_conf(name, place, conf))
        if kind not in readers:
            return cls(text)
        made = cls("")
        made._read = lambda: readers[kind](name, place)
        made.reveal()
        return made

    def reveal(self) -> str:
        """The value itself, for whom it is meant and for nobody else."""
        value = self._read()
        hide(value)
        return value

    def __reduce__(self) -> tuple[type[Secret], tuple[str]]:
        return Secret, (self.reveal(),)

    def __repr__(self) -> str:
        return HIDDEN

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self.reveal() == other.reveal()

    def __hash__(self) -> int:
        return hash(Secret)


def is_secret_name(option: str) -> bool:
    """Whether an option is taken for a secret because it is called like one."""
    return _NAMES.search(option) is not None


def refuse_secret_in_address(option: str, text: str) -> None:
    """Raise for a password inside of an address, which is shown to everybody."""
    if _IN_ADDRESS.search(text):
        raise BuildError(
            f"option {option} has a password or token in its address, where everybody would see it:"
            " leave it out there and give it as an option of its own, such as password"
        )


def masked(text: str) -> str:
    """The text without any secret that this process knows."""
    for pattern in sorted(_patterns.values(), key=lambda each: -len(each.pattern)):
        text = pattern.sub(HIDDEN, text)
    return text


def shows_secret(error: BaseException) -> bool:
    """Whether Python would print a secret with this error, or with what it was raised from."""
    text = "".join(traceback.format_exception(error))
    return masked(text) != text


def hide(value: str) -> None:
    """Have `masked` find this value, also as it looks inside of a repr, JSON or a URL, and of
    several lines each."""
    if value in _patterns:
        return
    for part in {value, *value.splitlines()}:
        for form in {part, repr(part)[1:-1], json.dumps(part)[1:-1], quote(part), quote_plus(part)}:
            if form.strip() and form not in _patterns:
                # A short one may be a part of any word.
                around = r"(?<!\w){}(?!\w)" if len(form) < _SHORT else "{}"
                _patterns[form] = re.compile(around.format(re.escape(form)))


def _of_environment(option: str, variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise BuildError(
            f"option {option} is taken from the environment variable {variable!r}, which is not set"
            " on the driver: export it before the driver starts"
        )
    return value


def _of_file(option: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            value = file.read().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise BuildError(
            f"option {option} is taken from the file {path!r}, which the driver cannot read"
            f" ({reason}): correct the path, or let the driver read it"
        ) from None
    if not value:
        raise BuildError(f"option {option} is taken from the file {path!r}, which is empty")
    return value


def _of_conf(option: str, name: str, conf: Conf) -> str:
    value = conf(name)
    if not value:
        raise BuildError(
            f"option {option} is taken from Spark's configuration {name!r}, which is not set: give"
            f" it to the session, as with --conf {name}=..."
        )
    return value
