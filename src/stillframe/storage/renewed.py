"""Settings of a storage that may be renewed while a job runs: keys that expire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping


class Renewed(Mapping[str, str]):
    """What is settled now, each time it is looked at; there may be secrets in it.

    What was `given` names files, or leaves open what this machine's environment says. Pickled, it
    is a plain dict of what is settled at that moment: another machine has neither, and each attempt
    of a job sends it again.
    """

    def __init__(self, given: Mapping[str, str], settle: Callable[[], Mapping[str, str]]) -> None:
        self.given = given
        self._settle = settle

    def __getitem__(self, name: str) -> str:
        return self._settle()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settle())

    def __len__(self) -> int:
        return len(self._settle())

    def __reduce__(self) -> tuple[type[dict[str, str]], tuple[dict[str, str]]]:
        return dict, (dict(self._settle()),)


def joined(given: Mapping[str, str], several: list[Mapping[str, str]]) -> Mapping[str, str]:
    """Of one or more storages that were opened with the same settings."""
    return Renewed(given, lambda: {name: text for each in several for name, text in each.items()})
