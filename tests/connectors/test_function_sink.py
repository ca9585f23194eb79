"""A sink made of one function: the same key has the same rows, whatever fails."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from stillframe.api.sinks import CommitterContext, Prepared, SinkContext
from stillframe.connectors.function_sink import to_function
from stillframe.errors import BuildError, Unavailable
from stillframe.ids import Mark, Writer
from stillframe.storage.local import LocalStore
from stillframe.storage.staging import StagedFiles

MARK = Mark(Writer("i1", "post", 0), 7)


class Receiver:
    """Keeps what it was given by key, and breaks after so many calls."""

    def __init__(self):
        self.by_key = {}
        self.calls = 0
        self.breaks_at = None

    def __call__(self, rows, key):
        self.calls += 1
        if self.calls == self.breaks_at:
            raise ConnectionError("hung up")
        ids = rows["id"].to_pylist()
        assert self.by_key.setdefault(key, ids) == ids, "the same key has the same rows"


def staged(tmp_path, sink, *batches):
    staging = StagedFiles(LocalStore(tmp_path))
    writer = sink.open_writer(SinkContext("job", 1, "post", 0, "i1", staging))
    for ids in batches:
        writer.write(pa.record_batch({"id": ids}))
    committables = tuple(writer.rotate(7)())
    writer.close()
    return sink.open_committer(CommitterContext("job", staging)), [Prepared(MARK, committables)]


def test_rows_come_in_parts_each_with_a_key_of_its_own(tmp_path):
    receiver = Receiver()
    committer, parts = staged(tmp_path, to_function(receiver, rows_max=2), [1, 2, 3], [4])

    committer.commit(0, parts)

    assert receiver.by_key == {
        "i1/post/0/7/0": [1, 2],
        "i1/post/0/7/1": [3],
        "i1/post/0/7/2": [4],
    }


def test_after_a_failure_in_the_middle_the_same_rows_come_with_the_same_keys(tmp_path):
    receiver = Receiver()
    receiver.breaks_at = 2
    committer, parts = staged(tmp_path, to_function(receiver, rows_max=1), [1, 2, 3])

    with pytest.raises(Unavailable, match="hung up"):
        committer.commit(0, parts)
    committer.commit(0, parts)
    committer.commit(0, parts)

    assert list(receiver.by_key.values()) == [[1], [2], [3]]
    assert receiver.calls == 5, "what is done is not done again"


def test_it_is_exactly_once_where_the_function_ignores_keys_it_has_seen():
    assert to_function(print, idempotent=True).guarantee == "exactly-once"
    assert to_function(print).guarantee == "at-least-once"
    assert to_function(print).weakness == "may be called again with rows and a key it has seen"


def test_it_travels_to_executors_and_has_the_functions_name():
    assert pickle.loads(pickle.dumps(to_function(print))).describe() == "function print"


def test_what_is_no_function_is_refused():
    with pytest.raises(BuildError, match=r"a function of \(rows, key\), not 3"):
        to_function(3)
    with pytest.raises(BuildError, match="rows_max is 0"):
        to_function(print, rows_max=0)
