"""The servers of one command that sinks write to: databases and a bucket, each started when it is
first needed."""

from __future__ import annotations

import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from stillframe.bench.link import Link
from stillframe.testing.database_node import (
    PASSWORD,
    DatabaseNode,
    MariadbNode,
    MysqlNode,
    NoDatabase,
    PostgresNode,
)
from stillframe.testing.fetched import NotFetched
from stillframe.testing.s3_node import ACCESS_KEY, SECRET_KEY, NoS3, S3Node, s3_node

CANNOT_START = (NoDatabase, NoS3, NotFetched)
_COLUMNS = "app_id varchar(100), user_id bigint, url varchar(200)"


class Servers:
    """`close` ends them and deletes what they hold."""

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self._tell = tell
        self._ending = ExitStack()
        self._databases: dict[str, DatabaseNode] = {}
        self._s3: S3Node | None = None

    def given(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What a program is told: the server, and an empty table or bucket to write to."""
        if params["workload"] == "s3_sink":
            node = self._s3 or self._started_s3()
            bucket = f"bench-{uuid.uuid4().hex[:12]}"
            node.make_bucket(bucket)
            keys = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
            url = self._url_over_link(node, params["link_bytes_per_second"])
            return {"server": {"url": url, **keys}, "output": bucket}
        dialect = params["workload"].removesuffix("_sink")
        database = self._databases.get(dialect) or self._started_database(dialect)
        known = {"url": database.url, "user": database.user, "password": PASSWORD}
        return {"server": known, "output": database.table(_COLUMNS)}

    def close(self) -> None:
        self._databases.clear()
        self._s3 = None
        self._ending.close()

    def _started_database(self, dialect: str) -> DatabaseNode:
        if dialect == "postgres":
            node = self._started(PostgresNode)
        else:
            try:
                node = self._started(MysqlNode)
            except (NoDatabase, NotFetched) as error:
                self._tell(f"MariaDB stands in for MySQL: {error}")
                node = self._started(MariadbNode)
            node.execute("set global local_infile = 1")
        self._databases[dialect] = node
        return node

    def _started(self, made: Callable[[Path, int], DatabaseNode]) -> DatabaseNode:
        node = made(self._directory(), held_port(self._ending))
        self._tell(f"starting {node.dialect}")
        self._ending.callback(node.stop)
        node.start()
        return node

    def _started_s3(self) -> S3Node:
        self._s3 = node = s3_node(self._directory(), held_port(self._ending))
        self._tell(f"starting an S3 server ({type(node).__name__})")
        self._ending.callback(node.kill)
        node.start()
        return node

    def _url_over_link(self, node: S3Node, bytes_per_second: int | None) -> str:
        if bytes_per_second is None:
            return node.url
        link = Link(node.port, bytes_per_second)
        self._ending.callback(link.close)
        return link.url

    def _directory(self) -> Path:
        home = Path(tempfile.mkdtemp(prefix="stillframe-bench-server-"))
        self._ending.callback(shutil.rmtree, home, ignore_errors=True)
        return home


def held_port(ending: ExitStack) -> int:
    """For as long as it is held, whoever asks for any port gets another one."""
    held = ending.enter_context(closing(socket.socket()))
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return int(held.getsockname()[1])
