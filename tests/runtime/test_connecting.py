"""The user's function over two streams, and what becomes of its rows."""

from collections import Counter

import pyarrow as pa
import pytest

from stillframe.api.functions import TwoInputFunction
from stillframe.errors import DataError, UserCodeError
from stillframe.graph.logical import Connect
from stillframe.graph.plan import Edge, PlannedOperator, Rebalance
from stillframe.key_groups import hash_columns, key_group_range, key_groups_of
from stillframe.runtime.chain import Chain
from stillframe.runtime.channels import LocalChannel
from stillframe.runtime.connecting import Connecting
from stillframe.runtime.outputs import EdgeOutput
from stillframe.runtime.restoring import read_copy
from stillframe.state.snapshots import read_keyed_snapshot
from stillframe.storage.local import LocalStore
from stillframe.testing.clock import ManualClock

SCHEMA = pa.schema([("app", pa.string()), ("id", pa.int64())])


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def batch(*rows):
    return pa.record_batch([[app for app, _ in rows], [i for _, i in rows]], schema=SCHEMA)


def rows_of(batches):
    return [(row["app"], row["id"]) for each in batches for row in each.to_pylist()]


class LastSeen(TwoInputFunction):
    """Keeps the newest row of each app from the second stream; the first asks for it."""

    def __init__(self):
        self.seen = {}
        self.snapshots = 0

    def process_first(self, asked):
        found = [(app, self.seen[app]) for app, _ in rows_of([asked]) if app in self.seen]
        return [batch(*found)] if found else []

    def process_second(self, learnt):
        self.seen.update(rows_of([learnt]))
        return []

    def finish(self):
        yield batch(*sorted(self.seen.items()))

    def snapshot(self):
        self.snapshots += 1
        return batch(*self.seen.items()) if self.seen else None

    def restore(self, restored):
        self.seen.update(rows_of([restored]))


def connecting(make=LastSeen, keys=("app",), store=None, schema=SCHEMA, subtask=0):
    operator = Connect(make, "last seen", keys)
    return Connecting("uid", subtask, 1, operator, schema, schema, store, 128, ManualClock())


def snapshot_of(operator, checkpoint_id=1):
    return operator.described(checkpoint_id, operator.snapshot(checkpoint_id)())


def verified(store, state):
    return store.read_verified(state.file.path, state.file.length_bytes, state.file.crc32)


def test_batches_of_both_streams_reach_the_function_as_what_they_are():
    operator = connecting()

    assert rows_of(operator.process(batch(("a", 0)))) == []
    assert rows_of(operator.process_second(batch(("a", 7)))) == []
    assert rows_of(operator.process(batch(("a", 0), ("b", 0)))) == [("a", 7)]


def test_a_chain_hands_the_second_input_to_the_operator_at_its_head():
    channel = LocalChannel(1 << 20)
    edge = Edge(0, "out", 0, 1, Rebalance(), SCHEMA, 1, 1, 0)
    planned = PlannedOperator("uid", None, SCHEMA, SCHEMA, (), (0,))
    chain = Chain([planned], [connecting()], {0: EdgeOutput(edge, 0, [channel], 128)})
    chain.process_second(batch(("a", 7)))
    chain.process(batch(("a", 0)))

    assert rows_of([channel.take()]) == [("a", 7)]
    assert channel.is_empty()


def test_keyed_rows_are_written_by_key_group_and_found_again_by_whoever_owns_them(store):
    operator = connecting(store=store)
    kept = [(f"app-{i}", i) for i in range(300)]
    list(operator.process_second(batch(*kept)))
    snapshot = snapshot_of(operator)

    [state] = snapshot.keyed
    assert snapshot.broadcast == ()
    assert (state.rows, state.name) == (300, "function")
    found = []
    for subtask in range(3):
        owned = key_group_range(subtask, 3, 128)
        restored = connecting(subtask=subtask)
        for each in read_keyed_snapshot(verified(store, state), state.key_groups, owned):
            groups = key_groups_of(hash_columns([each["app"]]), 128)
            assert set(groups.tolist()) <= set(owned)
            restored.restore(each)
        found += rows_of(restored.finish())
    assert Counter(found) == Counter(kept)


