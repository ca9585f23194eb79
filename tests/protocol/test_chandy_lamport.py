"""E6: three processes and the markers M12, M13, M23, M21, M31, by the code that aligns barriers."""

from __future__ import annotations

from collections import deque

import e6_chandy_lamport as e6
from example_pages import check_shown
from hypothesis import given
from hypothesis import strategies as st


def test_e6_each_process_records_its_state_and_what_was_under_way_to_it():
    parts = e6.run()

    assert {name: part.state for name, part in parts.items()} == {1: 70, 2: 140, 3: 313}
    assert parts[1].channels == {2: [30], 3: [7]}, "between its snapshot and M21, and M31"
    assert parts[2].channels == {1: []}, "M12 was its first marker"
    assert parts[3].channels == {1: [], 2: [40]}, "M13 was its first marker; before M23 came 40"
    assert 70 + 140 + 313 + 30 + 7 + 40 == sum(e6.MONEY.values()) == 600
    received = {
        name: [line.split()[1] for line in part.log if line.startswith("receives M")]
        for name, part in parts.items()
    }
    assert received == {1: ["M21", "M31"], 2: ["M12"], 3: ["M13", "M23"]}
    said = []
    e6.tell(parts, said.append)
    check_shown(said)


CHANNEL = st.sampled_from(e6.CHANNELS)
STEPS = st.lists(st.tuples(CHANNEL, st.none() | st.integers(1, 9)), max_size=60)
"""A payment on a channel, or the arrival of what waits there."""


@given(STEPS, STEPS)
def test_e6_in_whatever_order_things_happen_no_money_is_missing_or_there_twice(before, after):
    pipes = {channel: deque() for channel in e6.CHANNELS}
    processes = {
        name: e6.Process(name, {t: pipes[s, t].append for s, t in e6.CHANNELS if s == name})
        for name in e6.MONEY
    }

    def take(channel, amount):
        source, target = channel
        if amount is not None:
            processes[source].pay(amount, target)
        elif pipes[channel]:
            processes[target].receive(pipes[channel].popleft(), source)

    for step in before:
        take(*step)
    processes[1].begin()
    for step in after:
        take(*step)
    while any(pipes.values()):
        for channel in e6.CHANNELS:
            take(channel, None)

    parts = {name: process.part() for name, process in processes.items()}
    assert e6.in_words(parts).endswith("together 600")
