"""Where a query keeps its checkpoints that does not say where: a directory that goes with it."""

from __future__ import annotations

import logging

from pyspark.sql import SparkSession

from stillframe.coordinator.history import Event, JobEnded
from stillframe.coordinator.query import Query
from stillframe.errors import StartRefused
from stillframe.runtime.scratch import Scratch
from stillframe.spark.deployment.capacity import is_local

log = logging.getLogger("stillframe")

_made: dict[str, str | None] = {}
"""The directories, with the name of the query that each belongs to, if it has one and goes on."""
_scratches: dict[str, Scratch] = {}
"""What removes them."""


def temporary_location(spark: SparkSession, job: str, *, is_named: bool) -> str:
    """A new directory for the checkpoints of this job.

    That of the running query of this name, if there is one: so it is seen that there is.
    """
    for location, name in _made.items():
        if is_named and name == job:
            return location
    if not is_local(spark):
        raise StartRefused(
            f"job {job!r} has no checkpointLocation, and a temporary one would be on the driver's"
            " machine alone: set it to a directory that all machines share"
        )
    scratch = Scratch(purpose="temporary")
    location = str(scratch.directory)
    _made[location], _scratches[location] = job if is_named else None, scratch
    log.warning(
        "job %r keeps its checkpoints in %s, which is deleted when it ends: set checkpointLocation"
        " to be able to resume it",
        job,
        location,
    )
    return location


def remove_when_ended(query: Query) -> None:
    """Unless it fails: then somebody may want to look into it, until this process ends."""
    location = query.config.checkpoint_location

    def listen(event: Event) -> None:
        if isinstance(event, JobEnded) and event.outcome != "failed":
            _remove(str(location))
        elif isinstance(event, JobEnded):
            _made[str(location)] = None

    if location in _made:
        query.add_listener(listen)


def remove_all() -> None:
    """This process ends, and with it all its queries."""
    for location in list(_made):
        _remove(location)


def _remove(location: str) -> None:
    if location in _made:
        _scratches.pop(location).remove()
        del _made[location]
