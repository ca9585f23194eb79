"""A store on HDFS, through the library `hdfs-native`: no JVM and no Hadoop is needed here.

Theory of operation
-------------------
A file is written under a temporary name beside its final one, which no listing shows, flushed to
the disks of its datanodes (`hsync`), closed, and renamed. The namenode renames for exactly one of
those who try and never onto a file that is there, so the whole file appears at once.

What is hard is a lost answer. The library sends a request again by itself when a connection breaks,
and cannot say that it did. A rename that was done and is sent again finds its source gone. That is
also what somebody finds whose temporary file was swept, because another driver has taken over. So
for the job log, whose names several drivers try to take, it is an error after which one looks. The
names of other files hold the attempt: where one is there with the right length, it is ours.

Which namenode is meant, and where those of a name service are, says Hadoop's configuration, in the
directory HADOOP_CONF_DIR of each machine.

Rules of this file
------------------
1. Those of `asking`. The library's own patience is three minutes, so it is told to have little,
   and every call has a thread of its own that is left behind when its time is up. (Its asynchronous
   client could be cancelled, but panics when it waits before it tries again.)
2. What goes wrong with a rename is `Unanswered`, whatever the library says: an earlier try of it
   may have been done.
"""

from __future__ import annotations

import builtins
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import pyarrow as pa

from stillframe.errors import (
    BuildError,
    NotDone,
    SnapshotDamaged,
    StartRefused,
    StorageError,
    Unanswered,
)
from stillframe.storage.asking import (
    WHOLE_BYTES_MAX,
    Answer,
    Asking,
    Limits,
    Missing,
    Taken,
    Tally,
    Trouble,
    Watched,
)
from stillframe.storage.store import (
    Chunk,
    Store,
    Written,
    check_crc32,
    never_overwritten,
    wrong_length,
)

if TYPE_CHECKING:
    from hdfs_native import Client, FileReader

TEMPORARY_PREFIX = ".tmp-"
_DEFAULT_PORT = 8020
_READ_BYTES_MAX = 64 * 1024 * 1024

_LITTLE_PATIENCE = {
    # Enough to find the active one of a name service; whatever else is tried again by us.
    "dfs.client.failover.max.attempts": "3",
    "dfs.client.failover.sleep.base.millis": "50",
    "dfs.client.failover.sleep.max.millis": "500",
}


def open_hdfs(address: str, limits: Limits | None = None) -> HdfsStore:
    """The store at `hdfs://host:port/path`, `hdfs://nameservice/path` or `hdfs:///path`."""
    rest = address.partition(":")[2]
    host, slash, path = rest.removeprefix("//").partition("/")
    parts = [part for part in path.split("/") if part]
    if not rest.startswith("//") or not slash or any(part in (".", "..") for part in parts):
        raise BuildError(
            f"the checkpoint location {address!r} is no directory of HDFS: write it as"
            " hdfs://host:port/path, or hdfs:///path where HADOOP_CONF_DIR says the host"
        )
    return HdfsStore(Cluster(host, limits or Limits()), "".join(f"/{part}" for part in parts))


class Cluster(Asking):
    """A namenode, or several that stand in for each other, and how to ask for something there."""

    def __init__(self, authority: str, limits: Limits) -> None:
        super().__init__(limits)
        self.url = f"hdfs://{authority}"
        self._authority = authority
        self._lock = threading.Lock()
        self._client: Client | None = None

    def client(self) -> Client:
        """Made at the first request, never before: a process that was forked could not use it."""
        with self._lock:
            if self._client is None:
                self._client = self._connected()
            return self._client

    def _connected(self) -> Client:
        try:
            from hdfs_native import Client
        except ImportError:
            raise StartRefused(
                f"{self.url} needs the package hdfs-native, which is not installed here: install"
                " stillframe[hdfs] on the driver and on every executor"
            ) from None
        try:
            return Client(self.url, _LITTLE_PATIENCE)
        except RuntimeError:
            if not self._authority:
                raise StartRefused(
                    "hdfs:/// names no namenode, and no fs.defaultFS is found (HADOOP_CONF_DIR is"
                    f" {os.environ.get('HADOOP_CONF_DIR')!r}): set HADOOP_CONF_DIR to the directory"
                    " with core-site.xml, or write hdfs://host:port/path"
                ) from None
        # As Hadoop takes it: a host where there is no such name service.
        return Client(f"{self.url}:{_DEFAULT_PORT}", _LITTLE_PATIENCE)

    def run(self, call: Callable[[], Answer], limit_seconds: float | None = None) -> Answer:
        """Wait for this, but no longer; it is given up then, and may be done all the same."""
        answer: Future[Answer] = Future()

        def answered() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=answered, name="stillframe-hdfs", daemon=True).start()
        return answer.result(limit_seconds or self.limits.request_seconds)

    def understand(self, error: Exception) -> Trouble:
        """It tells only a few kinds apart by type; the rest is read out of its text."""
        if isinstance(error, FileExistsError):
            raise Taken from None
        if isinstance(error, FileNotFoundError):
            raise Missing from None
        if isinstance(error, TimeoutError):
            return Trouble(f"{self.url} did not answer in time", is_passing=True, may_be_done=True)
        if not isinstance(error, OSError | RuntimeError):
            raise error
        refusal = re.match(r'(?:Fatal)?RPCError\("([\w.$]+)", "(.*)', str(error), re.DOTALL)
        if refusal:
            said = re.split(r"\\n|\n", refusal[2])[0].replace('\\"', '"').rstrip('")')
            return _refused(refusal[1].rpartition(".")[2], said)
        if "refused" in str(error) or "lookup address" in str(error):
            reason = f"{self.url} cannot be reached; start the namenode, or correct the address"
            return Trouble(reason, is_passing=True, may_be_done=False)
        said = (str(error).splitlines() or [""])[0][:200]
        reason = f"the connection to {self.url} or to one of its datanodes broke ({said})"
        return Trouble(reason, is_passing=True, may_be_done=True)


