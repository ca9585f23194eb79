"""Clicks out of a Python generator, in several splits, for jobs that are killed."""

from __future__ import annotations

import threading

from stillframe import from_generator

DDL = "id long, app_id string"
ROWS = 1_000
SPLITS = ("east", "north", "south", "west")


def clicks(split, position):
    """A thousand rows; every twentieth is followed by a moment without any."""
    first = SPLITS.index(split) * ROWS
    for number in range(0 if position is None else position["next"], ROWS):
        yield (first + number, f"app-{(first + number) % 17}"), {"next": number + 1}
        if number % 20 == 0:
            threading.Event().wait(0.002)
            yield None


def click_source():
    return from_generator(clicks, DDL, splits=SPLITS)
