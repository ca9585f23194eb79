"""States with names on plain processes: through a kill, and from 2 subtasks to 3, 1 and 4."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stillframe import KeyProcessor, KeyStates
from stillframe.cli.main import main
from stillframe.connectors.file_sink import FileSink
from stillframe.coordinator.history import AttemptStarted
from stillframe.graph.logical import Node, Read, Transform, Write
from stillframe.graph.plan import build_plan
from stillframe.runtime.key_processing import KeyProgram
from stillframe.testing.sources import ScriptedSource, Wait

SCHEMA = pa.schema([("id", pa.int64()), ("app_id", pa.string())])
SAID = pa.schema([("app_id", pa.string()), ("rows", pa.int64()), ("sum", pa.int64())])
PARTS, ROWS, APPS = 5, 1_000, 17


class Sums(KeyProcessor):
    """Keeps what it has seen in states of all kinds, and fails where they do not agree."""

    def open(self, states: KeyStates) -> None:
        self.rows = states.reducing("rows", "n long", lambda kept, more: (kept.n + more[0],))
        reductions = {"rows": "sum", "largest": "max"}
        self.columns = states.reducing("columns", "rows long, largest long", reductions)
        self.sum = states.value("sum", "n long, last struct<id: long>")
        self.ids = states.map("ids", "id long", "seen boolean")
        self.newest = states.list("newest", "id long")
        self.everything = states.opaque("everything", ttl="1 day", ttl_refresh="read and write")
        self.brief = states.value("brief", "n long", ttl="1 ms")

    def process(self, key: Any, rows: Iterator[Any]) -> Iterator[Any]:
        for row in rows:
            before = self.sum.get()
            self.sum.update(((0 if before is None else before.n) + row.id, (row.id,)))
            self.rows.add((1,))
            self.columns.add((1, row.id))
            self.ids.put((row.id,), (True,))
            self.newest.put([*list(self.newest.get())[-2:], (row.id,)])
            self.everything.update((self.everything.get() or frozenset()) | {row.id})
            self.brief.update((row.id,))
        count, total = self.rows.get().n, self.sum.get()
        assert {found.id for found, _ in self.ids.items()} == self.everything.get()
        assert len(self.everything.get()) == count
        assert self.columns.get() == (count, max(self.everything.get()))
        assert [each.id for each in self.newest.get()][-1] == total.last.id
        yield key.app_id, count, total.n


def parts(split, gates):
    """A thousand records, a pause until the gate is open, and so on."""
    for part in range(PARTS):
        first = (split * PARTS + part) * ROWS
        for at in range(first, first + ROWS, 100):
            ids = list(range(at, at + 100))
            yield pa.record_batch([ids, [f"app-{each % APPS}" for each in ids]], schema=SCHEMA)
        if part < len(gates):
            yield Wait(gates[part])


def plan_of(page_views, source, parallelism):
    read = Node(Read(source), SCHEMA, given_uid="read")
    transform = Transform(KeyProgram(Sums, "Sums", SAID), "Sums", ("app_id",), "both")
    summed = Node(transform, SAID, (read,), given_uid="sums")
    sink = FileSink(str(page_views.home / "said"), "parquet", SAID)
    return build_plan("sums", [Node(Write(sink), SAID, (summed,), given_uid="w")], parallelism)


def check_what_is_told(page_views, capsys):
    """What has expired since is not shown."""
    assert main(["inspect", f"{page_views.location}/sums", "--json", "--rows", "3"]) == 0
    (job,) = json.loads(capsys.readouterr().out)
    (operator,) = [each for each in job["checkpoints"][-1]["operators"] if each["uid"] == "sums"]
    told = {state["name"]: state for state in operator["states"]}
    assert told["rows"]["rows"] == told["sum"]["rows"] == told["columns"]["rows"] == APPS
    assert told["ids"]["rows"] == 2 * ROWS
    assert len(told["everything"]["sample"]) == 3
    assert told.get("brief", {"sample": []})["sample"] == []
    assert main(["inspect", f"{page_views.location}/sums"]) == 0
    assert "not ended, attempt 1 from the beginning" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["fs", "memory", "rocksdb"])
def test_states_of_all_kinds_are_exact_through_a_kill_and_2_3_1_4_subtasks(
    page_views, capsys, backend
):
    gates = [page_views.gate(f"gate-{number}") for number in range(PARTS - 1)]
    source = ScriptedSource(SCHEMA, tuple(tuple(parts(split, gates)) for split in range(2)))
    for number, parallelism in enumerate((2, 3, 1, 4)):
        running = page_views.start(plan_of(page_views, source, parallelism), stateBackend=backend)
        if number:
            assert running.wait(AttemptStarted).restored_from is not None
            gates[number - 1].open()
        running.wait_for_records(2 * ROWS)
        running.next_checkpoint()
        if parallelism == 3:
            running.kill(slot=0, attempt=running.wait(AttemptStarted).attempt)
            assert running.wait(AttemptStarted, number=2).restored_from is not None
            running.next_checkpoint()
        if number < 3:
            running.query.stop()
        if number == 0:
            check_what_is_told(page_views, capsys)
    gates[-1].open()
    running.finish()

    said = pq.read_table(page_views.home / "said").to_pylist()
    last = {
        row["app_id"]: (row["rows"], row["sum"]) for row in sorted(said, key=lambda r: r["rows"])
    }
    ids = range(2 * PARTS * ROWS)
    counts = Counter(f"app-{each % APPS}" for each in ids)
    assert last == {
        app: (counts[app], sum(each for each in ids if f"app-{each % APPS}" == app))
        for app in counts
    }
    assert max(Counter((row["app_id"], row["rows"]) for row in said).values()) == 1
