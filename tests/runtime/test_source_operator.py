"""A source as an operator: what of its splits can be kept, and what it is told."""

import pytest

from stillframe.api.sources import EndOfData, SourceReader, Split
from stillframe.errors import UserCodeError
from stillframe.runtime.source_operator import Reading


class Placed(SourceReader):
    """Has the splits that a test gives it."""

    def __init__(self, *splits):
        self.now = list(splits)
        self.told = []

    def poll(self):
        return EndOfData()

    def splits(self):
        return self.now

    def on_checkpoint_complete(self, checkpoint_id, splits):
        self.told.append((checkpoint_id, splits))

    def close(self):
        pass


@pytest.mark.parametrize(
    ("split", "says"),
    [
        (Split("a", {"at": b"x"}), "the position of split 'a' is not JSON (Object of type bytes"),
        (Split("a", {"at": float("nan")}), "the position of split 'a' is not JSON (Out of range"),
        (Split("a", {"at": (1, 2)}), 'reads back from JSON as another value ({"at": [1, 2]})'),
        (Split("a", {1: 2}), 'reads back from JSON as another value ({"1": 2})'),
        (Split("a", 7), "the position of split 'a' is of type int: make it a dict"),
        (Split("a", {"ids": ["x" * 100] * 11_000}), "takes 1144009 bytes, more than the 1048576"),
        (Split("", {}), "a split has the id '': give it a text that is not empty"),
        (Split(3, {}), "a split has the id 3: give it a text"),
    ],
)
def test_a_split_that_cannot_be_kept_ends_the_job_with_a_sentence(split, says):
    reader = Placed(Split("a", {"at": 0}))
    reading = Reading("queue", 0, reader, name="queue q")
    reader.now = [split]

    with pytest.raises(UserCodeError) as raised:
        reading.snapshot(1)
    assert str(raised.value).startswith("source queue q: ")
    assert says in str(raised.value)
    assert not raised.value.heals, "it would come again"


def test_two_splits_of_one_id_are_refused():
    reader = Placed(Split("a", {}), Split("b", {}), Split("a", {}))

    with pytest.raises(UserCodeError, match="source q has 2 splits with the id 'a'"):
        Reading("queue", 0, reader, name="q").snapshot(1)


def test_a_position_that_goes_back_is_refused_where_the_source_can_tell():
    reader = Placed(Split("a", {"at": 5}))
    goes_back = lambda position, later: later["at"] < position["at"]  # noqa: E731
    reading = Reading("queue", 0, reader, name="q", goes_back=goes_back)
    for at in (5, 6, 9):
        reader.now = [Split("a", {"at": at})]
        reading.snapshot(at)
    reader.now = [Split("a", {"at": 8})]

    with pytest.raises(UserCodeError, match="source q: split 'a' went back from "):
        reading.snapshot(10)


def test_a_completed_checkpoint_is_told_with_the_splits_that_are_in_it():
    reader = Placed(Split("a", {"at": 0}))
    reading = Reading("queue", 0, reader, name="q")
    reading.completed(4)
    for checkpoint_id in (5, 6, 7):
        reader.now = [Split("a", {"at": checkpoint_id})]
        reading.snapshot(checkpoint_id)
    reading.aborted(5)
    reading.completed(6)

    assert reader.told == [(4, [Split("a", {"at": 0})]), (6, [Split("a", {"at": 6})])]


def test_what_a_reader_raises_when_it_is_told_names_the_source_and_the_checkpoint():
    reader = Placed()

    def refuse(checkpoint_id, splits):
        raise ConnectionError("away")

    reader.on_checkpoint_complete = refuse
    with pytest.raises(UserCodeError, match="source q raised ConnectionError: away") as raised:
        Reading("queue", 0, reader, name="q").completed(3)

    assert raised.value.blame.operator == "queue"
    assert raised.value.blame.record == "checkpoint 3"
