"""Duplicates in MySQL behind a job that is exactly-once: whose commits are not the checkpoints'.

The job takes a checkpoint every 60 s. The first sink is of the kind that one writes oneself: it
inserts rows as they come, and commits every 5 s. 30 s behind checkpoint 100 its worker is killed.
Six batches are in MySQL which no checkpoint knows of. The job goes back to checkpoint 100, reads
these rows again, and the sink writes them again: six batches are there twice.

`format("mysql")` commits when a checkpoint is complete, together with a mark that names it. What is
read again has never been seen.

The clock is that of the records, which say when they came: so the seconds pass as quickly as they
are read. With a server of your own, its password in MYSQL_PWD, and a database in which the example
may create tables:

    stillframe run --quiet examples/e5_duplicates_in_mysql.py -- --user root \\
        --url mysql://localhost:3306/shop

or `make e5`, which starts one.
"""

import json
import os
import signal
import time
import uuid
from argparse import ArgumentParser
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.parse import urlsplit

import pymysql
from page_view_topics import WAIT_SECONDS_MAX, restored_from, take_99_checkpoints
from pyspark.sql import SparkSession

import stillframe

CHECKPOINT_EVERY_S, COMMIT_EVERY_S, CRASH_AFTER_S = 60, 5, 30
VIEWS_PER_SECOND = 20


# --- The sink that one writes oneself --------------------------------------------------------


@dataclass(frozen=True)
class SinkOfOnesOwn(stillframe.Sink):
    """Commits every 5 s, whatever the checkpoints do."""

    url: str
    user: str
    password: stillframe.Secret
    table: str

    guarantee = "at-least-once"
    option_names = ("url", "user", "password", "dbtable")

    @classmethod
    def from_options(cls, options, schema):
        password = options.secret("password")
        return cls(options["url"], options["user"], password, options["dbtable"])

    def open_writer(self, context):
        return InsertingWriter(self)

    def open_committer(self, context):
        return NothingToCommit()

    def describe(self):
        return f"a sink of one's own for table {self.table}"


class InsertingWriter(stillframe.SinkWriter):
    def __init__(self, sink):
        self._table = sink.table
        password = sink.password.reveal()
        self._connection = connected(sink.url, sink.user, password, autocommit=False)

    def write(self, batch):
        for view in batch.to_pylist():
            with self._connection.cursor() as cursor:
                cursor.execute(f"insert into {self._table} values (%(id)s, %(at_ms)s)", view)
            if view["at_ms"] % (COMMIT_EVERY_S * 1000) == 0:
                self._connection.commit()

    def rotate(self, checkpoint_id):
        return list  # at a barrier it does nothing

    def close(self):
        self._connection.close()


class NothingToCommit(stillframe.Committer):
    def commit(self, epoch, prepared):
        """All that it commits is committed before."""

    def sweep(self, job, uid, older_than, keep):
        """Nothing is ever left behind."""


# --- The example -----------------------------------------------------------------------------


class Seen(NamedTuple):
    """What MySQL has."""

    seconds: int
    """When the last of its views came."""
    rows: int
    duplicates: int
    commits: int
    """Of the whole server, since it began."""


class Result(NamedTuple):
    at_checkpoint: Seen
    at_crash: Seen
    batches: int
    """In MySQL at the crash, and not in the checkpoint."""
    predicted: int
    """How many rows will be there twice."""
    restored: int
    at_next: Seen


