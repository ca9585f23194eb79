"""`stream.writeStream`: PySpark's DataStreamWriter, where a job gets its sink and its settings."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource

from stillframe.api.sinks import Sink
from stillframe.config import (
    JobConfig,
    is_storage_setting,
    job_option_names,
    names_option,
    parse_count,
    parse_duration_seconds,
    parse_flag,
    refuse_unknown,
)
from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.file_encoders import FORMATS
from stillframe.connectors.file_options import PATTERNS, file_sink_from_options
from stillframe.connectors.file_sink import FileSink
from stillframe.connectors.staged import Handler, StagedSink
from stillframe.errors import BuildError
from stillframe.graph.finality import can_close
from stillframe.graph.logical import (
    Aggregate,
    Filter,
    MapInArrow,
    Node,
    Project,
    Read,
    SessionWindow,
    Write,
    walk,
)
from stillframe.graph.plan import describe
from stillframe.runtime.row_functions import name_of
from stillframe.spark.deployment.checks import refuse_times_in_orc
from stillframe.spark.deployment.temporary import temporary_location
from stillframe.spark.formats import choosing, ours
from stillframe.spark.formats.catalog_tables import refuse_other_columns, table_for
from stillframe.spark.formats.data_source_sinks import PythonSink
from stillframe.spark.formats.exact import exactly_once
from stillframe.spark.formats.foreach import ForeachFormat
from stillframe.spark.frames.epochs import Console, Finish, FrameOfEpoch, MemoryTable, as_it_is
from stillframe.spark.plans.joins import refuse_mode_of_joins
from stillframe.spark.plans.observed import Observing
from stillframe.spark.plans.output_modes import refuse_updates_in_chains
from stillframe.spark.plans.written_times import with_times_as_texts
from stillframe.storage.paths import STAGED_DIRECTORY, job_directory, quoted_name
from stillframe.storage.places import address_of, place_of

if TYPE_CHECKING:
    from stillframe.coordinator.query import Query
    from stillframe.spark.stream import Stream

log = logging.getLogger("stillframe")

_MEMORY_ROWS_MAX = "1000000"
_CONSOLE_ROWS = "20"
_INVALID = "Invalid streaming output mode: complete. This output mode is not supported"
_OUTPUT_MODES = ("append", "update", "complete")
_ROW_BY_ROW = (Project, Filter, MapInArrow)
"""What stays in the task of an aggregate, and says of its rows what it would say of all."""
_DELTA_PATH = re.compile(r"delta\.`([^`]+)`", re.IGNORECASE)


class StreamWriter:
    """Collects where a stream goes to; `start` begins the job. Changes in place, as in PySpark."""

    def __init__(
        self,
        stream: Stream,
        finish: Finish = as_it_is,
        *,
        observers: Sequence[StreamWriter] = (),
        is_unchanged: bool = False,
    ) -> None:
        self._stream = stream
        self._is_unchanged = is_unchanged
        """Whether the program was written for Spark, which passes over options nobody knows."""
        self._observers = observers
        self._last_steps = finish
        self._name: str | None = None
        self._format = choosing.chosen_sink("parquet")
        self._says_no_format = True
        self._output_mode = "append"
        self._options: dict[str, str] = {}
        self._function: Callable[[DataFrame, int], None] | None = None
        self._given_uid: str | None = None
        self._partition_by: tuple[str, ...] = ()
        self._trigger: str | None = None
        self._checkpoint_every: str | None = None

    # --- PySpark's -----------------------------------------------------------------------------

    def queryName(self, queryName: str) -> StreamWriter:
        """The job's name: its checkpoints are kept under it, and a restart finds them by it."""
        if not isinstance(queryName, str) or not queryName.strip():
            raise BuildError(f"queryName is a text that is not empty, not {queryName!r}")
        self._name = queryName
        return self

    def format(self, source: str | type[Sink] | Sink | type[DataSource]) -> StreamWriter:
        """A name of ours or one that a package has registered, or a class or instance; of a data
        source of Spark's the class, or the name that `spark.dataSource` knows it by."""
        self._format = choosing.chosen_sink(source, self._stream.still.spark)
        self._says_no_format = False
        return self

    def outputMode(self, outputMode: str) -> StreamWriter:
        if not isinstance(outputMode, str) or not outputMode.strip():
            raise BuildError(
                "[VALUE_NOT_NON_EMPTY_STR] Value for `outputMode` must be a non-empty string, got"
                f" '{outputMode}'."
            )
        if outputMode.lower() not in _OUTPUT_MODES:
            raise BuildError(
                f"[STREAMING_OUTPUT_MODE.INVALID] Invalid streaming output mode: {outputMode}."
                " Accepted output modes are 'Append', 'Complete', 'Update'."
            )
        self._output_mode = outputMode.lower()
        return self

    def option(self, key: str, value: Any) -> StreamWriter:
        """None takes the option back."""
        self._options = {k: v for k, v in self._options.items() if k.lower() != key.lower()}
        if value is not None:
            self._options[key] = ours.option_text(value)
        return self

    def options(self, **options: Any) -> StreamWriter:
        for key, value in options.items():
            self.option(key, value)
        return self

    def foreachBatch(self, func: Callable[[DataFrame, int], None]) -> StreamWriter:
        """Call `func(df, epoch)` on the driver with the rows of each completed epoch.

        Epochs come in order and without gaps. After a crash the last one may come a second time,
        with the same number: to be exact, ignore what was seen before. A function that has a
        parameter `mark` is given one: a name for these rows that no other epoch ever has, while
        numbers come again with other rows when an older checkpoint is restored. One that does
        ignore what it has seen is given as `stillframe.exactly_once(func)`.
        """
        if not callable(func):
            raise BuildError(f"foreachBatch takes a function of (df, epoch), not {func!r}")
        self._function = func
        return self

    def trigger(
        self,
        *,
        processingTime: str | None = None,
        once: bool | None = None,
        continuous: str | None = None,
        availableNow: bool | None = None,
        realTime: str | None = None,
    ) -> StreamWriter:
        """Say how often checkpoints are taken, or that the job stops at what is there.

        Records are always processed as they come; they show with the next checkpoint, so
        `processingTime` is the interval between two, and so is `continuous`, as in Spark. With
        `availableNow` or `once` the job reads
        what is there at its start and stops; started again, it reads what has come since.
        """
        if realTime is not None:
            raise BuildError(
                f"trigger(realTime={realTime!r}) is not there: records are processed as they come;"
                " say trigger(processingTime=...) for how often they show"
            )
        given = {
            "processingTime": processingTime,
            "continuous": continuous,
            "once": once,
            "availableNow": availableNow,
        }
        wanted = [name for name, value in given.items() if value]
        if len(wanted) != 1:
            raise BuildError(
                "trigger(...) takes one of processingTime, continuous, availableNow=True and"
                " once=True"
            )
        (self._trigger,) = wanted
        every = processingTime or continuous
        if every and parse_duration_seconds(self._trigger, every) == 0:
            every = None  # as often as is usual
        self._checkpoint_every = every
        return self

    def foreach(self, f: object) -> StreamWriter:
        """Call `f(row)` with each row of each completed epoch, in the slots; of an object,
        `open(partition_id, epoch_id)`, `process(row)` unless that answers False, `close(error)`.

        After a failure the same rows may come again, with the same two numbers.
        """
        self._format = choosing.Chosen("sink", "foreach", ForeachFormat(f))
        self._says_no_format = False
        self._function = None
        return self

    def partitionBy(self, *cols: str | list[str]) -> StreamWriter:
        """Write a directory for each value of these columns, which are not in the files then; of a
        table (delta, iceberg), by which columns it is partitioned."""
        names = cols[0] if len(cols) == 1 and isinstance(cols[0], list | tuple) else cols
        if not all(isinstance(name, str) for name in names):
            raise BuildError(f"partitionBy takes names of columns, not {names!r}")
        self._partition_by = tuple(str(name) for name in names)
        return self

    def clusterBy(self, *cols: str | list[str]) -> StreamWriter:
        """Refused: none of the sinks lays out its files by a clustering."""
        raise BuildError(
            f"clusterBy({', '.join(map(repr, cols))}) has no sink here that clusters rows: leave it"
            " out, or write in foreachBatch with df.writeTo(...)"
        )

    def toTable(
        self,
        tableName: str,
        format: str | None = None,
        outputMode: str | None = None,
        partitionBy: str | list[str] | None = None,
        queryName: str | None = None,
        **options: Any,
    ) -> Query:
        """Start the job with a table as its sink, which is created if there is none.

        Of format iceberg: `shop.views`, in the catalog that the options say. Of format delta: a
        path, as Spark spells it, "delta.`/lake/views`". Of files: a table of Spark's own catalog.
        """
        self._finish(None, format, outputMode, partitionBy, queryName, options)
        path = _DELTA_PATH.fullmatch(tableName)
        if path is not None and (self._is_own("delta") or self._says_no_format):
            self.format("delta").option("path", path[1])
        elif self._is_own("iceberg"):
            self.option("table", tableName)
        elif self._is_file:
            return self._start_into_catalog(tableName)
        else:
            raise BuildError(
                f"toTable({tableName!r}) needs .format('iceberg') and a name, a path of a Delta"
                " table, as delta.`/lake/views`, or a format of files: for other tables that only"
                " Spark knows, use foreachBatch with df.write.mode('append').saveAsTable(...)"
            )
        if ours.option_value(self._options, "createTable") is None:
            self.option("createTable", True)
        return self.start()

    def start(
        self,
        path: str | None = None,
        format: str | type[Sink] | Sink | type[DataSource] | None = None,
        outputMode: str | None = None,
        partitionBy: str | list[str] | None = None,
        queryName: str | None = None,
        **options: Any,
    ) -> Query:
        """Start the job; the arguments say last what the methods said first."""
        self._finish(path, format, outputMode, partitionBy, queryName, options)
        if self._is_unchanged:
            self._leave_out_unknown_options()
        name = self._name or "query"
        return self._stream.still.start(name, self, **self._checkpoints_unless_said(name))

    def _start_into_catalog(self, name: str) -> Query:
        spark, schema = self._stream.still.spark, self._stream.schema
        table = table_for(spark, name, self._format.name, schema, self._partition_by)
        refuse_other_columns(table, schema)
        if self._partition_by and self._partition_by != table.partition_by:
            raise BuildError(
                f"the table {name} is partitioned by {table.partition_by}, not by"
                f" {self._partition_by}: say the same, or leave partitionBy out"
            )
        self._partition_by = table.partition_by
        logged = {"sparkMetadata": "true"}  # as Spark reads a table that a stream has written
        self.format(table.format).options(**{**logged, **table.options, **self._options})
        return self.start(table.location)

    # --- Ours ------------------------------------------------------------------------------------

    def uid(self, name: str) -> StreamWriter:
        """Name the sink, so that what it has prepared finds it after changes of the job."""
        self._given_uid = name
        return self

    def with_observers(self) -> list[StreamWriter]:
        """This writer, and those of what is observed on the way to it."""
        for each in self._observers:
            each.outputMode(self._output_mode if each.aggregates() else "append")
        return [self, *self._observers]

    def job_options(self) -> dict[str, str]:
        """Those options that are the job's; one that is nobody's is refused."""
        owned = self._sink_options()
        return {name: text for name, text in self._options.items() if name not in owned}

    def trigger_options(self) -> dict[str, str]:
        """The job option that the trigger stands for, if any."""
        if self._checkpoint_every is None:
            return {}
        return {"checkpointInterval": self._checkpoint_every}

    @property
    def has_trigger(self) -> bool:
        return self._trigger is not None

    @property
    def stops_at_what_is_there(self) -> bool:
        return self._trigger in ("once", "availableNow")

    @property
    def output_mode(self) -> str:
        return self._output_mode

    def aggregates(self) -> list[Node]:
        """What makes the rows that may replace each other."""
        nodes = walk([self._stream.node], through_late=False)
        return [node for node in nodes if isinstance(node.operator, Aggregate)]

    def sink_node(self, job: str, config: JobConfig) -> Node:
        """The end of the graph. Everything that can be refused before the job runs is, here."""
        refuse_updates_in_chains(self._stream.node, self._output_mode)
        self._refuse_append_of_updates()
        self._refuse_updates_of_sessions()
        self._refuse_incomplete()
        self._refuse_unsorted()
        refuse_mode_of_joins(self._stream.node, self._output_mode)
        self._refuse_names_alike()
        self._refuse_trigger_without_end()
        return self._node(self._sink(job, config))

    # --- How it is built -------------------------------------------------------------------------

    def _finish(
        self,
        path: str | None,
        format: str | type[Sink] | Sink | type[DataSource] | None,
        output_mode: str | None,
        partition_by: str | list[str] | None,
        query_name: str | None,
        options: dict[str, Any],
    ) -> None:
        self.options(**options)
        if path is not None:
            self.option("path", path)
        if format is not None:
            self.format(format)
        if output_mode is not None:
            self.outputMode(output_mode)
        if partition_by:
            self.partitionBy(*([partition_by] if isinstance(partition_by, str) else partition_by))
        if query_name is not None:
            self.queryName(query_name)

    def _checkpoints_unless_said(self, job: str) -> dict[str, str]:
        """Where and how often a query takes checkpoints that does not say it: as Spark's does."""
        still = self._stream.still
        said = self.job_options() | self.trigger_options()
        if still.says("checkpointLocation", said):
            return still.usual_interval(said)
        usual = still.spark_setting("spark.sql.streaming.checkpointLocation")
        if usual is not None:
            place = usual if self._name is not None else f"{usual}/{uuid.uuid4()}"
            return {"checkpointLocation": place, **still.usual_interval(said)}
        if self._keeps_rows:
            if self._is_file and ours.option_value(self._options, "path") is None:
                return {}  # that comes first
            where = "files" if self._is_file else f"to {self._sink_name()}"
            raise BuildError(
                f"checkpointLocation must be specified for a query that writes {where}: say"
                " .option('checkpointLocation', ...), a directory that stays"
            )
        if self._is_own("noop") and not (self.has_trigger or self._observers):
            return {}
        location = temporary_location(still.spark, job, is_named=self._name is not None)
        return {"checkpointLocation": location, **still.usual_interval(said)}

    def _sink_name(self) -> str:
        return "foreachBatch" if self._function is not None else self._format.name

    def _is_own(self, *names: str) -> bool:
        return self._function is None and self._format.is_own and self._format.name in names

    @property
    def _is_file(self) -> bool:
        return self._is_own(*FORMATS)

    @property
    def _keeps_rows(self) -> bool:
        """Whether rows go where the next driver finds them again."""
        is_foreach = isinstance(self._format.of, ForeachFormat)
        return self._is_file or (self._is_made_of_options and not is_foreach)

    @property
    def _is_made_of_options(self) -> bool:
        """Whether the options say all about the sink; ours that need more are built here."""
        of = self._format.of
        is_built_here = isinstance(of, ours.OwnFormat) and not isinstance(of, ours.MadeOfOptions)
        return self._function is None and not is_built_here

    def _sink_options(self) -> dict[str, str]:
        """Those that are the sink's own."""
        own, of_job = self._own_options, self._job_options
        if own is None:
            jobs = {name.lower() for name in of_job}
            return {k: v for k, v in self._options.items() if k.lower() not in jobs}
        refuse_unknown(self._options, [*own, *of_job], f"the sink {self._sink_name()}")
        return {k: v for k, v in self._options.items() if names_option(k, own)}

    def _leave_out_unknown_options(self) -> None:
        """As Spark does it, which says nothing; here each is named."""
        if self._own_options is None:
            return
        known = [*self._own_options, *self._job_options]
        for name in [each for each in self._options if not names_option(each, known)]:
            of = self._sink_name()
            log.warning("option %s means nothing to the sink %s: no effect", name, of)
            del self._options[name]

    @property
    def _own_options(self) -> tuple[str, ...] | None:
        """None: the sink takes any."""
        return () if self._function is not None else self._format.option_names

    @property
    def _job_options(self) -> list[str]:
        return [*job_option_names(), *filter(is_storage_setting, self._options)]

    def _node(self, sink: Sink) -> Node:
        upstream = self._written.node
        return Node(Write(sink), upstream.schema, (upstream,), self._given_uid)

    def _sink(self, job: str, config: JobConfig) -> Sink:
        if self._partition_by and not self._is_file and not self._is_own("delta", "iceberg"):
            raise BuildError(
                f"the sink {self._sink_name()} has no files that partitionBy could spread over"
                " directories: leave it out, or write files"
            )
        if self._function is not None:
            self._refuse_without_checkpoints(config)
            return self._foreach_batch_sink(self._function, job, config)
        if self._is_made_of_options:
            self._refuse_without_checkpoints(config)
            return self._sink_of_options()
        match self._format.name:
            case "noop":
                return DiscardSink()
            case "memory":
                self._refuse_without_checkpoints(config)
                return self._memory_sink(job, config)
            case "console":
                self._refuse_without_checkpoints(config)
                return self._console_sink(job, config)
            case name:
                return self._file_sink(name, config)

    def _sink_of_options(self) -> Sink:
        conf = self._stream.still.spark_setting
        parted = {"partitionBy": ",".join(self._partition_by)} if self._partition_by else {}
        sink: Sink = self._format.made(self._sink_options() | parted, self._schema, conf)
        if isinstance(sink, PythonSink):
            return sink.of_mode(is_whole=self._is_whole)
        if sink.is_whole and not self._is_whole:
            raise BuildError(
                f"{self._format} takes the whole result with every checkpoint, but outputMode is"
                f" {self._output_mode!r}: say .outputMode('complete')"
            )
        if self._is_whole and not sink.is_whole:
            raise self._incomplete()
        return sink

    def _file_sink(self, name: str, config: JobConfig) -> FileSink:
        (format,) = (each for each in FORMATS if each == name)
        path = ours.option_value(self._options, "path")
        if path is None:
            raise BuildError(
                f"the sink {format} has no path: say .start(path) or .option('path', ...), or"
                " choose another format"
            )
        self._refuse_without_checkpoints(config)
        schema = self._written.node.schema
        if format == "orc":
            refuse_times_in_orc(self._stream.still.spark, schema)
        zone = str(self._stream.still.spark.conf.get("spark.sql.session.timeZone"))
        # Made absolute here: an executor may stand in another directory than the driver.
        address = address_of(path)
        sink = file_sink_from_options(
            FileSink(
                address,
                format,
                schema,
                zone,
                settings=place_of(address, config.storage_settings).settings,
            ),
            self._sink_options(),
            self._partition_by,
        )
        sink.check()
        return sink

    def _foreach_batch_sink(
        self, function: Callable[[DataFrame, int], None], job: str, config: JobConfig
    ) -> StagedSink:
        spark = self._stream.still.spark
        called = function.function if isinstance(function, exactly_once) else function
        reached = self._reached(config)
        handler = FrameOfEpoch(spark, self._stream.schema, called, self._last_steps, reached)
        if isinstance(called, Observing):  # it keeps what it computes by epoch
            handler = replace(handler, takes_empty=True)
            sink = self._staged(handler, f"observe {called.name}", job, config)
            sink = replace(sink, tied_to=sink.description)
        else:
            sink = self._staged(handler, f"foreachBatch {name_of(called)}", job, config)
            if called is function:
                return sink
        return replace(sink, guarantee="exactly-once", weakness=None)

    def _memory_sink(self, job: str, config: JobConfig) -> StagedSink:
        if self._name is None:
            raise BuildError("queryName must be specified for memory sink: it names the table")
        text = ours.option_value(self._options, "maxRows") or _MEMORY_ROWS_MAX
        rows_max = parse_count("maxRows", text)
        table = MemoryTable(
            self._stream.still.spark,
            self._name,
            self._schema,
            rows_max,
            is_whole=self._is_whole,
            finish=self._last_steps,
            settings=self._reached(config),
        )
        sink = self._staged(table, f"memory {self._name}", job, config).kept_by_driver()
        return replace(sink, tied_to=sink.description)

    def _console_sink(self, job: str, config: JobConfig) -> StagedSink:
        rows = ours.option_value(self._options, "numRows") or _CONSOLE_ROWS
        truncates = ours.option_value(self._options, "truncate") or "true"
        console = Console(
            self._stream.still.spark,
            self._schema,
            parse_count("numRows", rows),
            truncates=parse_flag("truncate", truncates),
            is_whole=self._is_whole,
            finish=self._last_steps,
            settings=self._reached(config),
        )
        return replace(self._staged(console, "console", job, config), tied_to="console")

    def _staged(
        self, handler: Handler, description: str, job: str, config: JobConfig
    ) -> StagedSink:
        assert config.checkpoint_location is not None, "an interval implies a location"
        draft = StagedSink("", handler, self._schema, description)
        directory = "/".join(
            [
                address_of(config.checkpoint_location),
                job_directory(job),
                STAGED_DIRECTORY,
                quoted_name(self._node(draft).uid, "operator uid"),
            ]
        )
        return StagedSink(
            directory,
            handler,
            self._schema,
            description,
            self._is_whole,
            settings=self._reached(config),
        )

    def _reached(self, config: JobConfig) -> Mapping[str, str]:
        """How what is staged beside the checkpoints is reached, also from an executor."""
        if config.checkpoint_location is None:
            return {}
        return place_of(address_of(config.checkpoint_location), config.storage_settings).settings

    @property
    def _written(self) -> Stream:
        """What the sink gets; with texts for those times that are written by a pattern."""
        if not self._is_own("csv", "json"):
            return self._stream
        patterns = {name: ours.option_value(self._options, name) for name in PATTERNS}
        return with_times_as_texts(self._stream, patterns, self._partition_by)

    @property
    def _is_whole(self) -> bool:
        return self._output_mode == "complete"

    @property
    def _schema(self) -> pa.Schema:
        return self._stream.node.schema

    def _refuse_append_of_updates(self) -> None:
        if self._output_mode == "append" and not all(map(can_close, self.aggregates())):
            raise BuildError(
                "[STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION] Invalid streaming output mode:"
                " append. This output mode is not supported for streaming aggregations without"
                " watermark on streaming DataFrames/DataSets; "
                + ("" if self._has_sessions else "say .outputMode('update'), or ")
                + "say withWatermark(...) before and group by windows over its column"
            )

    @property
    def _has_sessions(self) -> bool:
        operators = (node.operator for node in self.aggregates())
        windows = [each.window for each in operators if isinstance(each, Aggregate)]
        return any(isinstance(window, SessionWindow) for window in windows)

    def _refuse_updates_of_sessions(self) -> None:
        if self._output_mode == "update" and self._has_sessions:
            raise BuildError(
                "[STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION] Invalid streaming output mode:"
                " update. This output mode is not supported for session window streaming"
                " aggregations on streaming DataFrames/DataSets; say .outputMode('append'), which"
                " writes a session when it is over"
            )

    def _refuse_incomplete(self) -> None:
        """The whole result at each barrier: of an aggregation, where it can be told apart."""
        if not self._is_whole:
            return
        if not self.aggregates():
            raise BuildError(
                f"[STREAMING_OUTPUT_MODE.UNSUPPORTED_OPERATION] {_INVALID} for no streaming"
                " aggregations on streaming DataFrames/DataSets; say .outputMode('append')"
            )
        if self._is_file:
            raise self._incomplete()
        node = self._stream.node
        while isinstance(node.operator, _ROW_BY_ROW) and node.parallelism is None:
            (node,) = node.inputs
        if not isinstance(node.operator, Aggregate):
            raise BuildError(
                "outputMode 'complete' gives the whole result of one aggregation, but between it"
                f" and the sink there is {describe(node.operator)}: write it as it comes from"
                " groupBy, at most selected, filtered or mapped, or say .outputMode('update')"
            )

    def _refuse_unsorted(self) -> None:
        """What is done to a whole result needs one, and who shows it."""
        if self._last_steps is as_it_is:
            return
        if not self._is_whole:
            raise BuildError(
                "Sorting is not supported on streaming DataFrames/Datasets, unless it is on"
                " aggregated DataFrame/Dataset in Complete output mode, and neither are limits:"
                " say .outputMode('complete'), or leave it out"
            )
        if self._function is None and not self._is_own("memory", "console"):
            raise BuildError(
                f"the sink {self._sink_name()} cannot keep the order of a sorted or limited result:"
                " write it to memory, console or foreachBatch"
            )

    def _incomplete(self) -> BuildError:
        return BuildError(
            f"[STREAMING_OUTPUT_MODE.UNSUPPORTED_DATASOURCE] {_INVALID} in Data Source"
            f" {self._sink_name()}; overwrite a table in foreachBatch, or say"
            f" .outputMode('{'append' if self._has_sessions else 'update'}')"
        )

    def _refuse_names_alike(self) -> None:
        """Spark reads no file, of a sink or staged for foreachBatch, with such columns."""
        spark = self._stream.still.spark
        writes_files = self._is_file or self._function is not None
        if not writes_files or _is_case_sensitive(spark):
            return
        by_folded: dict[str, str] = {}
        for name in self._stream.columns:
            other = by_folded.setdefault(name.lower(), name)
            if other != name:
                raise BuildError(
                    f"the columns {other} and {name} differ only by case, and Spark could not read"
                    " what is written: rename one of them, or set spark.sql.caseSensitive"
                )

    def _refuse_trigger_without_end(self) -> None:
        if not self.stops_at_what_is_there:
            return
        for node in walk([self._stream.node]):
            if isinstance(node.operator, Read) and node.operator.source.is_unbounded:
                raise BuildError(
                    f"trigger({self._trigger}=True) would never stop: the source"
                    f" {node.operator.source.describe()} has no end; give it a number of records"
                )

    def _refuse_without_checkpoints(self, config: JobConfig) -> None:
        if config.checkpoint_interval_seconds is None:
            also = " and checkpointLocation" if config.checkpoint_location is None else ""
            raise BuildError(
                f"the sink {self._sink_name()} shows records only when a checkpoint completes, and"
                f" checkpoints are off: set the option checkpointInterval, such as '1 second'{also}"
            )


def _is_case_sensitive(spark: SparkSession) -> bool:
    name = "spark.sql.caseSensitive"
    return parse_flag(name, str(spark.conf.get(name)))
