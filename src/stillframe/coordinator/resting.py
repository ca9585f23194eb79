"""The rest to which an attempt comes so that the next one can have another parallelism.

Its last checkpoint holds all that was read: behind that one's barriers the sources send nothing.
When what it prepared is committed too, the attempt has rested; if that checkpoint fails, the
rescale is given up and the job goes on as it was (`coordinator/rescaling` tells the whole story).
"""

from __future__ import annotations

from stillframe.coordinator.mail import AttemptRested
from stillframe.coordinator.rescaling import RescaleFailed, RescaleWanted
from stillframe.ids import CheckpointId


class Rest:
    """The rescale for which one attempt is to rest, if any. Used by the job's thread alone."""

    def __init__(self) -> None:
        self._wanted: RescaleWanted | None = None
        self._with: CheckpointId | None = None
        self._held_at_seconds = 0.0

    @property
    def is_wanted(self) -> bool:
        return self._wanted is not None

    def is_for(self, wanted: RescaleWanted) -> bool:
        """Whether this very one was asked for before."""
        return wanted is self._wanted

    def begin(self, wanted: RescaleWanted) -> None:
        """The attempt is to rest as soon as it can."""
        self._wanted = wanted

    def on_triggered(self, checkpoint_id: CheckpointId, now_seconds: float) -> None:
        """Sources are held behind this checkpoint's barriers from now on."""
        self._with, self._held_at_seconds = checkpoint_id, now_seconds

    def on_aborted(self, checkpoint_id: CheckpointId, reason: str) -> None:
        """Sources go on, if it was for this checkpoint that they were held."""
        if checkpoint_id == self._with:
            self.give_up(
                f"checkpoint {checkpoint_id}, from which it would have gone on, failed: {reason}"
            )

    def give_up(self, reason: str) -> None:
        """The job goes on as it was, if it does."""
        wanted, self._wanted, self._with = self._wanted, None, None
        if wanted is not None:
            wanted.on_outcome(RescaleFailed(f"{wanted.not_done}: {reason}"))

    def rested(self) -> AttemptRested:
        """All is committed."""
        assert self._wanted is not None, "nobody asked for a rest"
        return AttemptRested(self._wanted, self._held_at_seconds)
