"""HDFS over a network that breaks, as another user, in safe mode, and by Hadoop's configuration."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gateway import Gateway

from stillframe.errors import NotDone, StartRefused, StorageError, Unanswered
from stillframe.storage.asking import Limits
from stillframe.storage.hdfs import open_hdfs
from stillframe.storage.store import Store, open_store

pytestmark = pytest.mark.hdfs

LIMITS = Limits.of_request(1.0)


def is_rename(data: bytes) -> bool:
    return b"rename2" in data


@pytest.fixture
def way(hdfs) -> Iterator[Gateway]:
    """To the namenode; datanodes are reached directly."""
    gateway = Gateway(hdfs.port)
    yield gateway
    gateway.end()


@pytest.fixture
def other(hdfs_root: str) -> Store:
    """The same store, by a way that never breaks."""
    return open_store(hdfs_root)


@pytest.fixture
def store(hdfs, hdfs_root: str, way: Gateway) -> Store:
    return open_hdfs(hdfs_root.replace(str(hdfs.port), str(way.port)), LIMITS)


def test_a_creator_that_cannot_tell_whether_it_has_won_says_so(store, other, way) -> None:
    way.lose_answer_to(is_rename)

    with pytest.raises(StorageError, match=r"cannot create .*log/1: .* gone, because another"):
        store.create_if_absent("log/1", b"mine")

    assert way.answers_lost == 1
    assert other.read("log/1") == b"mine", "here it has; the job log looks"


def test_a_writer_whose_answer_was_lost_has_written(store, other, way) -> None:
    way.lose_answer_to(is_rename)

    written = store.write("chk-1/a", [b"state"])

    assert way.answers_lost == 1
    assert other.read_verified("chk-1/a", written.length_bytes, written.crc32).size == 5


def test_a_creator_that_was_swept_while_it_slept_has_not_won_though_the_contents_are_the_same(
    store, other, way
) -> None:
    told: list[object] = []

    def create() -> None:
        try:
            told.append(store.create_if_absent("log/1", b"same"))
        except StorageError as error:
            told.append(error)

    way.hold(is_rename)
    sleeper = threading.Thread(target=create)
    sleeper.start()
    assert way.held.wait(30)
    other.delete_unfinished("log")
    assert other.create_if_absent("log/1", b"same")
    way.flow()
    sleeper.join(30)

    [answer] = told
    assert isinstance(answer, StorageError)


def test_a_namenode_that_is_down_is_said_within_a_bound_and_nothing_was_done(store, other, way):
    way.close()
    began = time.monotonic()

    with pytest.raises(NotDone, match=r"cannot create hdfs://.*/log/1: hdfs://.* cannot be reach"):
        store.create_if_absent("log/1", b"mine")

    assert time.monotonic() - began < 5 * LIMITS.patience_seconds
    assert other.list("log") == []


def test_a_namenode_that_does_not_answer_leaves_it_open_whether_it_was_done(store, way) -> None:
    way.hold(is_rename)

    with pytest.raises(Unanswered, match=r"cannot create hdfs://.*: hdfs://.* did not answer in t"):
        store.create_if_absent("log/1", b"mine")


def test_a_namenode_that_comes_back_in_time_was_never_missed(store, way) -> None:
    store.write("a", [b"a"])
    way.close()
    back = threading.Timer(0.3, way.open)
    back.start()

    try:
        assert store.read("a") == b"a"
    finally:
        back.join()


def test_a_large_file_whose_namenode_goes_away_on_its_way_is_not_there(store, other, way) -> None:
    def chunks() -> Iterator[bytes]:
        yield bytes(10_000_000)
        way.close()
        yield bytes(10_000_000)

    with pytest.raises(NotDone, match=r"cannot write hdfs://.*/chk-1/a: hdfs://.* cannot be reach"):
        store.write("chk-1/a", chunks())
    assert other.list("chk-1") == []


def test_an_error_of_what_is_written_is_not_taken_for_one_of_the_storage(other) -> None:
    def chunks() -> Iterator[bytes]:
        yield bytes(20_000_000)
        raise OSError(5, "the local disk is broken")

    with pytest.raises(OSError, match="the local disk is broken"):
        other.write("chk-1/a", chunks())
    assert other.list("chk-1") == []


def test_a_user_who_may_not_write_there_is_named(hdfs_root, monkeypatch) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "ann")

    said = (
        r"cannot create hdfs://\S+/log/1: permission denied: user=ann, access=WRITE, .*; let this"
    )
    with pytest.raises(NotDone, match=said) as raised:
        open_store(hdfs_root).create_if_absent("log/1", b"")
    assert "\n" not in str(raised.value)
    assert "java" not in str(raised.value)


def test_a_namenode_in_safe_mode_is_waited_for_and_said(hdfs, store, other) -> None:
    other.write("a", [b"a"])
    hdfs.administer("-safemode", "enter")
    try:
        assert store.read("a") == b"a"
        with pytest.raises(NotDone, match=r"cannot write hdfs://.*/b: the namenode is in safe mod"):
            store.write("b", [b"b"])
    finally:
        hdfs.administer("-safemode", "leave")


def configure(directory: Path, monkeypatch: pytest.MonkeyPatch, **files: dict[str, str]) -> None:
    for name, settings in files.items():
        properties = "".join(
            f"<property><name>{key}</name><value>{value}</value></property>"
            for key, value in settings.items()
        )
        (directory / f"{name}-site.xml").write_text(f"<configuration>{properties}</configuration>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(directory))


def test_what_hadoop_is_told_says_which_namenode_is_meant(hdfs, tmp_path, monkeypatch) -> None:
    configure(tmp_path, monkeypatch, core={"fs.defaultFS": hdfs.url})
    open_store("hdfs:///by-default/x").write("a", [b"a"])

    assert open_store(f"{hdfs.url}/by-default/x").read("a") == b"a"


def test_a_name_service_is_asked_where_the_first_of_its_namenodes_is_down(
    hdfs, tmp_path, monkeypatch
) -> None:
    nodes = {
        "dfs.nameservices": "shop",
        "dfs.ha.namenodes.shop": "one,two",
        "dfs.namenode.rpc-address.shop.one": "127.0.0.1:1",
        "dfs.namenode.rpc-address.shop.two": f"127.0.0.1:{hdfs.port}",
    }
    configure(tmp_path, monkeypatch, core={"fs.defaultFS": "hdfs://shop"}, hdfs=nodes)
    for address in ("hdfs://shop/service/x", "hdfs:///service/y"):
        assert open_store(address).create_if_absent("log/1", b"mine")

    assert open_store(f"{hdfs.url}/service").list("") == ["x", "y"]


def test_an_address_without_a_host_that_nothing_says_is_refused(monkeypatch) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)

    with pytest.raises(StartRefused, match=r"names no namenode.*HADOOP_CONF_DIR is None.*: set"):
        open_store("hdfs:///a").list("")


def test_that_the_package_is_missing_is_said(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "hdfs_native", None)

    with pytest.raises(
        StartRefused, match=r"hdfs://host:1 needs .* hdfs-native.*: install stillfr"
    ):
        open_store("hdfs://host:1/a").list("")


def test_a_host_without_a_port_has_the_usual_one() -> None:
    with pytest.raises(NotDone, match=r"hdfs://no-such-host.invalid cannot be reached"):
        open_hdfs("hdfs://no-such-host.invalid/a", LIMITS).list("")
