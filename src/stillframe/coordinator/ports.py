"""The ways out of an attempt: to its slots, and to the sinks and enumerators on the driver."""

from __future__ import annotations

from abc import ABC, abstractmethod

from stillframe.ids import OperatorUid, SlotIndex
from stillframe.protocol.manifests import Manifest
from stillframe.protocol.messages import Order


class SlotsPort(ABC):
    """The way to the slots of the attempt. What is sent to one that is gone is lost."""

    @abstractmethod
    def send(self, slot: SlotIndex, order: Order) -> None: ...

    @abstractmethod
    def broadcast(self, order: Order) -> None: ...


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
