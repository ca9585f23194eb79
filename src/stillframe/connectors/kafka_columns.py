"""Messages of Kafka as columns: Spark's own, or with typed ones made of the values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stillframe.connectors.avro_values import AvroFormat, AvroReader
from stillframe.errors import BuildError, DataError
from stillframe.json_texts.columns import Texts
from stillframe.json_texts.records import (
    Malformed,
    RecordReader,
    columns_to_read,
    nullable,
    refuse_unreadable,
)
from stillframe.json_texts.rules import JsonRules

ValueFormat = Literal["binary", "string", "json", "avro"]

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_KAFKAS = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("timestampType", pa.int32()),
        ("headers", HEADERS),
    ]
)
_SHOWN_BYTES_MAX = 80
_SPARKS_RULES = JsonRules()


@dataclass(frozen=True)
class Shape:
    """Which columns a message becomes."""

    value_format: ValueFormat = "binary"
    declared: pa.Schema | None = None
    """Of JSON and Avro: the columns that the values have."""
    rules: JsonRules = _SPARKS_RULES
    with_headers: bool = False
    avro: AvroFormat | None = None

    def check(self) -> None:
        if self.value_format == "json":
            if self.declared is None:
                raise BuildError(
                    "valueFormat is json, so the columns of the values have to be declared: say"
                    ' .schema("app string, at timestamp")'
                )
            refuse_unreadable(self.declared, self.rules)
        elif self.declared is not None and self.avro is None:
            raise BuildError(
                "the source kafka has a schema of its own: leave .schema(...) out, or set"
                " valueFormat to json for values of that schema"
            )

    @property
    def schema(self) -> pa.Schema:
        """With typed values, Kafka's own columns come behind those of the values, but for `value`
        itself and those whose names the values use."""
        kafkas = [each for each in _KAFKAS if each.name != "headers" or self.with_headers]
        if self.declared is not None:
            used = {name.lower() for name in self.declared.names} | {"value"}
            kafkas = [each for each in kafkas if each.name.lower() not in used]
            return pa.schema([*nullable(self.declared), *kafkas])
        if self.value_format == "string":
            kafkas[1] = pa.field("value", pa.string())
        return pa.schema(kafkas)


@dataclass(slots=True)
class Taken:
    """Messages of one partition, as what is read of them."""

    columns: dict[str, list[pa.Array]]
    """Of Kafka's own, piece by piece."""
    offsets: list[Sequence[int]] = field(default_factory=list)
    """The same."""
    values: list[bytes | None] = field(default_factory=list)
    """What the other columns are made of."""

    @property
    def next_offset(self) -> int:
        return self.offsets[-1][-1] + 1

    def all_offsets(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.array(piece, dtype=np.int64) for piece in self.offsets])


