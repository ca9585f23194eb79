"""Asks a driver over HTTP: one question at a time, and every wait limited.

Rules of this file
------------------
1. Whatever goes wrong becomes one sentence. `NoDriver` means that nobody answered at all; all else
   came from something that did.
2. The token goes to the address it was meant for: through no proxy, and along no redirection.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from stillframe.clock import Clock
from stillframe.errors import BuildError, StillframeError

_REQUEST_SECONDS_MAX = 10.0
_ANSWER_BYTES_MAX = 64 << 20
_PIECE_BYTES = 1 << 20
_POLL_SECONDS_FIRST, _POLL_SECONDS_MAX = 0.05, 1.0
_SHOWN_CHARACTERS_MAX = 200

Answer = dict[str, Any]
_T = TypeVar("_T")


class NoDriver(StillframeError):
    """Nobody answers at the address."""


class NotThere(StillframeError):
    """The driver answers, and does not know what it was asked about."""


class OperationFailed(StillframeError):
    """What was asked for was tried and failed; the driver says why."""


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *given: Any, **named: Any) -> None:
        return None


class DriverClient:
    """The HTTP interface of one driver, and as much time as there is for all questions to it."""

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout_seconds: float,
        clock: Clock,
        wait: Callable[[float], object],
    ) -> None:
        """`wait` lets so many seconds pass."""
        if token is not None and not (token.isascii() and token.isprintable()):
            raise BuildError("the token has signs that no token has: copy it once more")
        self.url = _checked_url(url)
        self.token = token
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._wait = wait
        self._deadline = clock.monotonic_seconds() + timeout_seconds
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), _NoRedirection()
        )

    def get(self, *path: str) -> Answer:
        return self._ask("GET", _joined(path), None)

    def post(self, *path: str, body: Mapping[str, Any] | None = None) -> Answer:
        return self._ask("POST", _joined(path), dict(body or {}))

    def patch(self, *path: str, **parameters: str) -> Answer:
        return self._ask("PATCH", f"{_joined(path)}?{urlencode(parameters)}", None)

    def await_operation(self, *path: str) -> Answer:
        """What came of an operation that a driver was asked for before."""

        def result() -> tuple[Answer] | None:
            answer = self.get(*path)
            is_over = _text_at(answer, "status", "id") == "COMPLETED"
            return (_result(answer),) if is_over else None

        return self.await_answer(result, "the operation is still under way")

    def await_answer(self, ask: Callable[[], tuple[_T] | None], otherwise: str) -> _T:
        """Ask again and again until there is an answer; `otherwise` says what is if none came."""
        pause_seconds = _POLL_SECONDS_FIRST
        while (answer := ask()) is None:
            self._wait(min(pause_seconds, self._left_seconds(otherwise)))
            self._left_seconds(otherwise)
            pause_seconds = min(_POLL_SECONDS_MAX, pause_seconds * 1.5)
        return answer[0]

    def _ask(self, method: str, path: str, body: Answer | None) -> Answer:
        left = self._left_seconds(f"{self.url} has not answered everything")
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with self._opener.open(request, timeout=min(left, _REQUEST_SECONDS_MAX)) as answer:
                return self._understood(self._read(answer), answer.status)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error) from error
        except urllib.error.URLError as error:
            raise self._nobody(str(error.reason)) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._nobody(f"{error}" or type(error).__name__) from error
        except ValueError as error:  # a host name that cannot be one
            raise BuildError(f"{self.url!r} cannot be asked: {error}") from error

    def _read(self, answer: Any) -> bytes:
        """Piece by piece: what comes drop by drop is waited for no longer than all else."""
        data = b""
        while len(data) <= _ANSWER_BYTES_MAX and (piece := answer.read1(_PIECE_BYTES)):
            data += piece
            self._left_seconds(f"{self.url} has not answered everything")
        return data

    def _nobody(self, why: str) -> NoDriver:
        return NoDriver(f"no driver answers at {self.url} ({why})")

    def _refusal(self, error: urllib.error.HTTPError) -> StillframeError:
        try:
            answer = self._understood(self._read(error), error.code)
            sentence = str(answer["errors"][0])
        except (StillframeError, OSError, LookupError, TypeError, http.client.HTTPException):
            return self._foreign(f"status {error.code} ({error.reason}) without a reason")
        if error.code == 401:
            sentence += "; on this machine it is in the registry, elsewhere give --token"
        return NotThere(sentence) if error.code == 404 else StillframeError(sentence)

    def _understood(self, data: bytes, status: int) -> Answer:
        if len(data) > _ANSWER_BYTES_MAX:
            raise self._foreign(f"more than {_ANSWER_BYTES_MAX >> 20} MB")
        try:
            answer = json.loads(data) if data.strip() else {}
        except (ValueError, RecursionError) as error:
            said = data[:_SHOWN_CHARACTERS_MAX].decode(errors="replace")
            raise self._foreign(f"status {status} and {said!r}, which is no JSON") from error
        if not isinstance(answer, dict):
            raise self._foreign(f"status {status} and a JSON {type(answer).__name__}")
        return answer

    def _foreign(self, what: str) -> StillframeError:
        return StillframeError(
            f"{self.url} answers with {what}: it is no driver of Stillframe; check the address"
        )

    def _left_seconds(self, sentence: str) -> float:
        left = self._deadline - self._clock.monotonic_seconds()
        if left <= 0:
            raise StillframeError(
                f"{sentence} after {self._timeout_seconds:g} s (--timeout); it may come to its end"
                " all the same"
            )
        return left


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good or any(char.isspace() for char in url):
        raise BuildError(f"{url!r} is no address of a driver: it looks like http://127.0.0.1:8081")
    return url.rstrip("/")


def _joined(path: tuple[str, ...]) -> str:
    return "".join(f"/{quote(part, safe='')}" for part in path)


def _result(answer: Answer) -> Answer:
    operation = answer.get("operation")
    if not isinstance(operation, dict):
        raise StillframeError(f"the driver does not say what came of it: {answer!r}")
    cause = operation.get("failure-cause", operation.get("failureCause"))
    if cause is not None:
        raise OperationFailed(_sentence_of(cause))
    return operation


def _sentence_of(cause: object) -> str:
    """Flink's failures are a class and a stack trace; ours say the sentence there."""
    if not isinstance(cause, dict):
        return str(cause)
    kind = str(cause.get("class", ""))
    text = str(cause.get("stack-trace", cause.get("message", ""))).strip()
    return (text.splitlines() or [kind or "it failed, nobody says why"])[0]


def _text_at(answer: Answer, *names: str) -> str | None:
    value: object = answer
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None
