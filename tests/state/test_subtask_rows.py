"""State without keys: what is written is read, and what is frozen stays as it was."""

import datetime

import pyarrow as pa
import pytest

from stillframe.errors import StartRefused, UserCodeError
from stillframe.state.backends import Declared, Kind
from stillframe.state.rows import RowType
from stillframe.state.subtask_rows import SubtaskList, SubtaskMap

ROW = pa.schema([("n", pa.int64()), ("tags", pa.list_(pa.string()))])
KEY = pa.schema([("k", pa.string())])


def a_list(schema=ROW):
    return SubtaskList(Declared("l", Kind.LIST, RowType(schema)))


def a_map(schema=ROW):
    return SubtaskMap(Declared("m", Kind.MAP, RowType(schema), RowType(KEY)))


def batches(frozen):
    return [batch for _, batch in frozen.batches_by_key_group()]


def restored(into, frozen):
    for batch in batches(frozen):
        into.restore(batch)
    return into


def test_a_list_is_what_was_put_and_appended_until_it_is_cleared():
    state = a_list()
    state.append((1, ["a"]))
    state.extend([(2, None), (3, [])])
    assert state.get() == [(1, ["a"]), (2, None), (3, [])]
    state.put([(4, ["b"])])
    assert state.get() == [(4, ["b"])]
    state.clear()
    assert state.get() == []


def test_what_is_handed_out_may_be_changed_without_harm():
    state, by_key = a_list(), a_map()
    state.append((1, ["a"]))
    by_key.put(("k",), (1, ["a"]))
    state.get()[0][1].append("b")
    by_key.get(("k",))[1].append("b")
    assert state.get() == [(1, ["a"])]
    assert dict(by_key.items())["k",] == (1, ["a"])


def test_a_frozen_list_does_not_see_what_comes_after():
    state = a_list()
    state.extend([(1, None), (2, None)])
    before = state.freeze()
    state.append((3, None))
    appended = state.freeze()
    state.put([(4, None)])

    assert restored(a_list(), before).get() == [(1, None), (2, None)]
    assert len(appended) == 3
    assert restored(a_list(), appended).get()[-1] == (3, None)


def test_a_frozen_map_does_not_see_what_comes_after():
    state = a_map()
    state.put(("a",), (1, None))
    state.put(("b",), (2, None))
    before = state.freeze()
    state.remove(("a",))
    state.put(("b",), (3, None))
    between = state.freeze()
    state.clear()

    assert dict(restored(a_map(), before).items()) == {("a",): (1, None), ("b",): (2, None)}
    assert dict(restored(a_map(), between).items()) == {("b",): (3, None)}
    assert not state.contains(("b",))


def test_a_map_may_be_changed_while_it_is_looked_through():
    state = a_map()
    for letter in "abc":
        state.put((letter,), (1, None))
    for key, _ in state.items():
        state.remove(key)
    state.remove(("not there",))
    assert list(state.items()) == []


def test_only_a_change_makes_another_version():
    for state, change in (
        (a_list(), lambda s: s.append((1, None))),
        (a_map(), lambda s: s.put(("k",), (1, None))),
    ):
        before = state.version
        state.freeze()
        assert state.version == before
        change(state)
        assert state.version > before


def test_a_hundred_thousand_rows_are_frozen_in_a_moment_and_written_in_parts():
    state = a_list()
    state.extend((n, None) for n in range(100_000))
    began = datetime.datetime.now()
    frozen = state.freeze()
    assert datetime.datetime.now() - began < datetime.timedelta(milliseconds=5)
    assert [batch.num_rows for batch in batches(frozen)] == [65_536, 34_464]


def test_rows_that_do_not_fit_are_refused_before_any_is_kept():
    state, by_key = a_list(), a_map()
    with pytest.raises(UserCodeError, match="list state l is given"):
        state.extend([(1, None), ("x", None)])
    with pytest.raises(UserCodeError, match="the key of broadcast state m is given"):
        by_key.put((1,), (1, None))
    with pytest.raises(UserCodeError, match="broadcast state m is given"):
        by_key.put(("k",), ("x", None))
    assert state.get() == []
    assert list(by_key.items()) == []


def test_a_field_may_be_added_and_another_change_is_refused():
    state = a_list()
    state.append((1, ["a"]))
    frozen = state.freeze()

    wider = a_list(pa.schema([*ROW, ("more", pa.string())]))
    assert restored(wider, frozen).get() == [(1, ["a"], None)]
    with pytest.raises(StartRefused, match="cannot become"):
        restored(a_list(pa.schema([("n", pa.string())])), frozen)
