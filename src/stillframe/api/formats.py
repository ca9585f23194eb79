"""What a source or a sink says of itself, to be chosen by a name or a class and given options."""

from __future__ import annotations

from typing import ClassVar

from stillframe.errors import BuildError


class Format:
    """What `Source` and `Sink` share: everything here may be left out.

    An instance needs no options: `format(MySource(...))`. A class that is made of options has
    `from_options`. A package brings one under a name by an entry point, in the group
    `stillframe.sources` or `stillframe.sinks`.
    """

    option_names: ClassVar[tuple[str, ...] | None] = None
    """The options it takes: any other is refused before `from_options` is called. `client.*` stands
    for all that begin with `client.`. None: `from_options` is given whatever comes."""

    secret_options: ClassVar[tuple[str, ...]] = ()
    """Those of them that are secrets though they are not called like one. An option that is called
    `password`, `token`, `client.secret` or the like is one anyway."""

    how: ClassVar[str] = ""
    """How it keeps its guarantee, in words for the table of guarantees."""

    needs: ClassVar[str] = ""
    """What the other system must have or do for that."""

    tested_by: ClassVar[tuple[str, ...]] = ()
    """The tests that show it, by their paths in the repository."""

    def check_start(self) -> None:
        """Raise `StartRefused` for what would keep a job from running, such as a table that is not
        there.

        Called on the driver each time a job is started, not when it restarts itself: it may ask
        the other system, for some seconds at most.
        """


def not_made_of_options(cls: type[Format], of: str) -> BuildError:
    return BuildError(
        f"{cls.__name__} has no from_options, so it cannot be made of options: give an instance,"
        f" {of}.format({cls.__name__}(...))"
    )
