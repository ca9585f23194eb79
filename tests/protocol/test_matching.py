"""Which operator of a job goes on with what an operator of a snapshot has left."""

from __future__ import annotations

import itertools
import random

import pytest

from stillframe.protocol.manifests import OperatorDescription, Place
from stillframe.protocol.matching import Unmatched, matched


def operator(uid, kind="aggregate", traits="", *fed_by):
    """One whose uid nobody has given; `fed_by` are the uids that feed its first input."""
    return OperatorDescription(uid, kind, uid, 1, Place(traits, (tuple(fed_by),)))


def named(uid, kind="aggregate"):
    return OperatorDescription(uid, kind, uid, 1)


READ = operator("read-1", "read", "json /in")
COUNT = operator("count-1", "aggregate", "by k", "read-1")
WRITE = operator("write-1", "write", "json /out")


def pairs(before, now):
    return dict(matched(before, now).pairs)


def test_an_unchanged_job_goes_on_with_the_uids_it_had():
    job = [READ, COUNT, WRITE, named("sums")]

    assert pairs(job, job) == {each.uid: each.uid for each in job}


def test_an_operator_is_found_again_by_kind_traits_and_what_feeds_it():
    count = operator("count-2", "aggregate", "by k", "read-1")
    write = operator("write-2", "write", "json /out")

    assert pairs([READ, COUNT, WRITE], [READ, count, write]) == {
        "read-1": "read-1",
        "count-1": "count-2",
        "write-1": "write-2",
    }


def test_a_change_far_upstream_is_followed_down_to_the_last_operator():
    before = [READ, COUNT, operator("top-1", "transform", "by v", "count-1")]
    now = [
        READ,
        operator("count-2", "aggregate", "by k", "read-1"),
        operator("top-2", "transform", "by v", "count-2"),
    ]

    assert pairs(before, now)["top-1"] == "top-2"


@pytest.mark.parametrize(
    "other",
    [
        operator("count-2", "aggregate", "by v", "read-1"),
        operator("count-2", "transform", "by k", "read-1"),
        operator("count-2", "aggregate", "by k", "read-2"),
        operator("count-2", "aggregate", "by k", "read-1", "read-2"),
    ],
    ids=["other traits", "another kind", "fed by another", "fed by one more"],
)
def test_an_operator_that_differs_in_anything_of_it_is_not_the_one(other):
    now = [READ, operator("read-2", "read", "json /more"), other]

    assert "count-1" not in pairs([READ, COUNT], now)


def test_of_two_candidates_on_either_side_none_is_taken():
    alike = [operator(f"count-{n}", "aggregate", "by k", "read-1") for n in (1, 2, 3)]

    first = matched([READ, *alike[:2]], [READ, *alike[2:]])
    assert [each.operator.uid for each in first.unmatched] == ["count-1", "count-2"]
    one, two = (READ, alike[0]), (READ, *alike[1:])
    assert matched(one, two).unmatched == (Unmatched(alike[0], tuple(alike[1:])),)


def test_an_old_uid_is_not_believed_where_several_are_alike_and_one_has_changed():
    """With one filter less the second has the uid that the first had."""
    alike = {n: operator(f"count-{n}", "aggregate", "by k", "read-1") for n in (1, 2, 3)}
    before, now = [READ, alike[1], alike[2]], [READ, alike[2], alike[3]]

    assert pairs(before, now) == {"read-1": "read-1"}
    assert pairs(before, before).keys() == {"read-1", "count-1", "count-2"}, "unchanged"


def test_the_state_goes_with_the_keys_and_not_with_the_place_that_another_has_taken():
    before = [READ, COUNT]
    now = [
        READ,
        operator("count-1", "aggregate", "by v", "read-1"),
        operator("count-2", "aggregate", "by k", "read-1"),
    ]

    assert pairs(before, now)["count-1"] == "count-2"


