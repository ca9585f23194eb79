"""A store in an object storage: whole objects, created once, over a network that loses answers.

Theory of operation
-------------------
An object storage shows an object when all of it has arrived, and not before; what it lacks is
directories, and what it has instead of a link that fails is the conditional put: *create this if
there is none* (`If-None-Match: *`), which it refuses to all but one.

What is hard is the answer. A put whose answer was lost may have been done, may be under way, or
may never have arrived. So every put carries a token of its own among the object's metadata. It is
simply sent again, and when the storage then says that there is such an object already, the token
tells whether it is ours, from the lost try, or somebody else's.

A file is put whole up to a few megabytes. A larger one goes up in parts, so that it need not be in
memory, and appears when the last request joins them. The library cannot join conditionally, so
there a look beforehand keeps the promise never to overwrite. That is enough: names of state files
hold the attempt, and two writers never share one. The job log is never that large.
"""

from __future__ import annotations

import builtins
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stillframe.errors import NotDone, SnapshotDamaged, StorageError, Unanswered
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
    from obstore.store import S3Store

_QUICK_BYTES_MAX = 1024 * 1024
_PARTS_AT_ONCE_MAX = 4
_DELETE_TRIES_MAX = 5
_TOKEN = "stillframe-writer"


class Bucket(Asking):
    """A bucket and the way to ask it for something, again and again within a bound."""

    def __init__(
        self,
        name: str,
        endpoint: str,
        connect: Callable[[bool], S3Store],
        limits: Limits,
    ) -> None:
        """`connect` makes a client, with the newest credentials; True: one for large bodies."""
        super().__init__(limits)
        self.name = name
        self.endpoint = endpoint
        self._connect = connect
        self._lock = threading.Lock()
        self._clients: dict[bool, S3Store] = {}

    def client(self, length_bytes: int = 0) -> S3Store:
        """One for bodies of this size."""
        is_large = length_bytes > _QUICK_BYTES_MAX
        with self._lock:
            if is_large not in self._clients:
                self._clients[is_large] = self._connect(is_large)
            return self._clients[is_large]

    def head(self, doing: str, where: str, key: str) -> Any:
        """What the storage says of an object, of its size for example; may raise what `ask` does.

        What refuses a HEAD has no body to say why, such as that credentials have expired. A GET is
        refused with the reason.
        """
        import obstore
        from obstore import exceptions

        def looked() -> Any:
            client = self.client()
            try:
                return obstore.head(client, key)
            except (exceptions.BaseError, OSError) as error:
                if _status_in(str(error)) not in _WITHOUT_REASON:
                    raise
            return obstore.get(client, key).meta

        return self.ask(doing, where, looked)

    def understand(self, error: Exception) -> Trouble:
        from obstore import exceptions

        if not isinstance(error, exceptions.BaseError | OSError):
            raise error
        trouble = understand(error, self.endpoint)
        if trouble.reason in _OF_CREDENTIALS:
            with self._lock:
                self._clients.clear()  # new ones look for newer credentials
        return trouble


def understand(error: Exception, endpoint: str) -> Trouble:
    """What the library's error means; raises `Missing` or `Taken` where it is an answer.

    It tells only a few kinds apart by type; the rest is read out of its text. A text that says
    nothing known is taken for the worst: it may have been done, and trying again may help.
    """
    from obstore import exceptions

    text = str(error)
    code = _found(r"<Code>(\w+)</Code>", text)
    if isinstance(error, exceptions.AlreadyExistsError | exceptions.PreconditionError):
        raise Taken from None
    if isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
        raise Missing from None
    if status := _status_in(text):
        return _refused(status, code)
    if "169.254." in text or "credential" in text.lower():
        reason = (
            "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or"
            " spark.hadoop.fs.s3a.access.key and .secret.key"
        )
        return Trouble(reason, is_passing=False, may_be_done=False)
    match _found(r"kind: (Connect|Timeout|Interrupted)", text):
        case "Connect":
            return Trouble(f"{endpoint} cannot be reached", is_passing=True, may_be_done=False)
        case "Timeout":
            return Trouble(f"{endpoint} did not answer in time", is_passing=True, may_be_done=True)
        case _:
            reason = f"the connection to {endpoint} broke ({type(error).__name__})"
            return Trouble(reason, is_passing=True, may_be_done=True)


