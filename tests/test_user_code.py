"""What the user's code returns and is iterated here: nothing of it ends by a StopIteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain, starmap
from typing import Any

import pytest

from stillframe.user_code import lazily


def one(number: int) -> int:
    if number == 3:
        raise StopIteration
    return number


def few(number: int) -> Iterable[int]:
    return [one(number)]


LAZY: dict[str, Callable[[], Iterable[Any]]] = {
    "map": lambda: map(one, range(5)),
    "filter": lambda: filter(one, range(1, 5)),
    "map of a filter of a map": lambda: map(abs, filter(None, map(one, range(5)))),
    "chain": lambda: chain([0], map(one, range(1, 5))),
    "chain of what is made on the way": lambda: chain.from_iterable(map(few, range(5))),
    "chain of maps that are made on the way": lambda: chain.from_iterable(
        map(one, [number]) for number in range(5)
    ),
    "starmap": lambda: starmap(one, zip(range(5), strict=True)),
}


@pytest.mark.parametrize("lazy", LAZY)
def test_a_stop_iteration_of_a_function_is_an_error_whatever_iterates_it(lazy: str) -> None:
    assert 3 not in list(LAZY[lazy]()), "Python itself takes it for an end"

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(lazily(LAZY[lazy]()))


@pytest.mark.parametrize(
    ("made", "values"),
    [
        pytest.param(map(abs, [-1, 2]), [1, 2], id="map"),
        pytest.param(map(max, [1, 5], [3, 4, 9]), [3, 5], id="map of two"),
        pytest.param(filter(None, [0, 1, 2]), [1, 2], id="filter"),
        pytest.param(chain([1], (2,), iter([3])), [1, 2, 3], id="chain"),
        pytest.param(chain(), [], id="chain of nothing"),
        pytest.param(chain.from_iterable([[1, 2], [], [3]]), [1, 2, 3], id="chain of lists"),
        pytest.param(starmap(max, [(1, 2), (4, 3)]), [2, 4], id="starmap"),
        pytest.param([1, 2], [1, 2], id="list"),
    ],
)
def test_what_is_lazy_gives_what_it_gave(made: Iterable[Any], values: list[int]) -> None:
    assert list(lazily(made)) == values


def test_what_was_begun_goes_on_where_it_was() -> None:
    begun = chain.from_iterable([[1, 2], [3]])
    next(begun)

    assert list(lazily(begun)) == [2, 3]
