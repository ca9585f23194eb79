"""Files of JSON as a source; what is in a text `json_texts` knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from stillframe.api.sources import BlockingReader, SourceContext, Split
from stillframe.config import parse_flag
from stillframe.connectors.files import Following
from stillframe.connectors.lines import LineFileSource, LineReader, given_of, mode_of, utf8_of
from stillframe.errors import NotHonoured
from stillframe.json_texts.columns import Texts
from stillframe.json_texts.records import Malformed, RecordReader, nullable, refuse_unreadable
from stillframe.json_texts.rules import JsonRules

_SPARKS_RULES = JsonRules()


@dataclass(frozen=True, init=False)
class JsonLinesSource(LineFileSource):
    """Files of JSON as Spark reads them: one record in each line, or in each file.

    A member that was not declared is passed over, one that is missing is null. No column is
    declared as never null: what is in a file nobody can declare.
    """

    rules: JsonRules
    is_multi_line: bool
    """Whether each file is one text."""

    def __init__(
        self,
        paths: str | Sequence[str],
        schema: pa.Schema,
        following: Following | None = None,
        rules: JsonRules = _SPARKS_RULES,
        *,
        is_multi_line: bool = False,
    ) -> None:
        super().__init__(paths, nullable(schema), following)
        object.__setattr__(self, "rules", rules)
        object.__setattr__(self, "is_multi_line", is_multi_line)

    def check(self) -> None:
        refuse_unreadable(self.schema, self.rules)
        super().check()

    def open(self, splits: Sequence[Split], context: SourceContext) -> BlockingReader:
        return _JsonLinesReader(self, splits)

    def describe(self) -> str:
        return self._described("json")


class _JsonLinesReader(LineReader):
    def __init__(self, source: JsonLinesSource, splits: Sequence[Split]) -> None:
        super().__init__(source, splits, is_whole=source.is_multi_line)
        self._reader = RecordReader(source.schema, source.rules)

    def _parsed(self, path: str, offset: int, block: bytes) -> pa.RecordBatch:
        texts = Texts.of([block]) if self._is_whole else Texts.lines(block)
        try:
            records = self._reader.read(texts)
        except Malformed as error:
            raise self._refused(path, offset, texts, error) from None
        self._records_malformed += records.malformed
        return records.batch


# --- options -----------------------------------------------------------------------------------

_FLAGS: Mapping[str, str] = {
    "allowComments": "comments",
    "allowUnquotedFieldNames": "unquoted_names",
    "allowSingleQuotes": "single_quotes",
    "allowNumericLeadingZeros": "leading_zeros",
    "allowNonNumericNumbers": "non_numeric_numbers",
    "allowBackslashEscapingAnyCharacter": "any_escape",
    "allowUnquotedControlChars": "control_characters",
}
_PATTERN = "read the column as a string and convert it with an expression"
_INFERENCE = "it is about schemas that Spark infers, and yours is given: leave it out"
_LIMIT = "Jackson's own limit holds: leave it out"
_REFUSED: Mapping[str, str] = {
    "dateFormat": _PATTERN,
    "timestampFormat": _PATTERN,
    "timestampNTZFormat": _PATTERN,
    "enableDateTimeParsingFallback": _PATTERN,
    "locale": _PATTERN,
    "primitivesAsString": _INFERENCE,
    "prefersDecimal": _INFERENCE,
    "inferTimestamp": _INFERENCE,
    "samplingRatio": _INFERENCE,
    "dropFieldIfAllNull": _INFERENCE,
    "maxNestingDepth": _LIMIT,
    "maxNumLen": _LIMIT,
    "maxStringLen": _LIMIT,
    "compression": "compressed files are not read here: decompress them",
    "singleVariantColumn": "a stream cannot carry variants: declare columns, or a string",
}
JSON_OPTIONS = (
    *_FLAGS,
    *_REFUSED,
    "mode",
    "columnNameOfCorruptRecord",
    "multiLine",
    "timeZone",
    "encoding",
    "charset",
    "lineSep",
)


def json_from_options(
    path: str, schema: pa.Schema, following: Following | None, options: Mapping[str, str]
) -> JsonLinesSource:
    """What `readStream.format("json").option(…)` asks for."""
    rules = rules_from_options(options, "the source json")
    is_multi_line = parse_flag(
        "multiLine", given_of(options, JSON_OPTIONS).get("multiLine", "false")
    )
    return JsonLinesSource(path, schema, following, rules, is_multi_line=is_multi_line)


def rules_from_options(options: Mapping[str, str], of: str) -> JsonRules:
    """What Spark's options for JSON say; `of`: whose they are, in words."""
    given = given_of(options, JSON_OPTIONS)
    for name in given:
        if name in _REFUSED:
            raise NotHonoured(f"{of} does not take the option {name}: {_REFUSED[name]}")
    utf8_of(given)
    return JsonRules(
        zone=given.get("timeZone", "UTC"),
        mode=mode_of(given.get("mode", "PERMISSIVE")),
        corrupt_column=given.get("columnNameOfCorruptRecord", "_corrupt_record"),
        **{_FLAGS[name]: parse_flag(name, text) for name, text in given.items() if name in _FLAGS},
    )
