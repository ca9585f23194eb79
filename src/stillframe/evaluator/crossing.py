"""One projection that Spark's evaluator computes: batches to the JVM and back.

Theory of operation
-------------------
Batches go through one Unix socket, in Arrow's stream format, and what is computed comes back the
same way. py4j only says what to do: read a batch, project its rows, write the result. Those calls
are made by a thread of this crossing, because they last until the slot's thread has sent a batch
and taken the result. The thread's connection is one thread in the JVM, and Spark's settings of SQL
are that thread's.

Rules of this file
------------------
1. No data goes through py4j, which would write it as text.
2. A projection that has thrown is not used again, as it may be left half done: all is made again.
3. Every object that is made in the JVM for a batch is given back behind it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from py4j.java_gateway import JavaGateway, JavaObject, is_instance_of
from py4j.protocol import Py4JError, Py4JJavaError

from stillframe.errors import StillframeError
from stillframe.evaluator.process import EvaluatorProcess
from stillframe.graph.expressions import SparkProjection

_BUFFER_BYTES = 1 << 16
_WITHOUT_LIMIT = 2**62
_INSTANT = pa.timestamp("us", tz="UTC")
_SPARK_SQL = "org.apache.spark.sql"


class RowRefused(Exception):
    """Spark's evaluator refuses a record of the batch, in Spark's words."""

    def __init__(self, reason: str, place: int | None) -> None:
        super().__init__(reason)
        self.place = place
        """Of the record in the batch; None: alone, none of them is refused."""


class _Thrown(Exception):
    """What Spark's evaluator says of a batch that it refuses."""


@dataclass(frozen=True, slots=True)
class _Line:
    """An open way to the JVM and back."""

    socket: socket.socket
    answers: pa.RecordBatchReader
    work: Callable[[], None]
    """Has the JVM take one batch and send the result."""
    close: Callable[[], None]


