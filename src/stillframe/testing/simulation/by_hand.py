"""What a person does to a job that goes against its log: back to an older checkpoint, or anew.

Only jobs are asked whose sinks all write with marks, and whose guarantee is exactly-once: what is
visible can then be told apart by marks, and must be complete again, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

from stillframe.config import JobConfig
from stillframe.ids import NO_CHECKPOINT, CheckpointId
from stillframe.protocol.joblog import JobRecord
from stillframe.storage.paths import LOG_DIRECTORY, log_path, sequence_of
from stillframe.testing.simulation.checkers import Checkers
from stillframe.testing.simulation.jobs import SimulatedJob
from stillframe.testing.simulation.storage import JOB_DIRECTORY, Disk
from stillframe.testing.simulation.world import World

FIRST_JOB_DIRECTORY = "/checkpoints/first"
_ACT_CHANCE = 0.6
_ACT_SECONDS_MAX = 0.6

Act = Literal["older", "anew", "losses"]


class ByHand:
    """Each act ends all drivers, also one that is stalled: without its log a job has no fence. The
    next one is started as the person wants it; slots may go on for a while."""

    def __init__(
        self,
        world: World,
        disk: Disk,
        job: SimulatedJob,
        checkers: Checkers,
        end_drivers: Callable[[], None],
        kill_everybody: Callable[[], None],
        acts: Mapping[Act, int],
    ) -> None:
        """`acts`: how often each is to be done."""
        self._world = world
        self._disk = disk
        self._job = job
        self._checkers = checkers
        self._end_drivers = end_drivers
        self._kill_everybody = kill_everybody
        self._acts = dict(acts)
        self.random = world.own_random("by hand")
        self._wanted: CheckpointId | None = None
        self._begins_anew = False
        self._goes_back = acts["older"] > 0
        self._savepoint: str | None = None

    def config(self, config: JobConfig) -> JobConfig:
        """For the next driver: to go back is asked for once, to begin anew until it is so, and a
        savepoint is named until the job has a checkpoint of its own."""
        wanted, self._wanted = self._wanted, None
        if self._goes_back:
            config = replace(config, checkpoints_retained=max(2, config.checkpoints_retained))
        if self._begins_anew:
            return replace(config, fresh=True)
        if self._savepoint is not None and not self._checkers.has_checkpoint():
            return replace(config, restore_from=self._savepoint)
        return replace(config, restore_from=wanted)

    def on_begun(self) -> None:
        """An attempt has begun: the job is what was asked for, and its log says so."""
        self._begins_anew = False

    def perhaps_act(self, record: Callable[[], JobRecord | None]) -> None:
        """A checkpoint is complete: soon after it, sometimes, one of the acts is done."""
        left = [act for act, times in self._acts.items() if times]
        if left and self.random.random() < _ACT_CHANCE:
            act = partial(self._act, left[0], record)
            self._world.after(self.random.random() * _ACT_SECONDS_MAX, act)

    def _act(self, act: Act, record: Callable[[], JobRecord | None]) -> None:
        if self._wanted is not None or self._begins_anew or not self._acts[act]:
            return
        match act:
            case "older":
                is_done = self._restore_older(record())
            case "anew":
                is_done = self._begin_anew(record())
            case "losses":
                is_done = self._lose_everything()
        self._acts[act] -= is_done

    def _restore_older(self, record: JobRecord | None) -> bool:
        """One of those that are retained, not the newest."""
        older = record.checkpoints[:-1] if record is not None else ()
        if not older:
            return False
        self._wanted = self.random.choice(older).checkpoint_id
        self._world.note(f"somebody goes back to checkpoint {self._wanted}")
        self._end_drivers()
        self._checkers.go_back_to(self._wanted)
        return True

    def _begin_anew(self, record: JobRecord | None) -> bool:
        """Because the log is damaged, or gone."""
        if record is None or record.newest is None:
            return False
        self._end_drivers()
        if self.random.random() < 0.5:
            numbers = map(sequence_of, self._disk.names(LOG_DIRECTORY))
            self._disk.rot(log_path(max(number for number in numbers if number is not None)))
        else:
            self._disk.remove(f"{JOB_DIRECTORY}/{LOG_DIRECTORY}")
        self._world.note("the log is damaged, and somebody begins anew")
        self._begins_anew = True
        self._checkers.go_back_to(NO_CHECKPOINT)
        return True

    def _lose_everything(self) -> bool:
        """All the job has stored, with the machines it runs on; but not what is visible."""
        self._world.note("all that the job had stored is lost")
        self._end_everything()
        self._disk.remove(JOB_DIRECTORY)
        for outside in self._job.marked:
            outside.restart()
        self._checkers.begin_elsewhere(NO_CHECKPOINT)
        return True

    def start_second(self, address: str, taken_by: CheckpointId) -> None:
        """Another job, in another place, from a savepoint of the one that is over."""
        self._world.note(f"a second job starts from {address}")
        self._end_everything()
        self._disk.move(JOB_DIRECTORY, FIRST_JOB_DIRECTORY)
        self._savepoint = address
        self._checkers.begin_elsewhere(taken_by)

    def _end_everything(self) -> None:
        self._kill_everybody()
        self._disk.shut_out()