_REASONS = {
    "SafeModeException": "the namenode is in safe mode and changes nothing; wait until it has left"
    " it, or see hdfs dfsadmin -safemode get",
    "StandbyException": "the namenode is on standby; set HADOOP_CONF_DIR to the directory whose"
    " hdfs-site.xml names all namenodes, and write hdfs://nameservice/path",
    "ParentNotDirectoryException": "a part of the path is a file and not a directory; move it out"
    " of the way",
    "NSQuotaExceededException": "the quota of names is used up; raise it, or delete something",
    "DSQuotaExceededException": "the quota of space is used up; raise it, or delete something",
}
_LASTING = ("ParentNotDirectoryException", "NSQuotaExceededException", "DSQuotaExceededException")


def _refused(exception: str, said: str) -> Trouble:
    if exception == "AccessControlException":
        # "Permission denied: user=ann, access=WRITE, inode=..."
        reason = f"{said[:1].lower()}{said[1:]}; let this user write there, or set HADOOP_USER_NAME"
        return Trouble(reason, is_passing=False, may_be_done=False)
    reason = _REASONS.get(exception, f"the namenode answered {exception}: {said[:200]}")
    return Trouble(reason, is_passing=exception not in _LASTING, may_be_done=False)


class HdfsStore(Store):
    """Files below a directory of HDFS."""

    def __init__(self, cluster: Cluster, root: str) -> None:
        self._cluster = cluster
        self._root = root

    @property
    def cluster(self) -> Cluster:
        return self._cluster

    def __repr__(self) -> str:
        return f"HdfsStore({self.address!r})"

    @property
    def address(self) -> str:
        return self._where(self._root)

    def below(self, directory: str) -> HdfsStore:
        return HdfsStore(self._cluster, self._locate(directory))

    def write(self, path: str, chunks: Iterable[Chunk]) -> Written:
        final, tally = self._locate(path), Tally()
        if self._length_of("write", final) is not None:
            raise never_overwritten(self._where(final))
        temporary = self._written_beside(final, tally.counted(chunks))
        written = tally.written()
        try:
            if not self._renamed("write", temporary, final):
                raise never_overwritten(self._where(final))
        except Missing:  # see above
            if self._length_of("write", final) != written.length_bytes:
                raise self._swept("write", final) from None
        return written

    def create_if_absent(self, path: str, data: bytes) -> bool:
        final = self._locate(path)
        if self._length_of("create", final) is not None:
            return False
        temporary = self._written_beside(final, iter([memoryview(data)]), "create")
        try:
            return self._renamed("create", temporary, final)
        except Missing:  # see above
            raise self._swept("create", final) from None

    def read(self, path: str) -> bytes:
        file = self._locate(path)
        return self._contents(file, self._opened(file))

    def read_verified(self, path: str, length_bytes: int, crc32: int) -> pa.Buffer:
        file = self._locate(path)
        source = self._opened(file)
        if len(source) != length_bytes:
            raise wrong_length(self._where(file), len(source), length_bytes, crc32)
        contents = self._contents(file, source)
        check_crc32(self._where(file), contents, crc32)
        return pa.py_buffer(contents)

    def list(self, directory: str) -> builtins.list[str]:
        place = self._locate(directory) if directory else self._root
        names = self._names(place)
        return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))

    def delete(self, path: str) -> None:
        self._delete(self._locate(path))

    def delete_directory(self, path: str) -> None:
        self._delete(self._locate(path), with_all_below=True)

    def delete_unfinished(self, directory: str) -> None:
        place = self._locate(directory)
        for name in self._names(place):
            if name.startswith(TEMPORARY_PREFIX):
                self._delete(f"{place}/{name}")

    # --- where things are ---

    def _locate(self, path: str) -> str:
        parts = path.split("/")
        assert not any(part in ("", ".", "..") for part in parts), f"not a path here: {path!r}"
        return f"{self._root}/{path}"

    def _where(self, file: str) -> str:
        return f"{self._cluster.url}{file}"

    # --- writing ---

    def _written_beside(self, final: str, views: Iterator[memoryview], doing: str = "write") -> str:
        """A new file in the final one's directory that the disks have; its name.

        A small one is tried again, a large one is not: what makes it can be read only once.
        """
        head = bytearray()
        for view in views:
            head += view
            if len(head) > WHOLE_BYTES_MAX:
                return self._written_once(doing, final, chain([memoryview(head)], views))
        whole = [memoryview(head)] if head else []
        try:
            return self._cluster.ask(
                doing, self._where(final), lambda: self._write_through(final, whole)
            )
        except (Missing, Taken):  # its directory was deleted a moment ago
            raise self._swept(doing, final) from None
        except Unanswered as error:  # only of a name that nobody asks for
            raise NotDone(str(error)) from None

    def _written_once(self, doing: str, final: str, views: Iterator[memoryview]) -> str:
        watched = Watched(views)
        try:
            return self._write_through(final, watched)
        except (OSError, RuntimeError) as error:
            if watched.has_failed:
                raise
            try:
                reason = self._cluster.understand(error).reason
            except (Missing, Taken):
                raise self._swept(doing, final) from None
            raise NotDone(f"cannot {doing} {self._where(final)}: {reason}") from None

    def _write_through(self, final: str, views: Iterable[memoryview]) -> str:
        cluster, client = self._cluster, self._cluster.client()
        limit = cluster.limits.body_seconds
        temporary = f"{final.rpartition('/')[0]}/{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
        target = cluster.run(lambda: client.create(temporary))
        try:
            is_empty = True
            for view in views:
                cluster.run(partial(target.write, view), limit)
                is_empty = False
            if not is_empty:  # of an empty file the datanodes do not know
                cluster.run(target.hsync, limit)
            cluster.run(target.close, limit)
        except BaseException:
            # What is left is harmless, and what went wrong before is the better story.
            with suppress(OSError, RuntimeError):
                cluster.run(lambda: client.delete(temporary))
            raise
        return temporary

    def _renamed(self, doing: str, temporary: str, final: str) -> bool:
        """Whether there was no such file, and so this is it now; `Missing`: our own is gone."""
        cluster, client = self._cluster, self._cluster.client()
        try:
            cluster.ask(
                doing,
                self._where(final),
                lambda: cluster.run(lambda: client.rename(temporary, final)),
            )
        except Taken:
            with suppress(StorageError):
                self._delete(temporary)
            return False
        except StorageError as error:
            raise Unanswered(str(error)) from None
        return True

    def _swept(self, doing: str, file: str) -> StorageError:
        return StorageError(
            f"cannot {doing} {self._where(file)}: what was written for it is gone, because another"
            " driver has swept it, or because the answer to its last request was lost"
        )

    # --- reading ---

    def _opened(self, file: str) -> FileReader:
        cluster, client = self._cluster, self._cluster.client()
        return self._asked_to_read(file, lambda: cluster.run(lambda: client.read(file)))

    def _contents(self, file: str, source: FileReader) -> bytes:
        cluster, limit = self._cluster, self._cluster.limits.body_seconds

        def piece(start: int) -> bytes:
            length = min(_READ_BYTES_MAX, len(source) - start)
            return self._asked_to_read(
                file, lambda: cluster.run(lambda: source.read_range(start, length), limit)
            )

        return b"".join(map(piece, range(0, len(source), _READ_BYTES_MAX)))

    def _asked_to_read(self, file: str, request: Callable[[], Answer]) -> Answer:
        try:
            return self._cluster.ask("read", self._where(file), request)
        except Missing:
            raise SnapshotDamaged(
                f"{self._where(file)} is missing: it was deleted, or never written, or the namenode"
                " is not the one of the cluster to which it was written"
            ) from None

    def _length_of(self, doing: str, file: str) -> int | None:
        """None if there is no such file."""
        cluster, client = self._cluster, self._cluster.client()
        try:
            found = cluster.ask(
                doing, self._where(file), lambda: cluster.run(lambda: client.get_file_info(file))
            )
        except Missing:
            return None
        return found.length

    def _names(self, place: str) -> builtins.list[str]:
        cluster, client = self._cluster, self._cluster.client()

        def listed() -> builtins.list[str]:
            return [found.path.rpartition("/")[2] for found in client.list_status(place or "/")]

        try:
            return cluster.ask("list", self._where(place), lambda: cluster.run(listed))
        except Missing:
            return []

    # --- deleting ---

    def _delete(self, path: str, *, with_all_below: bool = False) -> None:
        cluster, client = self._cluster, self._cluster.client()
        with suppress(Missing):
            cluster.ask(
                "delete",
                self._where(path),
                lambda: cluster.run(lambda: client.delete(path, with_all_below)),
            )