def test_an_old_place_with_other_keys_does_not_decide_between_two_that_have_the_keys():
    now = [
        READ,
        operator("count-1", "aggregate", "by v", "read-1"),
        operator("count-2", "aggregate", "by k", "read-1"),
        operator("count-3", "aggregate", "by k", "read-1"),
    ]

    [unmatched] = matched([READ, COUNT], now).unmatched
    assert [each.uid for each in unmatched.candidates] == ["count-2", "count-3"]


def test_an_operator_in_its_old_place_whose_keys_have_changed_is_still_compared_by_its_uid():
    assert pairs([READ, COUNT], [READ, operator("count-1", "aggregate", "by v", "read-1")]) == {
        "read-1": "read-1",
        "count-1": "count-1",
    }


def test_a_given_uid_is_only_ever_matched_by_itself():
    assert pairs([READ, named("counts")], [READ, COUNT]) == {"read-1": "read-1"}
    assert pairs([READ, COUNT], [READ, named("counts")]) == {"read-1": "read-1"}
    assert matched([named("counts")], [COUNT]).unmatched == (Unmatched(named("counts"), (COUNT,)),)


def test_a_uid_that_was_derived_may_be_given_and_what_it_feeds_is_found_again():
    """As the refusal says: add .uid("read-1")."""
    count = operator("count-2", "aggregate", "by k", "read-1")

    assert pairs([READ, COUNT], [named("read-1", "read"), count]) == {
        "read-1": "read-1",
        "count-1": "count-2",
    }


def test_metadata_that_does_not_tell_places_is_matched_by_uid():
    old = [OperatorDescription(each.uid, each.kind, each.name, 1) for each in (READ, COUNT)]

    assert pairs(old, [READ, COUNT]) == {"read-1": "read-1", "count-1": "count-1"}
    moved = operator("count-2", "aggregate", "by k", "read-1")
    assert matched(old, [READ, moved]).unmatched == (Unmatched(old[1], (moved,)),)


def test_the_streams_of_a_union_may_change_their_order():
    more, less = operator("read-2", "read", "json /more"), operator("read-3", "read", "json /less")
    before = [READ, more, operator("count-1", "aggregate", "by k", "read-1", "read-2")]
    now = [more, READ, less, operator("count-2", "aggregate", "by k", "read-2", "read-1")]

    assert pairs(before, now)["count-1"] == "count-2"


def test_no_state_ever_goes_to_an_operator_that_is_not_the_only_one_like_its_own():
    """Random jobs, of which operators are dropped, added and get other uids."""
    for seed in range(400):
        chance = random.Random(seed)
        before, now = _job(chance, "old"), _job(chance, "new")
        shared = [each for each in now if chance.random() < 0.5]
        before += [each for each in shared if each.uid not in {b.uid for b in before}]
        found = matched(before, now)

        told = f"seed {seed}"
        assert len(set(found.pairs.values())) == len(found.pairs), f"{told}: one each"
        of_before = {each.uid: each for each in before}
        of_now = {each.uid: each for each in now}
        for was, become in found.pairs.items():
            if was == become:
                continue
            old, new = of_before[was], of_now[become]
            assert (old.kind, old.place.traits) == (new.kind, new.place.traits), told
            assert _fed(old, found.pairs) == _fed(new, {}), told
            twins = [n for n in now if _looks(n, {}) == _looks(new, {})]
            assert twins == [new], told
        lost = {each.operator.uid for each in found.unmatched}
        assert lost == of_before.keys() - found.pairs.keys(), told


def _job(chance, name):
    made = []
    for number in range(chance.randrange(1, 6)):
        fed_by = [each.uid for each in made if chance.random() < 0.4]
        kind, traits = chance.choice("ab"), chance.choice("xy")
        made.append(operator(f"{name}-{number}", kind, traits, *fed_by))
    return made


def _fed(each, renamed):
    return sorted(renamed.get(uid, uid) for uid in itertools.chain(*each.place.fed_by))


def _looks(each, renamed):
    return each.kind, each.place.traits, _fed(each, renamed)
