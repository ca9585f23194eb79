"""Letters to the store that are carried out when a test says so, and not on another thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from stillframe.coordinator.ledger_mail import LedgerEvent, LedgerFailed
from stillframe.coordinator.ports import LedgerPort, Letter


class Letters(LedgerPort):
    """Two lines of letters, as an attempt has written them."""

    def __init__(self) -> None:
        self.writes: deque[Letter] = deque()
        self.deletions: deque[Letter] = deque()

    def write(self, letter: Letter) -> None:
        self.writes.append(letter)

    def delete(self, letter: Letter) -> None:
        self.deletions.append(letter)

    def carry_out(self, handle: Callable[[LedgerEvent], None]) -> None:
        """All of them, and all that follow from what becomes of them."""
        while self.writes or self.deletions:
            self.carry_out_next(self.writes or self.deletions, handle)

    def carry_out_next(self, line: deque[Letter], handle: Callable[[LedgerEvent], None]) -> None:
        try:
            event = line.popleft()()
        except Exception as error:
            event = LedgerFailed(error)
        if event is not None:
            handle(event)