_EXPIRED = (
    "the credentials have expired, and no newer ones are found where they came from; renew them"
    " there, or start the job again with new ones"
)
_REASONS = {
    "NoSuchBucket": "there is no such bucket; make it, or choose another one",
    "AccessDenied": "access denied; let these credentials read, write, list and delete there",
    "InvalidAccessKeyId": "the storage does not know the access key; check the credentials",
    "SignatureDoesNotMatch": "the secret key does not fit the access key; check the credentials",
    "ExpiredToken": _EXPIRED,
    "SlowDown": "the storage answers 503 SlowDown, because it gets too many requests; raise its"
    " limits, or take checkpoints less often",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION",
}
_OF_CREDENTIALS = [
    _REASONS[code] for code in ("ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch")
]
_PASSING = (408, 409, 429)
"""Refusals that are none: a slow body, another's conditional put under way, too many requests."""
_WITHOUT_REASON = (400, 401, 403)
"""Refusals that may have any of several reasons, of which a HEAD does not tell which."""


def _refused(status: int, code: str) -> Trouble:
    is_passing = status >= 500 or status in _PASSING or code in ("RequestTimeout", "ExpiredToken")
    name = f"{status} {code}".strip()
    reason = _REASONS.get(code, f"the storage answered {name}")
    # A server may fail after it has done its work; a refusal is certain.
    may_be_done = status >= 500 and code != "SlowDown"
    return Trouble(reason, is_passing=is_passing, may_be_done=may_be_done)


def _status_in(text: str) -> int:
    return int(_found(r"status code: (\d{3})", text) or 0)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


