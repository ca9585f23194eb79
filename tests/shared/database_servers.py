"""The database servers of the tests, with what they ask of them.

As a command it runs another one beside MySQL, whose address is put behind its arguments, and the
password of `root` into its environment:

    python tests/shared/database_servers.py COMMAND ... --url
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from certificates import certified
from ports import hold_port, port_of

from stillframe.testing.database_node import (
    PASSWORD,
    DatabaseNode,
    MariadbNode,
    MysqlNode,
    NoCompiler,
    PostgresNode,
)


class Server(DatabaseNode):
    """What all have in common."""

    _locking: tuple[str, ...]
    _waiting: str
    _creating: tuple[str, ...]
    _renewing: str
    _placing: tuple[str, ...]

    def __init__(self, home: Path, port: int) -> None:
        super().__init__(home, port)
        self.certificate = home / "certificate.pem"
        """Of localhost, which the server shows to those who ask for encryption."""
        self._key = home / "key.pem"
        key, certificate = certified("localhost")
        self.certificate.write_bytes(certificate)
        self._key.write_bytes(key)
        self._key.chmod(0o600)
        for file in (self._key, self.certificate) if self._as else ():
            os.chown(file, self._as["user"], self._as["group"])

    def table_on(self, columns: str, place: str) -> str:
        """A new table with its rows in this directory; its name."""
        if self._as:
            os.chown(place, self._as["user"], self._as["group"])
        name = f"t_{uuid.uuid4().hex[:12]}"
        for words in self._placing:
            self.execute(words.format(table=name, columns=columns, place=place))
        return name

    def forget_place(self) -> None:
        """When no table is there any more."""

    def asked(self, statement: str) -> list[str]:
        """What the server's own client prints: a line for each row, tabs between columns."""
        command, environment = self._client(statement)
        given = {**os.environ, **environment}
        printed = subprocess.run(
            list(map(str, command)), env=given, check=True, timeout=60, stdout=subprocess.PIPE
        )
        return printed.stdout.decode().splitlines()

    def tables(self) -> set[str]:
        """All that are there, but for the system's own."""
        listed = self.execute(
            "select table_schema, table_name from information_schema.tables where table_schema not"
            " in ('information_schema', 'pg_catalog', 'mysql', 'performance_schema', 'sys')"
        )
        return {".".join(each) for each in listed}

    def new_user(self, password: str) -> str:
        """A new one who may do everything; its name."""
        name = f"u_{uuid.uuid4().hex[:8]}"
        for words in self._creating:
            self.execute(words.format(name, password))
        return name

    def change_password(self, user: str, password: str) -> None:
        self.execute(self._renewing.format(user, password))

    @contextmanager
    def locked(self, table: str) -> Iterator[None]:
        """Nobody else writes to it, or locks its rows."""
        with closing(self.connect()) as connection, connection.cursor() as cursor:
            for words in self._locking:
                cursor.execute(words.format(table))
            yield

    def waits_for_a_lock(self) -> bool:
        """Whether anybody does now."""
        return self.execute(self._waiting) != []

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        return sorted(self.execute(f"select * from {table}"), key=repr)


class PostgresServer(Server, PostgresNode):
    _locking = ("begin", "lock table {} in exclusive mode")
    _waiting = "select pid from pg_locks where not granted"
    _creating = ("create role {} superuser login password '{}'",)
    _renewing = "alter role {} password '{}'"
    _placing = (
        "create tablespace elsewhere location '{place}'",
        "create table {table} ({columns}) tablespace elsewhere",
    )

    def forget_place(self) -> None:
        self.execute("drop tablespace elsewhere")

    def _client(self, statement: str) -> tuple[list[object], dict[str, str]]:
        at = f"host=127.0.0.1 port={self.port} user=postgres dbname=postgres"
        client = [self._programs() / "psql", at, "-At", "-F", "\t", "-c", statement]
        return client, {"PGPASSWORD": PASSWORD}


class MysqlServer(Server, MysqlNode):
    _locking = ("lock tables {} write",)
    _creating = ("create user {} identified by '{}'", "grant all on *.* to {}")
    _renewing = "alter user {} identified by '{}'"
    _placing = ("create table {table} ({columns}) data directory = '{place}'",)
    _waiting = "select id from information_schema.processlist where state like 'Waiting for % lock'"

    def asked(self, statement: str) -> list[str]:
        # Its archive has no client, and MariaDB's does not know how this server asks for passwords.
        return ["\t".join(map(str, row)) for row in self.execute(statement)]

    def _settings(self) -> dict[str, object]:
        # Without them, MariaDB would draw a key of 4096 bits at each start.
        return {**super()._settings(), "ssl-cert": self.certificate, "ssl-key": self._key}


class MariadbServer(MysqlServer, MariadbNode):
    asked = Server.asked

    def _client(self, statement: str) -> tuple[list[object], dict[str, str]]:
        at = ("--no-defaults", "-h127.0.0.1", f"-P{self.port}", "-uroot", "shop")
        client = [self._base() / "bin" / "mariadb", *at, "-BN", "-e", statement]
        return client, {"MYSQL_PWD": PASSWORD}


@contextmanager
def running_server(made: Callable[[Path, int], Server]) -> Iterator[Server]:
    """One that has started, on a port of its own."""
    # Not below the directories of pytest, which only we may enter: the server is somebody else.
    with (
        tempfile.TemporaryDirectory(prefix="stillframe-database-") as home,
        closing(hold_port()) as held,
    ):
        server = made(Path(home), port_of(held))
        try:
            server.start()
            yield server
        except NoCompiler as error:
            pytest.skip(str(error))
        finally:
            server.stop()


if __name__ == "__main__":
    with running_server(MysqlServer) as started:
        sys.exit(
            subprocess.call([*sys.argv[1:], started.url], env={**os.environ, "MYSQL_PWD": PASSWORD})
        )