class Views:
    """A table in MySQL, and a directory that the job follows: a log of page views."""

    def __init__(self, url, user, directory):
        self.url, self.user = url, user
        self.log = Path(directory, "log")
        self.log.mkdir()
        self.table = f"views_{uuid.uuid4().hex[:8]}"
        self._written_s = 0
        self.ask(f"create table {self.table} (id bigint, at_ms bigint) engine = InnoDB")

    def ask(self, statement):
        opened = connected(self.url, self.user, os.environ["MYSQL_PWD"])
        with closing(opened) as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchall()

    def write_until(self, seconds):
        """The log goes on to this second: 20 views in each."""
        ids = range(self._written_s * VIEWS_PER_SECOND, seconds * VIEWS_PER_SECOND)
        lines = [{"id": i, "at_ms": (i + 1) * 1000 // VIEWS_PER_SECOND} for i in ids]
        hidden = self.log / f".{seconds}"
        hidden.write_text("".join(json.dumps(line) + "\n" for line in lines))
        hidden.rename(self.log / f"until-{seconds}.json")
        self._written_s = seconds

    def look(self):
        asked = f"select max(at_ms) div 1000, count(*), count(distinct id) from {self.table}"
        [(seconds, rows, distinct)] = self.ask(asked)
        [(_, commits)] = self.ask("show global status like 'Com_commit'")
        return Seen(seconds, rows, rows - distinct, int(commits))


def connected(url, user, password, autocommit=True):
    at = urlsplit(url)
    return pymysql.connect(
        host=at.hostname,
        port=at.port or 3306,
        database=at.path[1:],
        user=user,
        password=password,
        autocommit=autocommit,
    )


@contextmanager
def running(spark, views, sink, directory):
    """The job, with the sink that these words name."""
    lines = (
        stillframe.on(spark)
        .readStream.format("json")
        .option("followInterval", "100 ms")
        .schema("id long, at_ms long")
        .load(str(views.log))
    )
    writer = lines.writeStream.format("mysql" if sink == "mysql" else SinkOfOnesOwn)
    writer = writer.options(url=views.url, user=views.user, password="env:MYSQL_PWD")
    query = (
        writer.option("dbtable", views.table)
        .queryName(f"e5-{sink}")
        .option("checkpointLocation", directory)
        .option("checkpointInterval", "1 hour")  # the example says when
        .option("restartDelay", "100 ms")
        .option("parallelism", 1)
        .start()
    )
    try:
        yield query
    finally:
        query.stop()


def run(spark, url, user, sink, say=print):
    """With the sink `mysql`, or one's `own`."""
    with TemporaryDirectory() as directory:
        views = Views(url, user, directory)
        try:
            with running(spark, views, sink, directory) as query:
                return story(views, query, sink, say)
        finally:
            views.ask(f"drop table {views.table}")


def story(views, query, sink, say):
    crash_s, next_s = CHECKPOINT_EVERY_S + CRASH_AFTER_S, 2 * CHECKPOINT_EVERY_S
    say("a sink of one's own" if sink == "own" else 'format("mysql")')
    take_99_checkpoints(query)
    at_checkpoint = checkpoint(views, query, CHECKPOINT_EVERY_S)
    say(f"checkpoint 100 at {at_checkpoint.seconds} s: MySQL has {at_checkpoint.rows} rows")

    views.write_until(crash_s)
    read_s = until(lambda: seconds_read(query), lambda read: read == crash_s)
    at_crash = until(views.look, lambda seen: seen.seconds == crash_s or sink != "own")
    batches = at_crash.commits - at_checkpoint.commits
    predicted = at_crash.rows - at_checkpoint.rows
    say(
        f"at {read_s:g} s it has {at_crash.rows} rows, by {batches} more commits:"
        f" if the job crashes now, {predicted} rows will be there twice"
    )

    os.kill(query.slot_pids[0], signal.SIGKILL)
    at_next = checkpoint(views, query, next_s, CRASH_AFTER_S)
    restored = restored_from(query)
    say(f"the worker is killed, and the job has restarted from checkpoint {restored}")
    say(
        f"checkpoint 101 at {at_next.seconds} s: MySQL has {at_next.rows} rows, of which"
        f" {at_next.duplicates} are there twice"
    )
    return Result(at_checkpoint, at_crash, batches, predicted, restored, at_next)


def checkpoint(views, query, seconds, read_twice_s=0):
    """Take one when the job has read this far; what MySQL has then."""
    views.write_until(seconds)
    until(lambda: seconds_read(query), lambda read: read == seconds + read_twice_s)
    query.checkpoint()
    return until(views.look, lambda seen: seen.seconds == seconds)


def seconds_read(query):
    """As the job counts, for which a view that is read twice is two."""
    return query.summary.records_in / VIEWS_PER_SECOND


def until(look, is_so):
    """What is seen when it is so."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not is_so(seen := look()):
        assert time.monotonic() < deadline, f"after {WAIT_SECONDS_MAX} s it is still {seen}"
        time.sleep(0.05)
    return seen


if __name__ == "__main__":
    arguments = ArgumentParser()
    arguments.add_argument("--user", required=True)
    arguments.add_argument("--url", required=True)
    given = arguments.parse_args()
    session = SparkSession.builder.appName("e5").getOrCreate()
    for kind in ("own", "mysql"):
        run(session, given.url, given.user, kind)