class Crossing:
    """Of one projection, in one subtask. Used by the slot's thread."""

    def __init__(self, process: EvaluatorProcess, projection: SparkProjection) -> None:
        self._process = process
        self._projection = projection
        self._schema = _schema_of(projection)
        self._pool = ThreadPoolExecutor(1, "stillframe-evaluator")
        self._gateway: JavaGateway | None = None
        # At once, so that the JVM is warm when the first batch comes.
        self._line: Future[_Line] = self._pool.submit(self._opened)

    def await_open(self) -> None:
        """Raises if the JVM cannot be reached or does not take the projection."""
        self._line.result()

    def evaluate(self, columns: list[pa.Array], rows: int) -> list[pa.Array]:
        """The projection's columns, of its input columns; there is at least one row.

        If it takes the time, that is the last of the input columns.
        """
        batch = self._batch(columns, rows)
        try:
            return self._crossed(batch)
        except _Thrown as thrown:
            raise self._first_refused(batch, str(thrown)) from None

    def close(self) -> None:
        """Called once, when the process has been ended."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        with contextlib.suppress(
            Exception
        ):  # that it could not be opened was told where it is used
            self._line.result().socket.close()
        if self._gateway is not None:
            self._gateway.close()

    # --- The slot's thread

    def _batch(self, columns: list[pa.Array], rows: int) -> pa.RecordBatch:
        if not columns:
            columns = [pa.nulls(rows, pa.bool_())]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _crossed(self, batch: pa.RecordBatch) -> list[pa.Array]:
        line = self._line.result()
        working = self._pool.submit(self._worked, line)
        try:
            line.socket.sendall(batch.serialize())
            columns: list[pa.Array] = line.answers.read_next_batch().columns
        except (OSError, pa.ArrowInvalid, StopIteration):
            columns = []
        try:
            working.result()
        except _Thrown:
            line.socket.close()
            self._line = self._pool.submit(self._opened)
            raise
        if not columns:
            raise self._process.lost()
        return columns

    def _first_refused(self, batch: pa.RecordBatch, reason: str) -> RowRefused:
        """By halves; the projection is made again for each part that is refused."""
        start, stop = 0, batch.num_rows
        while True:
            middle = (start + stop + 1) // 2
            try:
                self._crossed(batch.slice(start, middle - start))
            except _Thrown as thrown:
                if middle - start == 1:
                    return RowRefused(str(thrown), start)
                reason, stop = str(thrown), middle
            else:
                if middle == stop:
                    return RowRefused(reason, None)  # it depends on chance or on the moment
                start = middle

    # --- The thread of this crossing

    def _worked(self, line: _Line) -> None:
        try:
            line.work()
        except Exception as error:
            with contextlib.suppress(OSError):  # wakes the slot's thread, which waits for an answer
                line.socket.shutdown(socket.SHUT_RDWR)
            reason = self._reason(error)
            with contextlib.suppress(Py4JError, OSError):
                line.close()
            raise reason from error

    def _reason(self, error: Exception) -> Exception:
        if not isinstance(error, Py4JJavaError):
            return self._process.lost()
        try:
            return self._told(error.java_exception)
        except (Py4JError, OSError):
            return self._process.lost()

    def _told(self, thrown: JavaObject) -> Exception:
        """Spark's own error, if there is one among the causes; else the first cause."""
        causes = list(_causes(thrown))
        names = [str(cause.getClass().getName()) for cause in causes]
        place = next(
            (place for place, name in enumerate(names) if name.startswith("org.apache.spark.")),
            len(causes) - 1,
        )
        told = str(causes[place].getMessage() or "").partition("\n")[0]
        text = told if told.startswith("[") else f"{names[place]}: {told}"
        if any(is_instance_of(self._gateway, cause, "java.lang.Error") for cause in causes):
            return StillframeError(
                f"Spark's evaluator fails ({text}): look whether the classes it needs are among the"
                " session's jars"
            )
        return _Thrown(text)

    def _opened(self) -> _Line:
        if self._gateway is None:
            self._gateway = self._process.connect()
        try:
            return self._open_line(self._gateway)
        except Py4JJavaError as error:
            raise StillframeError(
                "Spark's evaluator cannot begin"
                f" ({str(error.java_exception.toString()).partition(chr(10))[0]}): look whether the"
                " executors have the driver's version of Spark and the session's jars"
            ) from error
        except (Py4JError, OSError) as error:
            raise self._process.lost() from error

    def _open_line(self, gateway: JavaGateway) -> _Line:
        jvm, given = gateway.jvm, self._projection
        conf = jvm.org.apache.spark.sql.internal.SQLConf.get()
        for name, value in given.conf:
            conf.setConfString(name, value)
        input_type, output_type = (
            jvm.org.apache.spark.sql.types.DataType.fromJson(schema)
            for schema in (given.input_schema, given.output_schema)
        )
        projections = [_projection(gateway, level) for level in given.levels]
        generated = None
        if given.generator is not None:
            generated = _generating(gateway, given.generator)
        aggregated = None
        if given.aggregation is not None:
            aggregated = _aggregating(gateway, given.aggregation)
        if aggregated is not None or any(pa.types.is_nested(each.type) for each in given.inputs):
            # Arrow's rows do not look whether an element of an array is null, Spark's do; and
            # aggregates are given such rows by Spark too.
            projections.insert(0, _unsafe_projection(gateway).create(input_type))

        converters = _scala_object(gateway, f"{_SPARK_SQL}.execution.arrow.ArrowConverters")
        allocator = (
            _scala_object(gateway, f"{_SPARK_SQL}.util.ArrowUtils")
            .rootAllocator()
            .newChildAllocator("stillframe", 0, _WITHOUT_LIMIT)
        )
        here, channel = _connected(gateway)
        here.sendall(self._schema.serialize())
        channels = jvm.java.nio.channels.Channels
        incoming = jvm.java.io.BufferedInputStream(channels.newInputStream(channel), _BUFFER_BYTES)
        reader = jvm.org.apache.arrow.vector.ipc.ArrowStreamReader(incoming, allocator)
        root = reader.getVectorSchemaRoot()
        outgoing = channels.newOutputStream(channel)
        writer = jvm.org.apache.spark.sql.execution.arrow.ArrowBatchStreamWriter(
            output_type, outgoing, "UTC", True, False
        )
        rows_of = getattr(
            converters,
            f"{_SPARK_SQL.replace('.', '$')}$execution$arrow$ArrowConverters$$"
            "vectorSchemaRootToIter",
        )

        def work() -> None:
            made: list[JavaObject] = []
            reader.loadNextBatch()
            made.append(rows_of(root))
            for projection in projections:
                made.append(made[-1].map(projection))
            if generated is not None:
                made.append(made[-1].flatMap(generated))
            if aggregated is not None:
                made.append(aggregated(made[-1]))
            results = converters.toBatchIterator(
                made[-1], output_type, _WITHOUT_LIMIT, "UTC", True, False, None
            )
            made.append(results)
            try:
                writer.writeBatches(results)
            except Py4JJavaError:
                results.close()
                give_back(made)
                raise
            give_back(made)

        def give_back(made: Iterable[JavaObject]) -> None:
            for each in made:
                gateway.detach(each)

        def close() -> None:
            reader.close()
            channel.close()
            allocator.close()
            give_back((reader, root, writer, channel, incoming, outgoing, *projections))

        answers = pa.ipc.open_stream(here.makefile("rb"))
        return _Line(here, answers, work, close)


def _schema_of(projection: SparkProjection) -> pa.Schema:
    """Of what is sent; a batch without a column would not know how many records it has."""
    types = [each.type for each in projection.inputs]
    if projection.takes_time:
        types.append(_INSTANT)
    return pa.schema([(str(place), each) for place, each in enumerate(types or [pa.bool_()])])


def _causes(thrown: JavaObject) -> Iterator[JavaObject]:
    while thrown is not None:
        yield thrown
        thrown = thrown.getCause()


