"""One way of a simulated control connection: in order, delayed, at times a message twice."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from stillframe.json_values import JsonObject
from stillframe.protocol.messages import Order, Report, message_to_json
from stillframe.testing.simulation.world import World

Message = TypeVar("Message", bound=Order | Report)

_ENCODED_SHARE = 0.2
_LATE_SECONDS_MAX = 3.0


class Line(Generic[Message]):
    """Brings orders to a slot, or its reports to the coordinator.

    Some lines send JSON as real ones do; to do so on all of them would cost more time than the
    schedules it takes away from are worth.
    """

    def __init__(
        self,
        world: World,
        repeats: float,
        from_json: Callable[[JsonObject], Message],
        deliver: Callable[[Message], None],
    ) -> None:
        self._world = world
        self._repeats = repeats
        """The share of messages that come twice."""
        self._from_json = from_json
        self._deliver = deliver
        self._is_encoded = world.chance(_ENCODED_SHARE)
        self._under_way: deque[Message] = deque()

    def send(self, message: Message) -> None:
        self._under_way.append(self._decoded(message) if self._is_encoded else message)
        self._world.soon(self._arrive)

    def deliver_all(self) -> None:
        """At once what is still under way."""
        while self._under_way:
            self._deliver(self._under_way.popleft())

    def _decoded(self, message: Message) -> Message:
        return self._from_json(cast(JsonObject, json.loads(json.dumps(message_to_json(message)))))

    def _arrive(self) -> None:
        if not self._under_way:
            return  # all were delivered at the end of the job
        # The oldest, whichever delay has run out: a connection never reorders.
        message = self._under_way.popleft()
        self._deliver(message)
        if self._repeats and self._world.chance(self._repeats):
            self._repeat(message)

    def _repeat(self, message: Message) -> None:
        """At once, or when it has long been overtaken."""
        if self._world.chance(0.5):
            self._deliver(message)
        else:
            self._world.soon(lambda: self._deliver(message), _LATE_SECONDS_MAX)
