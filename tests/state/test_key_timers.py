"""Timers that are registered one by one: each fires once, and those that are gone cost nothing."""

from __future__ import annotations

from random import Random

import pyarrow as pa

from stillframe.state.heap import HeapBackend
from stillframe.state.key_timers import KeyTimers

KEYS = pa.schema([("user", pa.int64())])


def some_timers(keys=10):
    backend = HeapBackend(KEYS, 16)
    numbers, names = backend.keys_of([pa.array(range(keys))])
    return KeyTimers(backend, "$timers"), [names[number] for number in numbers.tolist()]


def test_a_timer_that_was_deleted_and_registered_again_fires_once():
    timers, (one, *_) = some_timers()
    timers.register(one, 5)
    timers.delete(one, 5)
    timers.register(one, 5)

    assert timers.due(10, 10) == [(one, 5)]


def test_a_timer_that_has_fired_can_be_registered_again():
    timers, (one, *_) = some_timers()
    timers.register(one, 5)
    [(key, time_ms)] = timers.due(10, 10)
    timers.delete(key, time_ms)
    timers.register(one, 5)

    assert timers.due(10, 10) == [(one, 5)]
    assert timers.due(10, 10) == []


def test_a_key_that_moves_its_timer_with_every_record_leaves_no_others_behind():
    timers, keys = some_timers()
    for key in keys:
        timers.register(key, 1_000_000)
    for moved in range(20_000):
        key = keys[moved % 10]
        timers.delete(key, timers.of(key)[0])
        timers.register(key, 1_000_001 + moved)

    assert timers.queued <= 2_100
    assert len(timers.due(2_000_000, 100)) == 10


def test_any_order_of_register_delete_and_fire_is_as_in_a_set():
    for seed in range(50):
        random = Random(seed)
        timers, keys = some_timers(3)
        model: set[tuple[int, object]] = set()
        for _ in range(300):
            key, time_ms = random.choice(keys), random.randrange(20)
            match random.choice(["register", "register", "delete", "fire"]):
                case "register":
                    timers.register(key, time_ms)
                    model.add((time_ms, key))
                case "delete":
                    timers.delete(key, time_ms)
                    model.discard((time_ms, key))
                case "fire":
                    due = timers.due(time_ms, random.choice([1, 100]))
                    expected = sorted(each for each in model if each[0] <= time_ms)[: len(due)]
                    assert [(time, key) for key, time in due] == expected, f"seed {seed}"
                    for fired in due:
                        timers.delete(*fired)
                        model.discard(fired[::-1])
            assert timers.next_ms() == min((time for time, _ in model), default=None)
