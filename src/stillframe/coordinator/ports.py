"""The ways out of an attempt: to slots, to the store, to sinks and enumerators on the driver."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from stillframe.coordinator.ledger_mail import LedgerEvent
from stillframe.ids import OperatorUid, SlotIndex
from stillframe.protocol.manifests import Manifest
from stillframe.protocol.messages import Order


class SlotsPort(ABC):
    """The way to the slots of the attempt. What is sent to one that is gone is lost."""

    @abstractmethod
    def send(self, slot: SlotIndex, order: Order) -> None: ...

    @abstractmethod
    def broadcast(self, order: Order) -> None: ...


Letter = Callable[[], LedgerEvent | None]
"""What is to be done on the store; what it returns reaches the job's thread as mail."""


class LedgerPort(ABC):
    """The way to the store: two lines of letters, each carried out later and in its order."""

    @abstractmethod
    def write(self, letter: Letter) -> None:
        """For what is to be kept, and whoever waits for it."""

    @abstractmethod
    def delete(self, letter: Letter) -> None:
        """For what nobody needs any more, now that what makes it needless is written. It delays no
        write. It may be given up, when the attempt ends or too much waits: the next sweep does it.
        """


class CommitsPort(ABC):
    """The way to the sinks that commit at the coordinator."""

    @abstractmethod
    def submit(self, manifest: Manifest) -> None:
        """Commit this epoch in the background; the answer comes as mail."""


class DiscoveriesPort(ABC):
    """The way to the enumerators of the sources."""

    @abstractmethod
    def ask(self, uid: OperatorUid) -> None:
        """Ask this source's enumerator for splits in the background; the answer comes as mail."""

    @abstractmethod
    def tell_complete(self, uid: OperatorUid, completed: Manifest) -> None:
        """Tell it in the background that this checkpoint is complete; of several, the newest."""