def test_the_rows_may_be_a_table_of_several_pieces(store):
    class Pieces(LastSeen):
        def snapshot(self):
            return pa.Table.from_batches([batch(("a", 1)), batch(("b", 2), ("a", 3))])

    [state] = snapshot_of(connecting(Pieces, store=store)).keyed
    read = read_keyed_snapshot(verified(store, state), state.key_groups, range(128))

    assert Counter(rows_of(read)) == Counter([("a", 1), ("b", 2), ("a", 3)])


def test_a_broadcast_state_is_a_whole_copy_and_needs_no_key(store):
    operator = connecting(keys=None, store=store)
    list(operator.process_second(batch(("a", 1), ("b", 2))))
    snapshot = snapshot_of(operator)

    [copy] = snapshot.broadcast
    assert snapshot.keyed == ()
    restored = connecting(keys=None)
    for each in read_copy(store, copy):
        restored.restore(each)
    assert rows_of(restored.process(batch(("a", 0), ("b", 0)))) == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("keys", [("app",), None])
def test_a_function_with_nothing_to_remember_writes_no_file(store, tmp_path, keys):
    snapshot = snapshot_of(connecting(keys=keys, store=store))

    assert (snapshot.keyed, snapshot.broadcast) == ((), ())
    assert list(tmp_path.iterdir()) == []


def test_what_changes_after_the_snapshot_is_not_in_it(store):
    operator = connecting(store=store)
    list(operator.process_second(batch(("a", 1))))
    write = operator.snapshot(1)
    list(operator.process_second(batch(("a", 2))))
    [state] = operator.described(1, write()).keyed

    read = read_keyed_snapshot(verified(store, state), state.key_groups, range(128))
    assert rows_of(read) == [("a", 1)]


def test_what_finished_by_key_is_forgotten_so_that_a_restored_job_does_not_finish_it_again(store):
    operator = connecting(store=store)
    list(operator.process_second(batch(("a", 1))))

    assert rows_of(operator.finish()) == [("a", 1)]
    assert snapshot_of(operator).keyed == ()
    assert rows_of(operator.finish()) == [], "once"


def test_a_broadcast_function_is_not_finished_and_keeps_what_it_has_learnt(store):
    operator = connecting(keys=None, store=store)
    list(operator.process_second(batch(("a", 1))))

    assert list(operator.finish()) == []
    assert len(snapshot_of(operator).broadcast) == 1


def test_rows_without_their_key_are_refused_and_the_column_is_named(store):
    class Keyless(LastSeen):
        def snapshot(self):
            return batch(("a", 1)).select(["id"])

    with pytest.raises(UserCodeError, match="last seen has no column 'app'"):
        connecting(Keyless, store=store).snapshot(1)


class Broken(LastSeen):
    """Raises wherever it is told to."""

    where = ""

    def __init__(self):
        super().__init__()
        self.raise_if("make")

    def raise_if(self, place):
        if self.where == place:
            raise KeyError(place)

    def process_first(self, asked):
        self.raise_if("process_first")
        return super().process_first(asked)

    def process_second(self, learnt):
        yield from super().process_second(learnt)
        self.raise_if("process_second")

    def finish(self):
        self.raise_if("finish")
        return super().finish()

    def snapshot(self):
        self.raise_if("snapshot")

    def restore(self, restored):
        self.raise_if("restore")


def use(make):
    """Every method of the function is called."""
    operator = connecting(make)
    list(operator.process_second(batch(("a", 1))))
    list(operator.process(batch(("a", 1))))
    operator.restore(batch(("a", 1)))
    operator.snapshot(1)
    list(operator.finish())


@pytest.mark.parametrize(
    "where", ["make", "process_first", "process_second", "finish", "snapshot", "restore"]
)
def test_whatever_the_function_raises_names_the_function(where):
    make = type("BrokenHere", (Broken,), {"where": where})

    with pytest.raises(UserCodeError, match=f"function last seen raised KeyError: '{where}'"):
        use(make)


def test_a_snapshot_without_a_restore_is_named_when_it_is_restored():
    class Forgetful(TwoInputFunction):
        def process_first(self, records):
            return ()

        def process_second(self, records):
            return ()

    with pytest.raises(UserCodeError, match="Forgetful has a snapshot but no restore"):
        connecting(Forgetful).restore(batch(("a", 1)))


