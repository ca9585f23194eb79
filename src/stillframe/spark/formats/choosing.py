"""How `format(...)` is found: our own formats, a class or an instance that the user gives, and
those that installed packages bring by entry points.

A package says in its pyproject.toml, for sinks likewise:

    [project.entry-points."stillframe.sources"]
    queue = "my_package.queues:QueueSource"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from stillframe.api.formats import Format
from stillframe.api.sinks import Sink
from stillframe.api.sources import Source
from stillframe.config import nearest_of
from stillframe.errors import BuildError, StillframeError
from stillframe.options import Options
from stillframe.secrets import Conf, masked, shows_secret
from stillframe.spark.formats.data_source_sinks import PythonSinkFormat
from stillframe.spark.formats.data_sources import PythonSourceFormat, registered_data_source
from stillframe.spark.formats.foreach import ForeachFormat
from stillframe.spark.formats.ours import OWN_SINKS, OWN_SOURCES, OwnFormat
from stillframe.user_code import raise_without_secrets

Word = Literal["source", "sink"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What `format(...)` has named or was given."""

    word: Word
    name: str
    """Of our own and of registered ones their name, of others that of the class."""
    of: OwnFormat | type[Format] | Format | PythonSourceFormat | PythonSinkFormat | ForeachFormat

    def __str__(self) -> str:
        return f"the {self.word} {self.name}"

    @property
    def is_own(self) -> bool:
        return isinstance(self.of, OwnFormat)

    @property
    def option_names(self) -> tuple[str, ...] | None:
        """None: it takes any."""
        if isinstance(self.of, Format):
            return ()
        names = self.of.option_names
        return None if names is None else (*names, *self.of.secret_options)

    def made(self, given: Mapping[str, str], schema: pa.Schema | None, conf: Conf) -> Any:
        """The source or sink of these options. What is wrong with them is a `BuildError`."""
        if isinstance(self.of, Format):
            self._refuse_beside_instance(given, schema)
            return self.of
        options = Options(str(self), given, self.option_names, self.of.secret_options, conf)
        from_options: Any = self.of.from_options  # type: ignore[union-attr]
        try:
            made = from_options(options, schema)
        except StillframeError as error:
            raise_without_secrets(error)
        except Exception as error:
            said = f"{self} cannot be made of its options: {type(error).__name__}: {error}"
            raise BuildError(masked(said)) from (None if shows_secret(error) else error)
        if not isinstance(made, Source if self.word == "source" else Sink):
            raise BuildError(f"from_options of {self} answers {made!r}, which is no {self.word}")
        return made

    def _refuse_beside_instance(self, given: Mapping[str, str], schema: pa.Schema | None) -> None:
        if given:
            raise BuildError(
                f"{self} is an instance, which takes no options, but the option {next(iter(given))}"
                f" is given: give it to {self.name}(...) instead"
            )
        if self.word == "source" and schema is not None:
            raise BuildError(f"{self} is an instance with a schema of its own: leave .schema out")


def chosen_source(asked: object, spark: SparkSession | None = None) -> Chosen:
    """With a session also a data source of Spark's, by its class or the name it registered."""
    kind = _of_spark(asked, spark, "source", OWN_SOURCES)
    if spark is not None and kind is not None:
        return Chosen("source", kind.name(), PythonSourceFormat(spark, kind))
    return _chosen(asked, "source", Source, OWN_SOURCES)


def chosen_sink(asked: object, spark: SparkSession | None = None) -> Chosen:
    kind = _of_spark(asked, spark, "sink", OWN_SINKS)
    if kind is not None:
        return Chosen("sink", kind.name(), PythonSinkFormat(kind))
    return _chosen(asked, "sink", Sink, OWN_SINKS)


def _of_spark(
    asked: object, spark: SparkSession | None, word: Word, own: Mapping[str, OwnFormat]
) -> type[DataSource] | None:
    """A data source of Spark's, if it is one. Its names are asked for last: that may start a
    process, in which Spark looks for packages."""
    if spark is None:
        return None
    if not isinstance(asked, str):
        return asked if isinstance(asked, type) and issubclass(asked, DataSource) else None
    is_ours = asked.lower() in {*own, *(name for name, _ in registered(word))}
    return None if is_ours else registered_data_source(spark, asked)


def registered(word: Word) -> list[tuple[str, EntryPoint]]:
    """What installed packages bring, by its name in small letters; nothing is imported."""
    return sorted(
        ((each.name.lower(), each) for each in entry_points(group=f"stillframe.{word}s")),
        key=lambda named: (named[0], _package(named[1])),
    )


def _chosen(asked: object, word: Word, kind: type[Format], own: Mapping[str, OwnFormat]) -> Chosen:
    if isinstance(asked, kind):
        return Chosen(word, type(asked).__name__, asked)
    if isinstance(asked, type) and issubclass(asked, kind):
        return Chosen(word, asked.__name__, asked)
    if not isinstance(asked, str):
        raise BuildError(
            f"format(...) takes the name of a {word}, or a class or instance of"
            f" stillframe.{kind.__name__}, not {asked!r}"
        )
    name = asked.lower()
    found = registered(word)
    brought = [each for at, each in found if at == name]
    if name in own:
        if brought:
            raise BuildError(
                f"the package {_package(brought[0])} registers the {word} {name!r}, which is a name"
                " of Stillframe's own: remove the package, or have it choose another name"
            )
        return Chosen(word, name, own[name])
    if len(brought) > 1:
        packages = " and ".join(map(_package, brought))
        raise BuildError(
            f"the {word} {name!r} is registered by the packages {packages}: remove one of them, or"
            f" give the class itself to format(...)"
        )
    if brought:
        return Chosen(word, name, _loaded(brought[0], word, kind))
    raise _unknown(asked, word, [*own, *(at for at, _ in found)])


def _loaded(entry: EntryPoint, word: Word, kind: type[Format]) -> type[Format]:
    brings = f"the package {_package(entry)} brings the {word} {entry.name!r} as {entry.value}"
    try:
        loaded = entry.load()
    except Exception as error:  # a package may raise anything when it is imported
        raise BuildError(
            f"{brings}, which cannot be imported ({type(error).__name__}: {error}): install what"
            " the package needs"
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, kind)):
        raise BuildError(f"{brings}, which is no class of stillframe.{kind.__name__}")
    return loaded


def _unknown(asked: str, word: Word, names: list[str]) -> BuildError:
    nearest = nearest_of(asked.lower(), names)
    hint = "; there" if nearest is None else f", did you mean {nearest!r}? There"
    of = "readStream" if word == "source" else "writeStream"
    return BuildError(
        f"{of} has no format {asked!r}{hint} are {', '.join(names)};"
        " for others, let Spark do it: still.stream(spark.read...) and foreachBatch(...)"
    )


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
