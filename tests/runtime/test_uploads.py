"""The background part of snapshots: what is left of it when its checkpoint is given up."""

import threading

import pytest

from stillframe.errors import StorageError
from stillframe.runtime.uploads import CancellableStore, Upload, UploadCancelled, Uploads
from stillframe.storage.around import StoreAround
from stillframe.storage.local import LocalStore

SECONDS_MAX = 60


class SlowStore(StoreAround):
    """Its files stand still behind their first chunk, or in the end, until they are let go."""

    def __init__(self, own):
        super().__init__(own)
        self.stands = threading.Semaphore(0)
        self.goes_on = threading.Event()
        self.stands_at_end = False

    def write(self, path, chunks):
        if not path.startswith("slow"):
            return super().write(path, chunks)
        written = super().write(path, chunks if self.stands_at_end else self._slowly(chunks))
        if self.stands_at_end:
            self._stand()
        return written

    def _slowly(self, chunks):
        for number, chunk in enumerate(chunks):
            if number == 1:
                self._stand()
            yield chunk

    def _stand(self):
        self.stands.release()
        assert self.goes_on.wait(SECONDS_MAX)


class Room:
    def __init__(self, tmp_path):
        self.slow = SlowStore(LocalStore(tmp_path))
        self.store = CancellableStore(self.slow)
        self.uploads = Uploads()
        self.results = {}
        self.news = threading.Condition()

    def upload(self, checkpoint_id, *parts, kept=None, name=None):
        name = name or checkpoint_id

        def on_done(results):
            with self.news:
                assert name not in self.results, "told once"
                self.results[name] = results
                self.news.notify_all()

        kept = kept or [False] * len(parts)
        self.uploads.submit(Upload(checkpoint_id, parts, kept, on_done))

    def file(self, path, chunks=3):
        """Writes a file; what it answers is its path."""

        def part():
            self.store.write(path, [b"x"] * chunks)
            return path

        return part

    def result_of(self, name):
        with self.news:
            assert self.news.wait_for(lambda: name in self.results, SECONDS_MAX)
            return self.results[name]

    def files(self):
        return self.slow.list("")

    def two_stand(self):
        """Both places are taken by files of checkpoint 1."""
        for number in range(2):
            self.upload(1, self.file(f"slow-{number}"), name=f"slow-{number}")
        for _ in range(2):
            assert self.slow.stands.acquire(timeout=SECONDS_MAX)


@pytest.fixture
def room(tmp_path):
    room = Room(tmp_path)
    yield room
    room.slow.goes_on.set()
    room.uploads.close()


def test_two_that_stand_still_keep_the_next_checkpoint_waiting_only_until_they_are_given_up(room):
    room.two_stand()
    room.upload(2, room.file("next"))
    assert room.results == {}

    room.uploads.cancel(1)

    assert room.result_of(2) == ("next",)
    for number in range(2):
        [result] = room.result_of(f"slow-{number}")
        assert isinstance(result, UploadCancelled)


def test_what_goes_on_after_it_was_given_up_stops_at_the_next_chunk_and_leaves_nothing(room):
    drawn = []

    def chunks():
        for number in range(100):
            drawn.append(number)
            yield b"x"

    room.upload(1, lambda: room.store.write("slow", chunks()))
    assert room.slow.stands.acquire(timeout=SECONDS_MAX)
    room.uploads.cancel(1)
    room.slow.goes_on.set()
    room.uploads.close()

    assert drawn == [0, 1, 2]
    assert room.files() == []


def test_a_file_that_was_complete_when_it_was_given_up_is_deleted(room):
    room.slow.stands_at_end = True
    room.upload(1, room.file("first"), room.file("slow"))
    assert room.slow.stands.acquire(timeout=SECONDS_MAX)
    assert room.files() == ["first", "slow"]

    room.uploads.cancel(1)
    assert isinstance(room.result_of(1)[1], UploadCancelled)
    room.slow.goes_on.set()
    room.uploads.close()

    assert room.files() == []


def test_what_has_not_begun_is_released_and_writes_nothing(room):
    released = threading.Event()

    def part():
        try:
            return room.file("late")()
        finally:
            released.set()

    room.two_stand()
    room.upload(2, part)
    room.uploads.cancel(2)
    assert isinstance(room.result_of(2)[0], UploadCancelled), "nobody waits for its turn"
    room.uploads.cancel(1)

    assert released.wait(SECONDS_MAX)
    room.upload(3, room.file("next"))
    assert room.result_of(3) == ("next",)
    assert [name for name in room.files() if not name.startswith(".")] == ["next"]


def test_what_a_sink_prepares_is_prepared_all_the_same_before_what_may_stand_still(room):
    order = []

    def prepare():
        order.append("prepared")
        return "an epoch"

    room.upload(1, room.file("slow"), prepare, kept=[False, True])
    assert room.slow.stands.acquire(timeout=SECONDS_MAX)
    assert order == ["prepared"]
    room.uploads.cancel(1)

    state, epoch = room.result_of(1)
    assert isinstance(state, UploadCancelled)
    assert epoch == "an epoch"


def test_a_sink_that_is_still_preparing_is_waited_for(room):
    prepares, goes_on = threading.Event(), threading.Event()

    def prepare():
        prepares.set()
        assert goes_on.wait(SECONDS_MAX)
        return "an epoch"

    room.upload(1, room.file("state"), prepare, kept=[False, True])
    assert prepares.wait(SECONDS_MAX)
    room.uploads.cancel(1)
    assert room.results == {}
    goes_on.set()

    state, epoch = room.result_of(1)
    assert isinstance(state, UploadCancelled)
    assert epoch == "an epoch"


def test_an_error_of_one_part_is_its_result_and_the_others_are_written(room):
    def fails():
        raise StorageError("the disk is full")

    room.upload(1, fails, room.file("state"))

    failed, written = room.result_of(1)
    assert isinstance(failed, StorageError)
    assert written == "state"


def test_those_left_to_themselves_are_few(room):
    """A storage that answers nothing must not collect a thread for every checkpoint."""
    for checkpoint_id in range(1, 11):
        room.upload(checkpoint_id, room.file(f"slow-{checkpoint_id}"))
        assert room.slow.stands.acquire(timeout=SECONDS_MAX)
        room.uploads.cancel(checkpoint_id)
        room.result_of(checkpoint_id)
    room.upload(11, room.file("next"))
    assert 11 not in room.results, "it waits until one of them ends"
    room.slow.goes_on.set()

    assert room.result_of(11) == ("next",)