class Columns:
    """Makes batches of messages, with the columns that the job reads and no others.

    Messages are objects of Python, and the processor's cache holds some hundreds of them. So they
    are taken piece by piece: of each, what is read is kept, and it is gone before the next comes.
    """

    def __init__(self, shape: Shape, read: Sequence[str] | None) -> None:
        schema = shape.schema
        self._schema = schema if read is None else pa.schema([schema.field(n) for n in read])
        declared = [] if shape.declared is None else shape.declared.names
        self._of_values = [name for name in self._schema.names if name in declared]
        self._kafkas = [name for name in self._schema.names if name not in declared]
        self._json: RecordReader | None = None
        self._avro = None if shape.avro is None else AvroReader(shape.avro)
        self._fails_on_malformed = shape.avro is not None and shape.avro.fails_on_malformed
        if shape.declared is not None and shape.avro is None:
            read = columns_to_read(shape.declared, shape.rules, self._of_values)
            self._json = RecordReader(nullable(read), shape.rules)
        self.records_malformed = 0

    def take(self, messages: Sequence[Any], taken: Taken | None = None) -> Taken:
        """With more messages of the same partition, at least one and none of which is an error."""
        taken = taken or Taken({name: [] for name in self._kafkas if name in _MAKERS})
        for name, pieces in taken.columns.items():
            pieces.append(_MAKERS[name](messages))
        if self._json is not None or self._avro is not None:
            taken.values += _each("value", messages)
        taken.offsets.append(_offsets(messages))
        return taken

    def batch(self, topic: str, partition: int, taken: Taken) -> pa.RecordBatch:
        columns: dict[str, Any] = {
            "topic": pa.scalar(topic, pa.string()),
            "partition": pa.scalar(partition, pa.int32()),
            **{name: pa.concat_arrays(pieces) for name, pieces in taken.columns.items()},
        }
        if "offset" in self._kafkas:
            columns["offset"] = pa.array(taken.all_offsets())
        rows: pa.Array | None = None
        if self._json is not None:
            typed, rows = self._of_json(topic, partition, taken)
            columns |= typed
        elif self._avro is not None:
            columns |= self._of_avro(topic, partition, taken)
        count = sum(map(len, taken.offsets))
        arrays = []
        for each in self._schema:
            column = columns[each.name]
            if isinstance(column, pa.Scalar):
                column = pa.repeat(column, count)
            elif column.type != each.type:  # strings, which the runtime checks
                column = column.view(each.type)
            is_by_row = rows is None or each.name in self._of_values
            arrays.append(column if is_by_row else column.take(rows))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _of_avro(self, topic: str, partition: int, taken: Taken) -> dict[str, pa.Array]:
        """A tombstone is a row of nulls, and so is what is malformed unless that fails the job."""
        assert self._avro is not None
        decoded = self._avro.read(taken.values)
        if decoded.malformed and self._fails_on_malformed:
            place = decoded.malformed[0]
            raise _unfit(topic, partition, taken, place, "it is no such Avro record")
        self.records_malformed += len(decoded.malformed)
        return {name: decoded.batch.column(name) for name in self._of_values}

    def _of_json(
        self, topic: str, partition: int, taken: Taken
    ) -> tuple[dict[str, pa.Array], pa.Array | None]:
        """The columns of the values, and which value each row is of unless it is its own.

        A tombstone, or an empty value, is a row of nulls.
        """
        assert self._json is not None
        try:
            records = self._json.read(_texts(taken.values))
        except Malformed as error:
            raise _unfit(topic, partition, taken, error.place, error.why) from None
        self.records_malformed += records.malformed
        typed = {name: records.batch.column(name) for name in self._of_values}
        is_each_its_own = len(records.text_of_row) == len(taken.values) and bool(
            (records.text_of_row == np.arange(len(taken.values))).all()
        )
        return typed, None if is_each_its_own else pa.array(records.text_of_row)


def _offsets(messages: Sequence[Any]) -> Sequence[int]:
    """They grow from one to the next, so mostly the first and the last say it all."""
    first, last = messages[0].offset(), messages[-1].offset()
    if last - first == len(messages) - 1:
        return range(first, last + 1)
    return [message.offset() for message in messages]


def _unfit(topic: str, partition: int, taken: Taken, place: int, why: str) -> DataError:
    begins = (taken.values[place] or b"")[:_SHOWN_BYTES_MAX].decode("utf-8", "replace")
    return DataError(
        f"the value at offset {taken.all_offsets()[place]} of partition {partition} of topic"
        f" {topic} does not fit the schema ({why}): correct the schema, or set mode to PERMISSIVE;"
        f" it begins {begins!r}"
    )


def _texts(values: list[bytes | None]) -> Texts:
    """Where there is none, or nothing in it, an object of nothing."""
    if all(values):
        texts = Texts.of(cast("list[bytes]", values))
        if texts.all_begin_with(b"{"):  # the usual case, without a look at each
            return texts
    return Texts.of(value if value and not value.isspace() else b"{}" for value in values)


def _each(name: str, messages: Sequence[Any]) -> list[Any]:
    """What a method of all of them says: without a step of Python for each."""
    return list(map(getattr(type(messages[0]), name), messages))


def _binary(name: str, messages: Sequence[Any]) -> pa.Array:
    """Value by value, without a list of them: half of the time of joining them to one text."""
    method = getattr(type(messages[0]), name)
    return pa.array(map(method, messages), pa.binary(), size=len(messages))


def _times(messages: Sequence[Any]) -> pa.Array:
    millis = np.fromiter((message.timestamp()[1] for message in messages), np.int64, len(messages))
    return pa.array(millis * 1000).view(pa.timestamp("us", tz="UTC"))


def _time_types(messages: Sequence[Any]) -> pa.Array:
    """librdkafka counts them from 1, Spark from 0."""
    return pa.array([message.timestamp()[0] - 1 for message in messages], pa.int32())


def _headers(messages: Sequence[Any]) -> pa.Array:
    found = [message.headers() for message in messages]
    return pa.array(
        [each and [{"key": key, "value": value} for key, value in each] for each in found], HEADERS
    )


_MAKERS: Mapping[str, Callable[[Sequence[Any]], pa.Array]] = {
    "key": lambda messages: _binary("key", messages),
    "value": lambda messages: _binary("value", messages),
    "timestamp": _times,
    "timestampType": _time_types,
    "headers": _headers,
}
