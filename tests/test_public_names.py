"""What a user may import, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import stillframe

PROJECT = Path(__file__).parent.parent


def test_the_public_names_are_these_and_no_others() -> None:
    assert sorted(stillframe.__all__) == [
        "BlockingReader",
        "BuildError",
        "Committer",
        "CommitterContext",
        "DataError",
        "Discovered",
        "EndOfData",
        "Fenced",
        "JobFailed",
        "KeyProcessor",
        "KeyStates",
        "KeyedFunction",
        "Lag",
        "Mark",
        "NothingYet",
        "Options",
        "OutputRefused",
        "Prepared",
        "Query",
        "Savepoint",
        "Secret",
        "Sink",
        "SinkContext",
        "SinkWriter",
        "SnapshotDamaged",
        "Source",
        "SourceContext",
        "SourceReader",
        "Split",
        "SplitEnumerator",
        "StartRefused",
        "StillframeError",
        "StorageError",
        "StreamFunction",
        "SubtaskStates",
        "Target",
        "Timers",
        "TransactionalSink",
        "TwoInputFunction",
        "Unavailable",
        "UnknownOption",
        "UserCodeError",
        "Writer",
        "__version__",
        "everywhere",
        "exactly_once",
        "from_generator",
        "nowhere",
        "on",
        "register",
        "state_difference",
        "to_function",
        "write_jdbc",
    ]


def test_every_public_name_leads_somewhere() -> None:
    assert all(getattr(stillframe, name) for name in stillframe.__all__)


def test_every_error_is_a_stillframe_error() -> None:
    errors = [getattr(stillframe, name) for name in stillframe.__all__]
    kinds = [kind for kind in errors if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) == 12
    assert all(issubclass(kind, stillframe.StillframeError) for kind in kinds)


def test_the_version_is_the_packages() -> None:
    declared = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    assert stillframe.__version__ == declared["project"]["version"]


def test_importing_stillframe_and_row_functions_imports_neither_pyspark_nor_pandas() -> None:
    program = (
        "import sys, stillframe, stillframe.runtime.row_functions\n"
        "print([name for name in ('pyspark', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(PROJECT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"
