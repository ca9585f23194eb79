"""What counts as JSON, and in which time zone its times are: Spark's options of these names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mode = Literal["PERMISSIVE", "DROPMALFORMED", "FAILFAST"]


@dataclass(frozen=True, slots=True)
class JsonRules:
    """How texts are read. The defaults are Spark's, but for the zone, which is the session's."""

    zone: str = "UTC"
    """Of times that do not say theirs."""
    mode: Mode = "PERMISSIVE"
    """What becomes of a text that is malformed."""
    corrupt_column: str = "_corrupt_record"
    """The column that gets the text of a malformed record, if the schema has it."""
    single_quotes: bool = True
    unquoted_names: bool = False
    non_numeric_numbers: bool = True
    leading_zeros: bool = False
    any_escape: bool = False
    """Whether a backslash may stand before any character."""
    control_characters: bool = False
    """Whether a string may contain characters below the space that are not escaped."""
    comments: bool = False
    as_written: bool = True
    """Whether an array or object for a string column is its text as it stands in the file."""
