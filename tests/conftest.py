"""What the tests share: a Spark session, servers of S3 and HDFS, a Kafka broker and databases, for
those that ask."""

from __future__ import annotations

import http.client
import os
import shutil
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

import hypothesis
import pytest
import quick_java
from _pytest.nodeid import NodeId
from browsers import browser, eyes
from gateway import Gateway
from ports import hold_port, port_of
from tries import tries
from waiting import wait_until

if TYPE_CHECKING:
    from database_servers import Server
    from hdfs_cluster import HdfsCluster
    from kafka_broker import Broker
    from pyspark.sql import SparkSession

    from stillframe.testing.s3_node import S3Node

# Here, because a process has one browser: it cannot drive a second one beside it.
__all__ = ["browser", "eyes"]

_REGISTRY = "STILLFRAME_REGISTRY"

# How long an example takes says something of the machine, which may be busy.
hypothesis.settings.register_profile("stillframe", deadline=None, max_examples=tries(100))
hypothesis.settings.load_profile("stillframe")


def pytest_configure(config: pytest.Config) -> None:
    """Every JVM of the tests, also of a process that a test starts, compiles quickly: with the
    second compiler, for which none lives long enough, it takes twice the processor time."""
    quick_java.use(os.environ)
    quick = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    os.environ.setdefault("SPARK_SUBMIT_OPTS", quick)
    os.environ.setdefault("SPARK_DAEMON_JAVA_OPTS", quick)
    # The jobs of a worker's tests are announced among themselves: a test that looks for the one job
    # of some name must not find another worker's.
    if hasattr(config, "workerinput") or _REGISTRY not in os.environ:
        os.environ[_REGISTRY] = registry = tempfile.mkdtemp(prefix="stillframe-registry-")
        config.add_cleanup(lambda: shutil.rmtree(registry, ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Workers take one file after the other: short ones come last, so that none waits long for
    another's last file. A run in one process keeps its order. Long stories wait for `make soak`.

    Workers know a test by its id, and of several with the same one they run the first alone. Those
    that schemathesis makes, one for each route, differ in their names only.
    """
    if "STILLFRAME_SOAK" not in os.environ:
        long = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]
    for item in items:
        if not item.nodeid.endswith(item.name):
            item._id = NodeId.parse(f"{item.nodeid.rpartition('::')[0]}::{item.name}")
    repeated = [name for name, times in Counter(item.nodeid for item in items).items() if times > 1]
    assert not repeated, f"only the first of these would run: {repeated}"
    if hasattr(config, "workerinput"):
        slow, spark = (
            {item.path for item in items if item.get_closest_marker(name)}
            for name in ("slow", "spark")
        )
        items.sort(key=lambda item: (item.path not in slow, item.path not in spark))


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line says what was skipped and why: such a test has proved nothing."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not config.option.collectonly:
        reporter.write_line(f"skipped: {_skipped_in_words(reporter.stats.get('skipped', []))}")


def _skipped_in_words(reports: list[pytest.TestReport]) -> str:
    tests_of: dict[str, list[str]] = {}
    for report in sorted(reports, key=lambda report: report.nodeid):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        tests_of.setdefault(reason.removeprefix("Skipped: "), []).append(report.nodeid)
    return "; ".join(map(_of_one_reason, tests_of.items())) or "nothing"


def _of_one_reason(found: tuple[str, list[str]]) -> str:
    reason, tests = found
    others = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
    return f"{tests[0]}{others} ({reason})"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A quiet local Spark with four cores, shared by all tests of a worker."""
    # Imported here, so that tests without Spark neither wait for pyspark nor start a JVM.
    from stillframe.spark.deployment.java import ensure_java

    ensure_java()
    # Otherwise the workers are the first `python3` on PATH, which has none of our packages.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[4]")
        .appName("stillframe-tests")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    yield session
    session.stop()


# --- Ports ---------------------------------------------------------------------------------------


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port for a server that must be told one; no test that runs beside this one gets it."""
    with closing(hold_port()) as held:
        yield port_of(held)


# --- S3 ------------------------------------------------------------------------------------------

S3_SECRET = "a-secret-that-nobody-may-see"


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A local S3 server, moto's, for all tests of a worker; it forgets all when it ends."""
    pytest.importorskip("moto")
    from stillframe.testing.s3_node import MotoNode

    with closing(hold_port()) as held:
        server = MotoNode(tmp_path_factory.mktemp("s3"), port_of(held))
        try:
            server.start()
            yield server.port
        finally:
            server.kill()


@pytest.fixture
def s3_bucket(s3_port: int) -> str:
    """A new bucket."""
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    with closing(http.client.HTTPConnection("127.0.0.1", s3_port, timeout=30)) as connection:
        connection.request("PUT", f"/{bucket}")
        assert connection.getresponse().status == 200
    return bucket


@pytest.fixture
def gateway(s3_port: int) -> Iterator[Gateway]:
    """A way to the S3 server that a test may break."""
    way = Gateway(s3_port)
    yield way
    way.end()


@pytest.fixture
def s3_environment(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The S3 server and its keys, as a shell would say them."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-access-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", S3_SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture
def s3_settings(gateway: Gateway) -> dict[str, str]:
    """The S3 server through the gateway, and little patience."""
    return {
        "fs.s3a.endpoint": gateway.url,
        "fs.s3a.access.key": "an-access-key",
        "fs.s3a.secret.key": S3_SECRET,
        "fs.s3a.endpoint.region": "us-east-1",
        "fs.s3a.connection.request.timeout": "1s",
    }


@pytest.fixture(scope="session")
def keeping_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Node]:
    """An S3 server that still has everything when it was killed and is started again."""
    from s3_servers import keeping_server

    with closing(hold_port()) as held:
        server = keeping_server(tmp_path_factory.mktemp("keeping-s3"), port_of(held))
        try:
            server.start()
            yield server
        finally:
            server.kill()


# --- Kafka ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A Kafka broker for all tests of a worker; a test that kills it starts it again."""
    from kafka_broker import running_broker

    with running_broker(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker


# --- Databases -----------------------------------------------------------------------------------


def _served(kind: str) -> Iterator[Server]:
    """For all tests of a worker; a test that kills it starts it again."""
    import database_servers

    with database_servers.running_server(getattr(database_servers, kind)) as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    yield from _served("PostgresServer")


@pytest.fixture(scope="session")
def mysql() -> Iterator[Server]:
    yield from _served("MysqlServer")


@pytest.fixture(scope="session")
def mariadb() -> Iterator[Server]:
    yield from _served("MariadbServer")


# --- HDFS ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def hdfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    """For all tests of a worker; a test that kills it starts it again."""
    from hdfs_cluster import HdfsCluster

    with closing(hold_port()) as held:
        cluster = HdfsCluster(tmp_path_factory.mktemp("hdfs"), port_of(held))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


@pytest.fixture
def hdfs_root(hdfs: HdfsCluster) -> str:
    """The address of a new directory."""
    return f"{hdfs.url}/{uuid.uuid4().hex[:12]}"


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    return wait_until
