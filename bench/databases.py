"""How fast a database takes an epoch that is staged, beside the same load by hand.

    python bench/databases.py [--rows N] [--rounds N] [postgres] [mariadb] [mysql]

By hand is what one would write without us: COPY, or LOAD DATA LOCAL, of a text that was made
before, in one transaction on a new connection. Ours is the commit of a staged epoch: reading it,
making the text of it, the transaction with its mark, the receipt. Rounds alternate; told are
medians. The servers are those of the tests, each in a directory of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stillframe.api.sinks import CommitterContext, Prepared, SinkContext
from stillframe.connectors.database_sink import jdbc_from_options
from stillframe.connectors.database_texts import as_csv, as_lines
from stillframe.ids import Attempt, CheckpointId, Epoch, Mark, OperatorUid, SubtaskIndex, Writer
from stillframe.options import Options
from stillframe.storage.local import LocalStore
from stillframe.storage.staging import StagedFiles

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "shared"))
import database_servers

KINDS = {
    "postgres": database_servers.PostgresServer,
    "mariadb": database_servers.MariadbServer,
    "mysql": database_servers.MysqlServer,
}


def rows_of(count: int) -> pa.Table:
    numbers = np.arange(count)
    return pa.table(
        {
            "id": numbers,
            "app": pa.array([f"app-{n % 1000}" for n in range(count)]),
            "value": numbers * 0.5,
            "at": pa.array(numbers * 1000 + 1_700_000_000_000_000, pa.timestamp("us")),
        }
    )


def by_hand(server: Any, table: str, rows: pa.Table) -> Callable[[], None]:
    batches = rows.combine_chunks().to_batches(100_000)
    texts = [bytes(as_csv(b) if server.dialect == "postgres" else as_lines(b)) for b in batches]

    def copied() -> None:
        with closing(server.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("begin")
            with cursor.copy(f"copy {table} from stdin (format csv)") as copy:
                for text in texts:
                    copy.write(text)
            cursor.execute("commit")

    def loaded() -> None:
        with closing(server.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("begin")
            for text in texts:
                with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
                    file.write(text)
                    file.flush()
                    cursor.execute(
                        f"load data local infile '{file.name}' into table {table}"
                        " character set utf8mb4"
                    )
            cursor.execute("commit")

    return copied if server.dialect == "postgres" else loaded


def ours(
    server: Any, table: str, rows: pa.Table, home: str, settings: str = "", **options: str
) -> Callable[[], None]:
    staging = StagedFiles(LocalStore(Path(home) / uuid.uuid4().hex))
    given = {
        "url": f"jdbc:{server.url}{settings}",
        "user": "postgres" if server.dialect == "postgres" else "root",
        "password": database_servers.PASSWORD,
        "dbtable": table,
        **options,
    }
    sink = jdbc_from_options(Options("the sink jdbc", given), rows.schema)
    sink.check_start()
    writer = Writer(uuid.uuid4().hex, OperatorUid("rows"), SubtaskIndex(0))
    context = SinkContext(
        "bench", Attempt(1), writer.uid, SubtaskIndex(0), writer.incarnation, staging
    )
    with closing(sink.open_writer(context)) as opened:
        for batch in rows.to_batches(20_000):
            opened.write(batch)
        committables = tuple(opened.rotate(CheckpointId(1))())

    def committed() -> None:
        with closing(sink.open_committer(CommitterContext("bench", staging))) as committer:
            committer.commit(Epoch(0), [Prepared(Mark(writer, CheckpointId(1)), committables)])

    return committed


def measure(server: Any, rows: pa.Table, rounds: int, home: str) -> None:
    is_postgres = server.dialect == "postgres"
    at, double = ("timestamp", "double precision") if is_postgres else ("datetime(6)", "double")
    columns = f"id bigint{{}}, app varchar(40), value {double}, at {at}"
    plain, keyed = columns.format(""), columns.format(" primary key")
    others = {} if is_postgres else {"by INSERT": "?allowLoadLocalInfile=false"}
    took: dict[str, list[float]] = {}

    def timed(name: str, act: Callable[[], None], table: str) -> None:
        begun = time.perf_counter()
        act()
        took.setdefault(name, []).append(time.perf_counter() - begun)
        assert server.execute(f"select count(*) from {table}") == [(rows.num_rows,)]

    for _ in range(rounds):
        table = server.table(plain)
        timed("by hand", by_hand(server, table, rows), table)
        table = server.table(plain)
        timed("ours", ours(server, table, rows, home), table)
        for name, settings in others.items():
            table = server.table(plain)
            timed(f"ours, {name}", ours(server, table, rows, home, settings), table)
        table = server.table(keyed)
        timed("by hand, primary key", by_hand(server, table, rows), table)
        table = server.table(keyed)
        timed("ours, upsertKeys, new keys", ours(server, table, rows, home, upsertKeys="id"), table)
        timed(
            "ours, upsertKeys, same keys", ours(server, table, rows, home, upsertKeys="id"), table
        )
    for name, seconds in took.items():
        median = statistics.median(seconds)
        base = "by hand, primary key" if "upsert" in name else "by hand"
        share = statistics.median(took[base]) / median if name != base else 1.0
        print(f"  {name:32} {rows.num_rows / median:10,.0f} rows/s, {share:6.0%} of by hand")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    asked = parser.parse_args()
    rows = rows_of(asked.rows)
    for kind in asked.kinds:
        with (
            tempfile.TemporaryDirectory() as home,
            database_servers.running_server(KINDS[kind]) as server,
        ):
            if kind != "postgres":
                server.execute("set global local_infile = 1")
            print(f"{kind}, {asked.rows:,} rows, load {os.getloadavg()[0]:.0f}")
            measure(server, rows, asked.rounds, home)


if __name__ == "__main__":
    main()