def answering(answer):
    class Answering(LastSeen):
        def process_first(self, records):
            return [answer]

    return connecting(Answering)


def test_an_answer_with_other_columns_is_refused_with_both():
    operator = answering(pa.record_batch({"x": [1]}))

    with pytest.raises(DataError, match="declared app string, id int64 but gave back x int64"):
        list(operator.process(batch(("a", 1))))


def test_an_answer_of_a_narrower_type_is_widened():
    narrow = pa.record_batch([["a"], pa.array([1], pa.int32())], names=["app", "id"])

    [made] = answering(narrow).process(batch(("a", 1)))
    assert made.schema == SCHEMA


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (None, "answered None: yield record batches, or answer a list"),
        (batch(("a", 1)), "answered a RecordBatch: yield record batches, or answer a list"),
        ([{"app": "a"}], "yielded a dict: connect wants pyarrow.RecordBatch objects"),
    ],
)
def test_an_answer_that_is_no_batches_is_told_from_an_error_of_the_function(answer, sentence):
    class Answering(LastSeen):
        def process_first(self, records):
            return answer

    with pytest.raises(UserCodeError, match=f"function last seen {sentence}"):
        list(connecting(Answering).process(batch(("a", 1))))


def test_a_snapshot_that_is_no_table_is_refused_by_its_kind(store):
    class Plain(LastSeen):
        def snapshot(self):
            return {"app": "a"}

    with pytest.raises(UserCodeError, match="the snapshot of function last seen is a dict"):
        connecting(Plain, store=store).snapshot(1)


def test_a_number_is_not_made_a_text_nor_a_text_a_number():
    swapped = pa.record_batch([[1], ["1"]], names=["app", "id"])

    with pytest.raises(DataError, match="gave back app int64, id string"):
        list(answering(swapped).process(batch(("a", 1))))


def test_a_snapshot_with_two_columns_of_one_name_is_refused(store):
    class Twice(LastSeen):
        def snapshot(self):
            return pa.record_batch([["a"], ["b"]], names=["app", "app"])

    with pytest.raises(UserCodeError, match=r"two columns of one name \(app, app\)"):
        connecting(Twice, store=store).snapshot(1)


def test_keys_of_another_type_than_the_streams_are_found_all_the_same(store):
    """A function that makes its rows from plain Python values has not chosen their types."""
    numbers = pa.schema([("number", pa.int32()), ("id", pa.int64())])

    class Plain(LastSeen):
        def snapshot(self):
            return pa.record_batch({"number": [1, 2, 3, 400], "id": [1, 2, 3, 4]})

    operator = connecting(Plain, keys=("number",), store=store, schema=numbers)
    [state] = snapshot_of(operator).keyed

    stream = pa.array([1, 2, 3, 400], pa.int32())
    expected = set(key_groups_of(hash_columns([stream]), 128).tolist())
    assert set(state.key_groups) == expected


@pytest.mark.parametrize(
    ("of_stream", "of_snapshot"),
    [
        (pa.array([10**15, 10**15 + 7], pa.timestamp("us", "UTC")), pa.timestamp("ns")),
        (pa.array([20_000, None], pa.date32()), pa.timestamp("ms")),
        (pa.array([1, None, 400], pa.int64()), pa.float64()),
    ],
    ids=["times in other units", "dates as times", "numbers as floats"],
)
def test_keys_that_went_through_pandas_are_found_by_the_type_of_the_streams(
    store, of_stream, of_snapshot
):
    class ByPandas(LastSeen):
        def snapshot(self):
            return pa.record_batch({"key": of_stream.cast(of_snapshot)})

    schema = pa.schema([("key", of_stream.type)])
    operator = connecting(ByPandas, keys=("key",), store=store, schema=schema)
    [state] = snapshot_of(operator).keyed

    assert set(state.key_groups) == set(key_groups_of(hash_columns([of_stream]), 128).tolist())


def test_keys_that_are_none_of_the_streams_are_refused_with_both_types(store):
    class Lettered(LastSeen):
        def snapshot(self):
            return pa.record_batch({"id": ["x"]})

    with pytest.raises(UserCodeError, match=r"last seen has keys .*\(id string, not id int64\)"):
        connecting(Lettered, keys=("id",), store=store).snapshot(1)
