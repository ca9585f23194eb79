"""A client of an event stream, for tests: reads event after event, each within a time."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

READ_SECONDS_MAX = 60.0


@dataclass(frozen=True)
class Told:
    kind: str
    id: str | None
    data: Any


class Following:
    """Connected when it is made; `refused` if it was not let in."""

    def __init__(
        self, port: int, path: str, last_id: str | None = None, token: str | None = None
    ) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READ_SECONDS_MAX)
        headers = {} if last_id is None else {"Last-Event-ID": last_id}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        self._connection.request("GET", path, headers=headers)
        self.answer = self._connection.getresponse()
        self.last_id: str | None = last_id
        self.signs_of_life = 0
        self.is_over = False

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self.answer.close()
        self._connection.close()

    def __iter__(self) -> Iterator[Told]:
        """Until the server ends it."""
        fields: dict[str, str] = {}
        while line := self.answer.readline():
            text = line.decode().rstrip("\n")
            name, _, value = text.partition(":")
            if text and name:
                fields[name] = value.removeprefix(" ")
            elif text:
                self.signs_of_life += 1
            elif fields:
                self.last_id = fields.get("id", self.last_id)
                yield Told(fields["event"], fields.get("id"), json.loads(fields["data"]))
                fields = {}
        self.is_over = True

    def until(self, is_wanted: Callable[[Told], bool]) -> list[Told]:
        """All that came up to the one that is wanted."""
        came = []
        for told in self:
            came.append(told)
            if is_wanted(told):
                return came
        raise AssertionError(f"the stream ended before that came: {came}")

    def next(self, kind: str) -> Told:
        return self.until(lambda told: told.kind == kind)[-1]
