"""A line of letters to the store, as a thread would carry them out: later, in order, one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from stillframe.coordinator.ledger_mail import LedgerEvent, LedgerFailed
from stillframe.coordinator.ports import Letter
from stillframe.errors import Fenced, StillframeError
from stillframe.testing.simulation.world import World

_CALM_SECONDS_MAX = 0.05


class SimulatedLine:
    """Between any two letters, and between a letter and the news of it, anything may happen."""

    def __init__(
        self,
        world: World,
        seconds_max: float,
        do: Callable[[Callable[[], None]], None],
        deliver: Callable[[LedgerEvent], None],
        on_fenced: Callable[[], None] = lambda: None,
    ) -> None:
        """`do` takes a step of the process that the line belongs to, if that is alive."""
        self._world = world
        self._seconds_max = seconds_max
        self._do = do
        self._deliver = deliver
        self._on_fenced = on_fenced
        self._waiting: deque[Letter] = deque()
        self._news: deque[LedgerEvent] = deque()
        self._is_shut = False

    @property
    def is_idle(self) -> bool:
        """Whether everything is carried out, and everybody knows."""
        return not self._waiting and not self._news

    def put(self, letter: Letter) -> None:
        if self._is_shut:
            return
        self._waiting.append(letter)
        if len(self._waiting) == 1:
            self._go_on()

    def give_up(self) -> None:
        """All that waits, and what is not known yet."""
        self._waiting.clear()
        self._news.clear()

    def _go_on(self) -> None:
        seconds_max = _CALM_SECONDS_MAX if self._world.is_calm else self._seconds_max
        self._world.soon(lambda: self._do(self._carry_out), seconds_max)

    def _carry_out(self) -> None:
        if not self._waiting:
            return
        letter = self._waiting[0]
        try:
            event = letter()
        except StillframeError as error:
            event = LedgerFailed(error)
        self._waiting.popleft()
        if isinstance(event, LedgerFailed) and isinstance(event.error, Fenced):
            self._is_shut = True
            self._waiting.clear()
            self._on_fenced()
        if self._waiting:
            self._go_on()
        if event is not None:
            self._news.append(event)
            self._world.soon(lambda: self._do(self._arrive))

    def _arrive(self) -> None:
        # The oldest, whichever delay has run out: a mailbox never reorders.
        if self._news:
            self._deliver(self._news.popleft())
