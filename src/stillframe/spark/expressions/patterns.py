r"""Spark's LIKE and RLIKE patterns as RE2 patterns, which is what Arrow matches with.

Java's regular expressions and RE2's look alike and differ in the small print: which characters
`.` and `\s` stand for, what `$` does before a final line break, what a class may contain. A pattern
is translated piece by piece; a piece whose meaning is not known to be the same is refused.
"""

from __future__ import annotations

import re

_LINE_BREAKS = r"\n\r\x{85}\x{2028}\x{2029}"
_DOT = f"[^{_LINE_BREAKS}]"
_END = rf"(?:\r\n|[{_LINE_BREAKS}])?\z"
_SPACE = r"\t\n\x0B\f\r "
_ESCAPES = {
    **{letter: f"\\{letter}" for letter in "dDwW"},
    **{letter: f"\\{letter}" for letter in "tnrf"},
    "s": f"[{_SPACE}]",
    "S": f"[^{_SPACE}]",
    "A": r"\A",
    "z": r"\z",
}
_ESCAPES_IN_CLASS = {**_ESCAPES, "s": _SPACE}
for _letter in "SAz":
    del _ESCAPES_IN_CLASS[_letter]


class UnknownPattern(ValueError):
    """A pattern that may mean something else in RE2; the message is the piece."""


def like_to_re2(pattern: str, escape: str) -> str:
    """`%` is anything, `_` one character, and what follows the escape character is itself."""
    pieces = []
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            escaped = next(characters, None)
            if escaped is None or escaped not in ("%", "_", escape):
                raise UnknownPattern(pattern)
            pieces.append(_literal(escaped))
        else:
            pieces.append({"%": ".*", "_": "."}.get(character) or _literal(character))
    return rf"(?s)\A{''.join(pieces)}\z"


def rlike_to_re2(pattern: str) -> str:
    """A Java regular expression as RE2, if it is made of pieces both understand alike."""
    pieces = []
    position = 0
    while position < len(pattern):
        piece, position = _next_piece(pattern, position)
        pieces.append(piece)
    return "".join(pieces)


_REPETITION = re.compile(r"(?:[*+?]|\{[0-9]{1,3}(?:,[0-9]{0,3})?\})\??(?![*+?{])")


def _next_piece(pattern: str, position: int) -> tuple[str, int]:
    character = pattern[position]
    if character == "\\":
        return _escaped(pattern, position, _ESCAPES), position + 2
    if character == "[":
        return _character_class(pattern, position)
    if character in "*+?{":
        repetition = _REPETITION.match(pattern, position)
        if repetition is None:
            raise UnknownPattern(pattern[position : position + 2])
        return repetition.group(), repetition.end()
    if character == "(":
        return _group(pattern, position)
    simple = {".": _DOT, "$": _END, "^": "^", "|": "|", ")": ")"}.get(character)
    return simple or _literal(character), position + 1


def _group(pattern: str, position: int) -> tuple[str, int]:
    if pattern.startswith("(?:", position):
        return "(?:", position + 3
    if pattern.startswith("(?", position):
        raise UnknownPattern(pattern[position : position + 3])
    return "(", position + 1


def _character_class(pattern: str, position: int) -> tuple[str, int]:
    opening = "[^" if pattern.startswith("[^", position) else "["
    pieces = [opening]
    position += len(opening)
    while position < len(pattern) and pattern[position] != "]":
        character = pattern[position]
        if character == "\\":
            pieces.append(_escaped(pattern, position, _ESCAPES_IN_CLASS))
            position += 2
            continue
        if character in "[&^" or (character == "]" and len(pieces) == 1):
            raise UnknownPattern(pattern)
        pieces.append(character)
        position += 1
    if position >= len(pattern) or len(pieces) == 1:
        raise UnknownPattern(pattern)
    return "".join([*pieces, "]"]), position + 1


def _escaped(pattern: str, position: int, known: dict[str, str]) -> str:
    character = pattern[position + 1 : position + 2]
    if character in known:
        return known[character]
    if not character or character.isalnum() or not character.isascii():
        raise UnknownPattern(f"\\{character}")
    return f"\\{character}"


def _literal(character: str) -> str:
    return re.escape(character) if character.isascii() else character
