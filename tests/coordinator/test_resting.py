"""The rest of an attempt before a rescale: it is come to, or given up, and whoever asked hears."""

import pytest

from stillframe.connectors.discard import DiscardSink
from stillframe.connectors.generate import ClickSource
from stillframe.coordinator.mail import AttemptRested
from stillframe.coordinator.rescaling import RescaleFailed, RescaleWanted
from stillframe.coordinator.resting import Rest
from stillframe.graph.logical import Node, Read, Write
from stillframe.graph.plan import build_plan

CLICKS = ClickSource(records=10)


@pytest.fixture
def told():
    return []


@pytest.fixture
def wanted(told):
    read = Node(Read(CLICKS), CLICKS.schema, given_uid="read")
    plan = build_plan("views", [Node(Write(DiscardSink()), CLICKS.schema, (read,), "write")], 3)
    return RescaleWanted(3, plan, told.append)


@pytest.fixture
def rest(wanted):
    rest = Rest()
    rest.begin(wanted)
    return rest


def test_an_attempt_has_rested_since_its_sources_were_held(rest, wanted, told):
    rest.on_triggered(7, 12.5)

    assert rest.rested() == AttemptRested(wanted, 12.5)
    assert told == [], "the next attempt has to run first"


def test_a_rest_is_given_up_with_the_checkpoint_from_which_the_job_would_have_gone_on(rest, told):
    rest.on_triggered(7, 12.5)
    rest.on_aborted(7, "a slot declined it")

    assert not rest.is_wanted
    assert told == [
        RescaleFailed(
            "the job is not rescaled to parallelism 3: checkpoint 7, from which it would have gone"
            " on, failed: a slot declined it"
        )
    ]


def test_another_checkpoint_that_fails_is_no_matter(rest, told):
    rest.on_aborted(6, "it came before the one that is waited for")
    rest.on_triggered(7, 12.5)
    rest.on_aborted(6, "told twice")

    assert rest.is_wanted
    assert told == []


def test_whoever_asked_hears_once_that_it_is_given_up(rest, told):
    rest.give_up("the attempt ended")
    rest.give_up("the job ended")

    assert told == [RescaleFailed("the job is not rescaled to parallelism 3: the attempt ended")]


def test_a_rest_is_for_the_one_who_asked(rest, wanted, told):
    again = RescaleWanted(wanted.parallelism, wanted.plan, lambda outcome: None)

    assert rest.is_for(wanted)
    assert not rest.is_for(again)