class ObjectStore(Store):
    """Objects of a bucket below a prefix."""

    def __init__(
        self, scheme: str, prefix: str, bucket: Bucket, settings: Mapping[str, str]
    ) -> None:
        self._scheme = scheme
        self._prefix = prefix
        self._bucket = bucket
        self._settings = settings

    @property
    def bucket(self) -> Bucket:
        return self._bucket

    def __repr__(self) -> str:
        return f"ObjectStore({self.address!r})"

    @property
    def address(self) -> str:
        return self._where(self._prefix)

    @property
    def settings(self) -> Mapping[str, str]:
        return self._settings

    def below(self, directory: str) -> ObjectStore:
        return ObjectStore(self._scheme, self._key(directory), self._bucket, self._settings)

    def write(self, path: str, chunks: Iterable[Chunk]) -> Written:
        key, tally = self._key(path), Tally()
        views = tally.counted(chunks)
        head = bytearray()
        for view in views:
            head += view
            if len(head) > WHOLE_BYTES_MAX:
                self._write_in_parts(key, head, views)
                return tally.written()
        if not self._put("write", key, bytes(head)):
            raise never_overwritten(self._where(key))
        return tally.written()

    def create_if_absent(self, path: str, data: bytes) -> bool:
        return self._put("create", self._key(path), data)

    def read(self, path: str) -> bytes:
        import obstore

        key = self._key(path)
        read = self._missing_is_damage(key)
        return read(lambda: obstore.get(self._bucket.client(), key).bytes().to_bytes())

    def read_verified(self, path: str, length_bytes: int, crc32: int) -> pa.Buffer:
        key = self._key(path)
        buffer, seen_bytes = self._read_expected(key, length_bytes)
        if buffer is None:
            raise wrong_length(self._where(key), seen_bytes, length_bytes, crc32)
        check_crc32(self._where(key), buffer, crc32)
        return buffer

    def list(self, directory: str) -> builtins.list[str]:
        import obstore

        key = self._key(directory) if directory else self._prefix
        bucket = self._bucket
        found = bucket.ask(
            "list",
            self._where(key),
            lambda: obstore.list_with_delimiter(bucket.client(), key or None),
        )
        keys = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        # Some tools mark a directory with an empty object of its name.
        return sorted({each.rsplit("/", 1)[-1] for each in keys if each != key})

    def delete(self, path: str) -> None:
        self._delete_keys(self._where(self._key(path)), [self._key(path)])

    def delete_directory(self, path: str) -> None:
        key = self._key(path)
        where = self._where(key)
        for _ in range(_DELETE_TRIES_MAX):
            keys = self._keys_below(key)
            if not keys:
                return
            self._delete_keys(where, keys)
        if self._keys_below(key):
            raise StorageError(f"cannot delete {where}: somebody is adding to it; stop them")

    # --- where things are ---

    def _key(self, path: str) -> str:
        parts = path.split("/")
        assert not any(part in ("", ".", "..") for part in parts), f"not a path here: {path!r}"
        return f"{self._prefix}/{path}" if self._prefix else path

    def _where(self, key: str) -> str:
        return f"{self._scheme}://{self._bucket.name}/{key}".rstrip("/")

    # --- writing ---

    def _put(self, doing: str, key: str, data: bytes) -> bool:
        """Whether there was none of that name, and so there is one with this data now."""
        import obstore

        token = uuid.uuid4().hex

        def put() -> object:
            return obstore.put(
                self._bucket.client(len(data)),
                key,
                data,
                attributes={_TOKEN: token},
                mode="create",
                use_multipart=False,
            )

        try:
            self._bucket.ask(doing, self._where(key), put)
        except Taken:
            return self._is_ours(doing, key, token)
        except Missing:
            raise NotDone(f"cannot {doing} {self._where(key)}: the storage answered 404") from None
        return True

    def _write_in_parts(self, key: str, head: bytearray, views: Iterator[memoryview]) -> None:
        import obstore
        from obstore import exceptions

        if self._holds_any(key):
            raise never_overwritten(self._where(key))
        token = uuid.uuid4().hex
        client = self._bucket.client(WHOLE_BYTES_MAX + 1)
        watched = Watched(chain([memoryview(head)], views))
        try:
            with obstore.open_writer(
                client,
                key,
                attributes={_TOKEN: token},
                buffer_size=WHOLE_BYTES_MAX,
                max_concurrency=_PARTS_AT_ONCE_MAX,
            ) as target:
                for view in watched:
                    target.write(view)
        except (exceptions.BaseError, OSError) as error:
            if watched.has_failed:
                raise
            trouble = self._trouble_of_parts(error)
            if not self._is_ours("write", key, token):
                raise Unanswered(f"cannot write {self._where(key)}: {trouble}") from None

    def _trouble_of_parts(self, error: Exception) -> str:
        try:
            return self._bucket.understand(error).reason
        except (Missing, Taken):
            return "the storage has forgotten its parts, or is written to by somebody else"

    def _is_ours(self, doing: str, key: str, token: str) -> bool:
        """Whether the object of this name is the one that carries this token."""
        import obstore

        bucket = self._bucket
        try:
            found = bucket.ask(doing, self._where(key), lambda: obstore.get(bucket.client(), key))
        except Missing:
            return False
        except StorageError as error:
            raise Unanswered(str(error)) from None
        return found.attributes.get(_TOKEN) == token

    def _holds_any(self, key: str) -> bool:
        try:
            self._bucket.head("write", self._where(key), key)
        except Missing:
            return False
        return True

    # --- reading ---

    def _missing_is_damage(self, key: str) -> Callable[[Callable[[], Answer]], Answer]:
        def read(request: Callable[[], Answer]) -> Answer:
            try:
                return self._bucket.ask("read", self._where(key), request)
            except Missing:
                raise SnapshotDamaged(
                    f"{self._where(key)} is missing: it was deleted, or never written, or the"
                    " endpoint is not the one to which it was written"
                ) from None

        return read

    def _read_expected(self, key: str, length_bytes: int) -> tuple[pa.Buffer | None, int]:
        """The object and how long it is; None if that is not what was expected."""
        import obstore

        read = self._missing_is_damage(key)

        def whole() -> tuple[pa.Buffer | None, int]:
            found = obstore.get(self._bucket.client(length_bytes), key)
            seen_bytes = found.meta["size"]
            if seen_bytes != length_bytes or seen_bytes > WHOLE_BYTES_MAX:
                return None, seen_bytes
            return pa.py_buffer(found.bytes().to_bytes()), seen_bytes

        buffer, seen_bytes = read(whole)
        if buffer is None and seen_bytes == length_bytes:
            return self._read_in_parts(key, length_bytes), seen_bytes
        return buffer, seen_bytes

    def _read_in_parts(self, key: str, length_bytes: int) -> pa.Buffer:
        import obstore

        bucket = self._bucket
        read = self._missing_is_damage(key)
        buffer = pa.allocate_buffer(length_bytes)
        view = memoryview(buffer).cast("B")

        def read_part(start: int) -> None:
            end = min(start + WHOLE_BYTES_MAX, length_bytes)
            part = read(
                lambda: obstore.get_range(bucket.client(length_bytes), key, start=start, end=end)
            )
            view[start:end] = memoryview(part).cast("B")

        with ThreadPoolExecutor(_PARTS_AT_ONCE_MAX, "stillframe-read") as pool:
            for _ in pool.map(read_part, range(0, length_bytes, WHOLE_BYTES_MAX)):
                pass
        return buffer

    # --- deleting ---

    def _keys_below(self, key: str) -> builtins.list[str]:
        import obstore

        def keys() -> builtins.list[str]:
            batches = obstore.list(self._bucket.client(), key)
            return [each["path"] for batch in batches for each in batch]

        return self._bucket.ask("list", self._where(key), keys)

    def _delete_keys(self, where: str, keys: builtins.list[str]) -> None:
        import obstore

        bucket = self._bucket
        try:
            bucket.ask("delete", where, lambda: obstore.delete(bucket.client(), keys))
        except Missing:
            return
