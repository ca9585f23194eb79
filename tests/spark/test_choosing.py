"""Formats that anybody can bring: by class, by instance, by a name that a package registers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import brought
import pyarrow as pa
import pytest

import stillframe
from stillframe.errors import BuildError
from stillframe.spark.formats.choosing import chosen_sink, chosen_source
from stillframe.spark.formats.guarantee_table import guarantee_table

SCHEMA = pa.schema([("n", pa.int64())])
PASSWORD = "hunter-2-of-the-shelf"


def no_conf(name: str) -> None:
    return None


@pytest.fixture
def shelves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of an installed package."""
    brought.install(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "shelves", raising=False)
    return importlib.import_module("shelves")


@pytest.fixture
def also(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs one more package."""

    def install(package: str, **brings: Any) -> None:
        brought.install(tmp_path / package, package, **brings)
        monkeypatch.syspath_prepend(str(tmp_path / package))
        monkeypatch.delitem(sys.modules, package, raising=False)

    return install


# --- how one is found -----------------------------------------------------------------------------


def test_a_format_is_a_class_an_instance_or_a_registered_name(shelves):
    given = {"UNTIL": "7"}
    counting = shelves.CountingSource(7)

    for asked in (shelves.CountingSource, "counting", "Counting"):
        assert chosen_source(asked).made(given, None, no_conf) == counting
    assert chosen_source(counting).made({}, None, no_conf) is counting
    asked = {"path": "/x", "client.Password": PASSWORD}
    for sink in (shelves.ShelfSink, "shelf"):
        assert chosen_sink(sink).made(asked, SCHEMA, no_conf).password.reveal() == PASSWORD


def test_what_is_neither_is_refused(shelves):
    for asked in (shelves.ShelfSink, 7, None, dict):
        with pytest.raises(
            BuildError, match="takes the name of a source, or a class or instance of"
        ):
            chosen_source(asked)
    with pytest.raises(BuildError, match="no format 'countin', did you mean 'counting'"):
        chosen_source("countin")


def test_a_misspelled_option_is_refused_and_the_nearest_named(shelves):
    with pytest.raises(
        BuildError, match="the source counting has no option 'untill'; did you mean"
    ):
        chosen_source("counting").made({"untill": "7"}, None, no_conf)
    with pytest.raises(BuildError, match="the source counting needs the option until"):
        chosen_source("counting").made({}, None, no_conf)


def test_an_instance_takes_neither_options_nor_a_schema(shelves):
    counting = chosen_source(shelves.CountingSource(7))

    with pytest.raises(BuildError, match="CountingSource is an instance, which takes no options"):
        counting.made({"until": "8"}, None, no_conf)
    with pytest.raises(BuildError, match="is an instance with a schema of its own"):
        counting.made({}, SCHEMA, no_conf)


def test_a_class_that_is_not_made_of_options_says_to_give_an_instance():
    class Bare(stillframe.Source):
        pass

    with pytest.raises(BuildError, match=r"give an instance, readStream\.format\(Bare\(\.\.\.\)\)"):
        chosen_source(Bare).made({}, None, no_conf)


def test_what_from_options_raises_is_told_without_secrets(shelves):
    asked = {"path": "/x", "pin": PASSWORD, "stumbles": "built"}

    with pytest.raises(
        BuildError, match=r"cannot be made of its options: OSError: no login as \*\*\*"
    ):
        chosen_sink("shelf").made(asked, SCHEMA, no_conf)
    with pytest.raises(
        BuildError, match="the source counting cannot be made of its options: Value"
    ):
        chosen_source("counting").made({"until": "many"}, None, no_conf)


# --- packages that do not fit ---------------------------------------------------------------------


def test_a_name_that_two_packages_bring_is_refused_with_both(shelves, also):
    also("racks", sinks=(), sources=("counting = racks:CountingSource",))

    with pytest.raises(
        BuildError, match="'counting' is registered by the packages racks and shelves"
    ):
        chosen_source("counting")
    assert chosen_source(shelves.CountingSource).name == "CountingSource"


def test_a_name_that_hides_one_of_ours_is_refused(also):
    also("racks", sinks=("JSON = racks:ShelfSink",), sources=())

    with pytest.raises(BuildError, match="the package racks registers the sink 'json', which is a"):
        chosen_sink("json")
    assert chosen_sink("parquet").name == "parquet"


def test_a_package_that_cannot_be_imported_says_why(also):
    also("racks", text="import no_such_client", sources=("rack = racks:RackSource",), sinks=())

    with pytest.raises(
        BuildError,
        match=r"package racks brings the source 'rack' .*No module named 'no_such_client'",
    ):
        chosen_source("rack")


def test_a_package_that_registers_something_else_is_refused(also):
    also("racks", sources=("rack = racks:SCHEMA", "away = racks:Away"), sinks=())

    with pytest.raises(BuildError, match=r"racks:SCHEMA, which is no class of stillframe\.Source"):
        chosen_source("rack")
    with pytest.raises(BuildError, match="racks:Away, which cannot be imported"):
        chosen_source("away")


def test_a_registered_format_has_its_line_in_the_table_of_guarantees(shelves):
    table = guarantee_table("sink", with_registered=True)

    assert (
        "| `shelf` | exactly-once | files are renamed when the checkpoint is complete | a shelf |"
        " `tests/test_shelf.py` |"
    ) in table
    (counting,) = (
        line for line in guarantee_table("source", with_registered=True) if "counting" in line
    )
    assert counting == "| `counting` | yes | not said | not said | not said |"