def _connected(gateway: JavaGateway) -> tuple[socket.socket, JavaObject]:
    """Both ends of a socket that nobody else can find: its directory is ours, and soon gone."""
    jvm = gateway.jvm
    with (
        tempfile.TemporaryDirectory(prefix="sf-") as directory,
        socket.socket(socket.AF_UNIX) as door,
    ):
        path = os.path.join(directory, "s")
        door.bind(path)
        door.listen(1)
        channel = jvm.java.nio.channels.SocketChannel.open(
            jvm.java.net.UnixDomainSocketAddress.of(path)
        )
        here, _ = door.accept()
        return here, channel


def _projection(gateway: JavaGateway, level: bytes) -> JavaObject:
    jvm = gateway.jvm
    stream = jvm.java.io.ObjectInputStream(jvm.java.io.ByteArrayInputStream(level))
    made = _unsafe_projection(gateway).create(stream.readObject())
    # By reflection: py4j remembers methods by the name of the class, and every projection that
    # Spark generates has the same. The number is any: it only sees to it that chance, uuid() for
    # one, is not the same in two subtasks, nor after a restart.
    kind = jvm.java.lang.Class.forName(f"{_SPARK_SQL}.catalyst.expressions.package$Projection")
    classes = gateway.new_array(jvm.java.lang.Class, 1)
    classes[0] = jvm.java.lang.Integer.TYPE
    number = gateway.new_array(jvm.java.lang.Object, 1)
    number[0] = random.getrandbits(30)
    kind.getMethod("initialize", classes).invoke(made, number)
    return made


_GROUPS_MAX = 2**31 - 1
"""With more groups in a batch Spark would sort them on disk, for which it needs a session."""


def _aggregating(gateway: JavaGateway, aggregation: bytes) -> Callable[[JavaObject], JavaObject]:
    """What makes rows of groups of the rows of a batch, which it reads at once."""
    jvm = gateway.jvm
    stream = jvm.java.io.ObjectInputStream(jvm.java.io.ByteArrayInputStream(aggregation))
    given = stream.readObject()
    outputs, keys, aggregates, attributes, results, inputs, offset = (given[at] for at in range(7))
    name = f"{_SPARK_SQL}.execution.aggregate.ObjectAggregationIterator"
    [constructor] = jvm.java.lang.Class.forName(name).getConstructors()
    metrics = constructor.getParameterCount() - 11  # other versions count other things
    metric = jvm.org.apache.spark.sql.execution.metric.SQLMetric("sum", 0)
    contexts = _scala_object(gateway, "org.apache.spark.TaskContext")
    new_projection = _as_function_of_two(
        gateway, f"{_SPARK_SQL}.catalyst.expressions.MutableProjection", "create"
    )
    what = (outputs, keys, aggregates, attributes, offset, results, new_projection, inputs)

    def aggregated(rows: JavaObject) -> JavaObject:
        # Of this thread, and another one each time: until it has ended it keeps the iterator.
        context = contexts.empty()
        contexts.setTaskContext(context)
        gateway.detach(context)
        iterator = jvm.org.apache.spark.sql.execution.aggregate.ObjectAggregationIterator
        return iterator(0, *what, rows, _GROUPS_MAX, *[metric] * metrics)

    return aggregated


def _as_function_of_two(gateway: JavaGateway, name: str, method: str) -> JavaObject:
    """Of a Scala object a method of two sequences, as Scala hands functions on."""
    lang = gateway.jvm.java.lang
    sequences = gateway.new_array(lang.Class, 2)
    sequences[0] = sequences[1] = lang.Class.forName("scala.collection.immutable.Seq")
    found = lang.Class.forName(f"{name}$").getMethod(method, sequences)
    return _as_function(gateway, found, _scala_object(gateway, name), "scala.Function2")


def _as_function(
    gateway: JavaGateway, method: JavaObject, of: JavaObject, function: str
) -> JavaObject:
    lang = gateway.jvm.java.lang
    bound = lang.invoke.MethodHandles.publicLookup().unreflect(method).bindTo(of)
    kind = lang.Class.forName(function)
    return lang.invoke.MethodHandleProxies.asInterfaceInstance(kind, bound)


def _generating(gateway: JavaGateway, generator: bytes) -> JavaObject:
    """What makes rows of a row, as a function."""
    lang = gateway.jvm.java.lang
    stream = gateway.jvm.java.io.ObjectInputStream(
        gateway.jvm.java.io.ByteArrayInputStream(generator)
    )
    made = stream.readObject().head()
    rows = gateway.new_array(lang.Class, 1)
    rows[0] = lang.Class.forName(f"{_SPARK_SQL}.catalyst.InternalRow")
    of = lang.Class.forName(f"{_SPARK_SQL}.catalyst.expressions.Expression")
    return _as_function(gateway, of.getMethod("eval", rows), made, "scala.Function1")


def _unsafe_projection(gateway: JavaGateway) -> Any:
    return _scala_object(gateway, f"{_SPARK_SQL}.catalyst.expressions.UnsafeProjection")


def _scala_object(gateway: JavaGateway, name: str) -> Any:
    """What Scala calls an object: the one instance of a class."""
    kind: Any = gateway.jvm
    for part in f"{name}$".split("."):
        kind = getattr(kind, part)
    return getattr(kind, "MODULE$")
