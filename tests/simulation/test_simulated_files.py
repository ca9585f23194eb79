"""The simulated disk: it keeps what was flushed, and the rest is up to chance."""

from random import Random

import pytest

from stillframe.errors import StorageError
from stillframe.testing.simulation.storage import (
    JOB_DIRECTORY,
    Died,
    Disk,
    SimulatedFiles,
    simulated_store,
)
from stillframe.testing.simulation.world import World

TRIES = 40
"""How often chance is asked; it says the same thing every time once in a billion."""


def no_trouble(operation, path):
    pass


class DiesAfter:
    """Lets so many operations pass; at the next one the process dies."""

    def __init__(self, operations):
        self.left = operations

    def __call__(self, operation, path):
        if self.left == 0:
            raise Died
        self.left -= 1


def after_power_loss(prepare, look, tries=TRIES):
    """What one sees after the power was lost, in all the ways chance has it."""
    seen = []
    for seed in range(tries):
        disk = Disk()
        prepare(disk)
        disk.lose_power(Random(seed))
        seen.append(look(disk))
    return seen


def files_of(disk):
    files = SimulatedFiles(World(0), disk, no_trouble)
    files.make_directory("/checkpoints")
    files.flush_directory("/")
    files.make_directory(JOB_DIRECTORY)
    files.flush_directory("/checkpoints")
    return files


def write(files, name, data, sync=True):
    file = files.open_new(f"{JOB_DIRECTORY}/{name}")
    file.write(memoryview(data))
    if sync:
        file.sync()
    file.close()


def test_what_the_store_says_is_kept_survives_every_loss_of_power():
    def prepare(disk):
        store = simulated_store(World(0), disk, no_trouble)
        store.write("shared/1/a", [b"ab", b"cd"])
        assert store.create_if_absent("log/1", b"entry")

    seen = after_power_loss(prepare, lambda disk: (disk.read("shared/1/a"), disk.read("log/1")))

    assert set(seen) == {(b"abcd", b"entry")}


def test_bytes_that_were_not_synced_are_lost_torn_or_kept():
    def prepare(disk):
        files = files_of(disk)
        write(files, "a", b"abcd", sync=False)
        files.flush_directory(JOB_DIRECTORY)

    seen = after_power_loss(prepare, lambda disk: disk.read("a"))

    assert set(seen) == {b"", b"ab", bytes(4), b"abcd"}


def test_a_name_that_was_not_flushed_is_lost_or_kept():
    seen = after_power_loss(
        lambda disk: write(files_of(disk), "a", b"abcd"), lambda disk: disk.read("a")
    )

    assert set(seen) == {None, b"abcd"}


def test_what_was_deleted_comes_back_or_not_until_it_is_settled():
    def prepare(disk):
        store = simulated_store(World(0), disk, no_trouble)
        store.write("shared/1/a", [b"a"])
        store.delete("shared/1/a")
        store.write("shared/3/a", [b"a"])
        store.delete("shared/3/a")
        store.settle("shared/3")
        store.write("shared/2/a", [b"a"])
        store.delete_directory("shared/2")

    seen = after_power_loss(
        prepare, lambda disk: [disk.read(f"shared/{each}/a") for each in (1, 2, 3)]
    )

    assert {first for first, _, _ in seen} == {None, b"a"}
    assert {second for _, second, _ in seen} == {None, b"a"}
    assert {third for _, _, third in seen} == {None}


def test_a_directory_whose_name_is_lost_takes_with_it_what_was_flushed_in_it():
    def prepare(disk):
        files = files_of(disk)
        files.make_directory(f"{JOB_DIRECTORY}/log")
        write(files, "log/1", b"entry")
        files.flush_directory(f"{JOB_DIRECTORY}/log")

    seen = after_power_loss(prepare, lambda disk: disk.read("log/1"))

    assert set(seen) == {None, b"entry"}


@pytest.mark.parametrize("operations", range(16))
def test_a_successor_keeps_what_it_wrote_wherever_its_predecessor_died(operations):
    def prepare(disk):
        try:
            store = simulated_store(World(0), disk, DiesAfter(operations))
            store.create_if_absent("log/1", b"of the first")
        except Died:
            pass
        successor = simulated_store(World(0), disk, no_trouble)
        entries.append("log/2" if successor.list("log") else "log/1")
        assert successor.create_if_absent(entries[-1], b"of the successor")

    entries = []
    seen = after_power_loss(prepare, lambda disk: disk.read(entries[-1]), tries=8)

    assert set(seen) == {b"of the successor"}


@pytest.mark.parametrize("operations", range(16))
def test_a_file_is_there_as_a_whole_or_not_at_all_wherever_the_power_fails(operations):
    def prepare(disk):
        store = simulated_store(World(0), disk, DiesAfter(operations))
        try:
            store.write("shared/1/a", [b"abcd"])
        except Died:
            return

    seen = after_power_loss(prepare, lambda disk: disk.read("shared/1/a"), tries=8)

    assert set(seen) <= {None, b"abcd"}


def test_the_dead_do_nothing_more_not_even_tidy_up():
    disk = Disk()
    store = simulated_store(World(0), disk, DiesAfter(11))

    with pytest.raises(Died):
        store.write("shared/1/a", [b"abcd"])

    assert any("/.tmp-" in path for path in disk.paths())
    with pytest.raises(Died):
        store.list("")


def test_nobody_outlives_the_power():
    disk = Disk()
    store = simulated_store(World(0), disk, no_trouble)
    disk.lose_power(Random(0))

    with pytest.raises(Died):
        store.write("a", [b"a"])


def test_what_the_disk_refuses_is_said_by_the_store_in_its_own_words():
    def refuse(operation, path):
        if operation == "link":
            raise OSError(5, "refused")

    store = simulated_store(World(0), Disk(), refuse)

    with pytest.raises(StorageError, match=r"^cannot write /checkpoints/job/a: the device report"):
        store.write("a", [b"a"])
