"""The kit for sources: ours pass, and each wrong one is told by the promise that it breaks."""

from __future__ import annotations

import json
import os
import socket
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small_sources
from small_sources import (
    EndlessSource,
    GrowingSource,
    QueueSource,
    SmallSource,
    grow,
    growing,
)

from stillframe.connectors.files import Following
from stillframe.connectors.generate import ClickSource, RateSource
from stillframe.connectors.json_lines import JsonLinesSource
from stillframe.connectors.parquet import ParquetSource
from stillframe.connectors.socket import SocketSource
from stillframe.runtime import reading
from stillframe.testing.conformance import PromiseBroken, check_source, source_job

SCHEMA = pa.schema([("n", pa.int64())])
CHECKS = 40


# --- ours --------------------------------------------------------------------------------------


def test_clicks_come_once_whatever_happens():
    source = ClickSource(records=100, partitions=3, batch_rows=7)

    report = check_source(source, checks=CHECKS)

    assert report.unchecked == ()


def test_the_first_rows_of_a_rate_without_an_end_come_once_whatever_happens():
    source = RateSource(rows_per_second=1000, partitions=2)

    report = check_source(source, checks=CHECKS, rows_max=60)

    assert report.unchecked == ("rows behind the first 60 of a split",)


def write_file(directory, format_, name, first):
    rows = [{"n": first + each} for each in range(8)]
    path = os.path.join(directory, name)
    if format_ == "json":
        with open(f"{path}.json", "w") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows, SCHEMA), f"{path}.parquet", row_group_size=3)


KINDS = {"json": JsonLinesSource, "parquet": ParquetSource}


@pytest.mark.parametrize("format_", KINDS)
def test_the_rows_of_files_come_once_whatever_happens(format_, tmp_path):
    for index in range(3):
        write_file(tmp_path, format_, f"f{index}", 100 * index)
    source = KINDS[format_](str(tmp_path), SCHEMA)

    check_source(
        source,
        expected=lambda source: [(100 * file + row,) for file in range(3) for row in range(8)],
        checks=CHECKS,
    )


@pytest.mark.parametrize("format_", KINDS)
def test_the_rows_of_a_followed_directory_come_once_whatever_happens(format_):
    def make(place):
        write_file(place, format_, "f0", 0)
        return KINDS[format_](str(place), SCHEMA, Following())

    def more(source):
        [directory] = source.paths
        count = len(os.listdir(directory))
        write_file(directory, format_, f"f{count}", 100 * count)

    check_source(make, more=more, checks=CHECKS)


@pytest.fixture
def port():
    """Of somebody who says three lines to whoever connects."""
    with socket.create_server(("localhost", 0)) as server:

        def answer():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"one\ntwo\nthree\n")
                    connection.recv(1)  # until it is closed

        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_of_a_source_that_cannot_rewind_it_is_said_what_was_not_checked(port):
    report = check_source(SocketSource("localhost", port), checks=3)

    assert report.unchecked == ("which rows come: the source cannot rewind",)


# --- wrong ones --------------------------------------------------------------------------------


def broken(kind):
    grows = issubclass(kind, GrowingSource)
    source = (lambda place: growing(kind, place)) if grows else kind()
    if issubclass(kind, QueueSource):
        source = lambda place: kind(path=str(place))  # noqa: E731
    with pytest.raises(PromiseBroken) as raised:
        check_source(source, more=grow if grows else None)
    return raised.value


def test_the_small_sources_that_the_wrong_ones_are_made_of_are_right():
    check_source(SmallSource())
    check_source(lambda place: growing(GrowingSource, place), more=grow)
    check_source(lambda place: growing(EndlessSource, place), more=grow, checks=CHECKS)
    check_source(lambda place: QueueSource(path=str(place)))


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        ("MovesTooEarly", "splits() is positioned after the last batch that poll has returned"),
        ("MovesTooLate", "splits() is positioned after the last batch that poll has returned"),
        ("ForgetsAdded", "splits() has every split given to the reader, those not yet begun too"),
        ("RemembersOutside", "an enumerator is a function of its state"),
        ("ForgetsWhatItFound", "an enumerator does not answer a split again that its state knows"),
        ("AcknowledgesWhatWasRead", "on_checkpoint_complete says what is never asked for again"),
        ("ChangesItsPosition", "a position that was handed out is not changed"),
        ("PositionGrows", "a position does not grow with what was read"),
        ("NoJson", "a position, and an enumerator's state, is JSON that reads back as it was"),
        ("NeedsItsOwnProcess", "a reader needs the source and its splits, and nothing that"),
        ("ClosesASplitTooEarly", "open_splits has every split that may still give records"),
    ],
)
def test_a_source_that_breaks_a_promise_is_told_which(kind, promise):
    told = broken(getattr(small_sources, kind))

    assert told.promise.startswith(promise)
    assert f"seed={told.seed}, checks=1" in str(told)


def test_a_reader_that_does_not_end_when_it_is_interrupted_is_told(monkeypatch):
    monkeypatch.setattr(reading, "_CLOSE_SECONDS", 0.5)  # the reader waits for a second
    monkeypatch.setattr(source_job, "_CLOSE_SECONDS_MAX", 0.4)
    told = broken(small_sources.BlocksForEver)

    assert told.promise == "close gives everything back, and read ends soon after interrupt"


def test_rows_that_somebody_expects_and_that_never_come_are_told():
    rows = [(f"s{split}", row) for split in range(3) for row in range(8)]

    with pytest.raises(PromiseBroken, match=r"such as .'s0', 7.* never came"):
        check_source(SmallSource(), expected=lambda source: rows)
