"""The options of a format, as whoever makes a source or a sink of them reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from stillframe.config import refuse_unknown
from stillframe.errors import BuildError
from stillframe.secrets import HIDDEN, Conf, Secret, is_secret_name, refuse_secret_in_address


class MissingOption(BuildError, KeyError):
    """An option that has to be given and was not."""

    __str__ = BuildError.__str__


class Options(Mapping[str, str]):
    """What the user gave to a format; names are found without regard to case, as Spark's are.

    A secret is no text: `secret` answers it, and asking for its text is refused.
    """

    def __init__(
        self,
        of: str,
        given: Mapping[str, str],
        known: Iterable[str] | None = None,
        secret_names: Iterable[str] = (),
        conf: Conf = lambda name: None,
    ) -> None:
        """`of`: whose they are, in words. `known` None: whoever reads them refuses the others."""
        if known is not None:
            refuse_unknown(given, [*known, *secret_names], of)
        marked = {name.lower() for name in secret_names}
        self._of = of
        self._names: dict[str, str] = {}
        self._values: dict[str, str | Secret] = {}
        for name, text in given.items():
            self._names[name.lower()] = name
            if name.lower() in marked or is_secret_name(name):
                self._values[name.lower()] = Secret.from_option(name, text, conf)
            else:
                refuse_secret_in_address(name, text)
                self._values[name.lower()] = text

    def __getitem__(self, name: str) -> str:
        value = self._value(name)
        if isinstance(value, Secret):
            raise BuildError(
                f"option {name} of {self._of} is a secret, and no text: the format must ask for it"
                f" by options.secret({name!r})"
            )
        return value

    def secret(self, name: str) -> Secret:
        """A secret that must be given: one by its name, or one of the `secret_options`."""
        value = self._value(name)
        return value if isinstance(value, Secret) else Secret(value)

    def below(self, prefix: str) -> dict[str, str | Secret]:
        """Those whose names begin so, without the beginning and otherwise as they were spelled:
        what is handed on to a client as it is."""
        return {
            self._names[name][len(prefix) :]: value
            for name, value in self._values.items()
            if name.startswith(prefix.lower())
        }

    def _value(self, name: str) -> str | Secret:
        try:
            return self._values[name.lower()]
        except KeyError:
            raise MissingOption(
                f"{self._of} needs the option {name}: say .option({name!r}, ...)"
            ) from None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._names.values())

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        shown = {
            self._names[name]: HIDDEN if isinstance(value, Secret) else value
            for name, value in self._values.items()
        }
        return f"Options({shown})"
