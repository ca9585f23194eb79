"""`stillframe.on(spark)`: where streams are read and jobs are started.

Also from then on the session reads snapshots: `spark.read.format("stillframe").load(path)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame as SparkDataFrame
from pyspark.sql import SparkSession

from stillframe.api.sources import Source
from stillframe.config import (
    SESSION_PREFIX,
    USUAL_CHECKPOINT_INTERVAL,
    JobConfig,
    is_storage_setting,
    job_config,
)
from stillframe.errors import BuildError, StartRefused
from stillframe.graph.logical import Node, Read
from stillframe.spark.formats import ours
from stillframe.spark.frames import snapshot_source
from stillframe.spark.frames.sources import frame_node
from stillframe.spark.internals import refuse_other_versions
from stillframe.spark.plans.output_modes import with_output_modes
from stillframe.spark.reader import StreamReader
from stillframe.spark.streams import Streams

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from stillframe.coordinator.query import Query
    from stillframe.graph.logical import Node
    from stillframe.spark.stream import Stream
    from stillframe.spark.writer import StreamWriter


class Still:
    """Stillframe on one Spark session. Made by `stillframe.on`; several may share a session."""

    def __init__(self, spark: SparkSession) -> None:
        _refuse_connect(spark)
        refuse_other_versions(spark.version, "Spark")
        self.spark = spark
        snapshot_source.register_when_asked(spark)

    def __repr__(self) -> str:
        context = self.spark.sparkContext
        running = ", ".join(query.name for query in self.streams.active) or "no query"
        return f"<Stillframe on {context.appName} ({context.master}): {running} running>"

    def _repr_html_(self) -> str:
        from stillframe.coordinator.query import table_html

        context = self.spark.sparkContext
        running = ", ".join(query.name for query in self.streams.active) or "none"
        told = {
            "application": str(context.appName),
            "master": str(context.master),
            "running": running,
        }
        return table_html("Stillframe", told)

    @property
    def readStream(self) -> StreamReader:
        return StreamReader(self)

    @property
    def streams(self) -> Streams:
        """The queries of this process, running ones and those that have ended."""
        return Streams()

    def stream(self, frame: DataFrame | Source) -> Stream:
        """The rows of any DataFrame, or of a source of your own, as a stream.

        Of a streaming DataFrame (`spark.readStream`) the whole plan is taken over; Spark runs
        nothing of it. A bounded one is evaluated by Spark when the job runs: a plan that gives the
        same rows in the same order each time feeds the slots directly; any other is written to
        files first, once.
        """
        from stillframe.spark.plans.translation import stream_of
        from stillframe.spark.stream import Stream

        if isinstance(frame, Source):
            return Stream.reading(self, Node(Read(frame), frame.schema))
        if isinstance(frame, SparkDataFrame) and frame.isStreaming:
            return stream_of(self, frame)
        return Stream.reading(self, frame_node(self.spark, frame))

    def writeStream(self, frame: DataFrame) -> StreamWriter:
        """The writer of a streaming DataFrame: `still.writeStream(df)` for `df.writeStream`."""
        from stillframe.spark.plans.translation import writer_of

        return writer_of(self, frame)

    def start(self, name: str, *writers: StreamWriter, **options: Any) -> Query:
        """Start one job that feeds all these writers; their sinks share every checkpoint.

        Job options such as checkpointLocation may be given here or to any of the writers.
        """
        from stillframe.spark.launch import start

        sinks, config = self.prepare(name, *writers, **options)
        return start(self.spark, name, sinks, config)

    def prepare(
        self, name: str, *writers: StreamWriter, **options: Any
    ) -> tuple[list[Node], JobConfig]:
        """What `start` would hand to Spark, after every check that can be made before it runs."""
        if not writers:
            raise BuildError(
                f"job {name!r} has no sink: give still.start(...) at least one stream.writeStream"
            )
        writers = tuple(each for writer in writers for each in writer.with_observers())
        given = [{key: ours.option_text(value) for key, value in options.items()}]
        for writer in writers:
            given += [writer.job_options(), writer.trigger_options()]
        merged = _merged(given)
        if any(writer.has_trigger for writer in writers) and self.says(
            "checkpointLocation", merged
        ):
            merged |= self.usual_interval(merged)
        stops = any(writer.stops_at_what_is_there for writer in writers)
        config = replace(self.job_config(merged), available_now=stops)
        sinks = [writer.sink_node(name, config) for writer in writers]
        return with_output_modes(writers, sinks), config

    def says(self, option: str, options: Mapping[str, str]) -> bool:
        """Whether these options or the session have this one."""
        names = [*options, *(name.removeprefix(SESSION_PREFIX) for name in self.spark.conf.getAll)]
        return option.lower() in (name.lower() for name in names)

    def usual_interval(self, options: Mapping[str, str]) -> dict[str, str]:
        """Of checkpoints that are wanted, where nothing says how often."""
        says = self.says("checkpointInterval", options)
        return {} if says else {"checkpointInterval": USUAL_CHECKPOINT_INTERVAL}

    def job_config(self, options: Mapping[str, str]) -> JobConfig:
        """These options, and below them the session's `spark.stillframe.*`."""
        return job_config(options, self.spark.conf.getAll, self.spark_setting)

    def spark_setting(self, name: str) -> str | None:
        """What Spark's configuration says of this name; None: nothing."""
        return self.spark.conf.get(name, None)


def _refuse_connect(spark: object) -> None:
    # By name: the classes of Spark Connect cannot be imported where its packages are missing.
    kind = type(spark).__module__
    if kind.startswith("pyspark.sql.connect"):
        raise StartRefused(
            "this is a Spark Connect session, whose coordinator would sit in a client that the"
            " executors cannot reach: use a classic session, SparkSession.builder.master(...)"
        )
    if not isinstance(spark, SparkSession):
        raise BuildError(f"stillframe.on(...) takes a SparkSession, not a {type(spark).__name__}")


def _merged(given: list[dict[str, str]]) -> dict[str, str]:
    """All job options; two writers of one job must not disagree."""
    merged: dict[str, tuple[str, str]] = {}
    for options in given:
        for name, value in options.items():
            before = merged.setdefault(name.lower(), (name, value))[1]
            if before != value:
                # What is said of the storage may be a secret.
                seen = "two values" if is_storage_setting(name) else f"{before!r} and {value!r}"
                raise BuildError(f"option {name} is {seen} in one job: give it once")
    return dict(merged.values())
