"""One JSON text as a stream of tokens, as Jackson gives them to Spark.

Theory of operation
-------------------
What Spark makes of a text that is *not* JSON depends on how far its parser had come, and where it
goes on after an error. A string is read only when somebody asks for it, or when the next token is
wanted; a value is read together with its name; an error leaves the parser just behind the byte
that it did not expect. Spark catches errors of single fields and goes on from there, so
`{"name": "caf\xe9", "n": 1}` in Latin-1 loses its name and keeps its number. All of this is
imitated here, and compared with Spark in `tests/spark/test_json.py`.

Rules of this file
------------------
1. Where `at` stands after an error is part of the result.
2. Nothing here is recursive: a text may be nested as deeply as its author likes.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NoReturn

from stillframe.json_texts.rules import JsonRules

DEPTH_MAX = 1000
NUMBER_CHARACTERS_MAX = 1000
_NAME_CHARACTERS_MAX = 50_000


class NotJson(Exception):
    """The text is not JSON at this place."""


class Token(Enum):
    """What stands in a text; the values are what an error calls it."""

    START_OBJECT = "an object"
    END_OBJECT = "the end of an object"
    START_ARRAY = "an array"
    END_ARRAY = "the end of an array"
    NAME = "a name"
    STRING = "a string"
    INTEGER = "a whole number"
    FRACTION = "a number with a fraction"
    TRUE = "true"
    FALSE = "false"
    NULL = "null"


_QUOTE, _APOSTROPHE, _BACKSLASH = ord('"'), ord("'"), ord("\\")
_PLAIN = re.compile(rb'[^"\\\x00-\x1f\x80-\xff]*')
_PLAIN_IN_APOSTROPHES = re.compile(rb"[^'\\\x00-\x1f\x80-\xff]*")
_DIGITS = re.compile(rb"[0-9]*")
_ESCAPES = {
    ord("b"): "\b",
    ord("t"): "\t",
    ord("n"): "\n",
    ord("f"): "\f",
    ord("r"): "\r",
    ord('"'): '"',
    ord("/"): "/",
    _BACKSLASH: "\\",
}
_WORDS = {
    ord("t"): (b"true", Token.TRUE),
    ord("f"): (b"false", Token.FALSE),
    ord("n"): (b"null", Token.NULL),
}
_NAME_BYTES = frozenset(
    b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_$@#*-+"
) | frozenset(range(0x80, 0x100))
_PAIR = re.compile("([\ud800-\udbff])([\udc00-\udfff])")
_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokens:
    """The tokens of one text, one after the other."""

    def __init__(self, text: bytes, rules: JsonRules) -> None:
        self._text = text
        self._rules = rules
        self.at = 3 if text.startswith(b"\xef\xbb\xbf") else 0
        self.token: Token | None = None
        self.starts_at = 0
        """Where the current value begins."""
        self._after_name: Token | None = None
        self._unread = False
        """Whether the current string has not been read yet."""
        self._string = ""
        self._scopes: list[_Scope] = [_Scope(None)]

    # --- what a reader asks for

    def next(self) -> Token | None:
        """The next token; None at the end, or where a value was given up after its name."""
        if self.token is Token.NAME:
            token, self._after_name = self._after_name, None
            if token is Token.START_OBJECT or token is Token.START_ARRAY:
                self._open(token)
            self.token = token
            return token
        if self._unread:
            self._skip_string()
        byte = self._next_byte()
        if byte is None:
            if len(self._scopes) > 1:
                self._refuse("it ends too early")
            self.token = None
        elif byte in b"]}":
            self._close(byte)
        elif self._scopes[-1].kind is not Token.START_OBJECT:
            token = self._value(self._after_comma(byte))
            if token is Token.START_OBJECT or token is Token.START_ARRAY:
                self._open(token)
            self.token = token
        else:
            name = self._name(self._after_comma(byte))
            self._scopes[-1].name = name
            self.token = Token.NAME
            self._skip_colon()
            self._after_name = self._value(self._must_have_byte())
        return self.token

    @property
    def name(self) -> str | None:
        """The name to which the current token belongs, if it does."""
        starts = self.token is Token.START_OBJECT or self.token is Token.START_ARRAY
        return self._scopes[-2 if starts else -1].name

    def string(self) -> str:
        """The current string; what Java cannot encode in it is a question mark, as in Spark."""
        if self._unread:
            self._read_string()
        return self._string

    def raw(self) -> str:
        """The current value as it is written; arrays and objects are read to their end."""
        starts_at = self.starts_at
        self.skip_children()
        return self._text[starts_at : self.at].decode("utf-8", "replace")

    def number(self) -> str:
        """The current number as it is written."""
        return self._text[self.starts_at : self.at].decode("ascii")

    def skip_children(self) -> None:
        """Go to the end of the array or object that has just begun, if one has."""
        if self.token is not Token.START_OBJECT and self.token is not Token.START_ARRAY:
            return
        depth = 1
        while depth:
            token = self.next()
            if token is None:
                return
            if token is Token.START_OBJECT or token is Token.START_ARRAY:
                depth += 1
            elif token is Token.END_OBJECT or token is Token.END_ARRAY:
                depth -= 1

    def base64(self) -> bytes:
        """The current string as the bytes that it is the Base64 of.

        Where it is not, the string stays unread, and is read from there when the next token is
        wanted.
        """
        if not self._unread:
            return _Base64(self._string.encode("utf-16-le", "surrogatepass")[::2] + b'"').decode()
        reader = _Base64(self._text, self.at)
        try:
            decoded = reader.decode()
        finally:
            self.at = reader.at
        self._unread = False
        return decoded

    # --- structure

    def _open(self, token: Token) -> None:
        self._scopes.append(_Scope(token))
        if len(self._scopes) > DEPTH_MAX + 1:
            self._refuse(f"it is nested more than {DEPTH_MAX} deep")

    def _close(self, byte: int) -> None:
        kind = Token.START_OBJECT if byte == ord("}") else Token.START_ARRAY
        if self._scopes[-1].kind is not kind:
            self._refuse(f"{chr(byte)} closes nothing")
        self._scopes.pop()
        self.token = Token.END_OBJECT if kind is Token.START_OBJECT else Token.END_ARRAY

    def _after_comma(self, byte: int) -> int:
        """The first byte of the next entry, of which `byte` may be the comma in front."""
        scope = self._scopes[-1]
        scope.entries += 1
        if scope.kind is None or scope.entries == 1:
            return byte
        if byte != ord(","):
            self._refuse_byte(byte, "a comma")
        return self._must_have_byte()

    def _skip_colon(self) -> None:
        byte = self._must_have_byte()
        if byte != ord(":"):
            self._refuse_byte(byte, "a colon")

    def _must_have_byte(self) -> int:
        byte = self._next_byte()
        if byte is None:
            self._refuse("it ends too early")
        return byte

    def _next_byte(self) -> int | None:
        """The next byte that is not a blank, taken."""
        text, at = self._text, self.at
        while at < len(text):
            byte = text[at]
            at += 1
            if byte > 0x20:
                self.at = at
                if byte == ord("/"):
                    self._skip_comment()
                    at = self.at
                    continue
                return byte
            if byte not in b" \t\r\n":
                self.at = at
                self._refuse_byte(byte, "a blank")
        self.at = at
        return None

    def _skip_comment(self) -> None:
        if not self._rules.comments:
            self._refuse_byte(ord("/"), "no comment (see allowComments)")
        kind = self._byte("a comment")
        if kind == ord("/"):
            ends = [end for end in map(self._text.find, b"\n\r", (self.at,) * 2) if end >= 0]
            self.at = min(ends) + 1 if ends else len(self._text)
        elif kind == ord("*"):
            end = self._text.find(b"*/", self.at)
            self.at = end + 2 if end >= 0 else len(self._text)
            if end < 0:
                self._refuse("it ends in a comment")
        else:
            self._refuse_byte(kind, "a comment")

    def _byte(self, within: str) -> int:
        if self.at >= len(self._text):
            self._refuse(f"it ends within {within}")
        self.at += 1
        return self._text[self.at - 1]

    # --- values

    def _value(self, byte: int) -> Token:
        self.starts_at = self.at - 1
        if byte == _QUOTE:
            self._unread = True
            return Token.STRING
        if byte == ord("{"):
            return Token.START_OBJECT
        if byte == ord("["):
            return Token.START_ARRAY
        if byte == ord("-") or 0x30 <= byte <= 0x39:
            return self._number(byte)
        if byte in _WORDS:
            word, token = _WORDS[byte]
            self._match(word, 1)
            return token
        return self._odd_value(byte)

    def _odd_value(self, byte: int) -> Token:
        if byte == _APOSTROPHE and self._rules.single_quotes:
            self._string = self._read_until(_APOSTROPHE, _PLAIN_IN_APOSTROPHES)
            return Token.STRING
        if byte == ord("N"):
            return self._non_number(b"NaN", 1)
        if byte == ord("I"):
            return self._non_number(b"Infinity", 1)
        if byte == ord("+"):
            return self._signed_infinity(b"+", self._byte("a number"))
        if byte not in b",]}" and _is_part_of_word(byte):
            self._refuse_word()
        self._refuse_byte(byte, "a value")

    def _number(self, byte: int) -> Token:
        if byte == ord("-"):
            byte = self._byte("a number")
            if not 0x30 <= byte <= 0x39:
                return self._signed_infinity(b"-", byte)
        is_padded = byte == ord("0") and self._text[self.at : self.at + 1].isdigit()
        if is_padded and not self._rules.leading_zeros:
            self._refuse("a number begins with 0")
        self._digits()
        token = Token.INTEGER
        if self._text[self.at : self.at + 1] == b".":
            token = Token.FRACTION
            self.at += 1
            self._must_have_digits()
        if self._text[self.at : self.at + 1] in (b"e", b"E"):
            token = Token.FRACTION
            self.at += 1
            if self._text[self.at : self.at + 1] in (b"-", b"+"):
                self.at += 1
            self._must_have_digits()
        signs = sum(self._text.count(sign, self.starts_at, self.at) for sign in (b"-", b".", b"e"))
        if self.at - self.starts_at - signs > NUMBER_CHARACTERS_MAX:
            self._refuse(f"a number has more than {NUMBER_CHARACTERS_MAX} digits")
        return token

    def _digits(self) -> int:
        match = _DIGITS.match(self._text, self.at)
        assert match is not None
        count = match.end() - self.at
        self.at = match.end()
        return count

    def _must_have_digits(self) -> None:
        if not self._digits():
            self._refuse_byte(self._byte("a number"), "a digit")

    def _signed_infinity(self, sign: bytes, byte: int) -> Token:
        if byte == ord("I"):
            second = self._byte("a number")
            if second == ord("N"):
                return self._non_number(sign + b"INF", 3)
            if second == ord("n"):
                return self._non_number(sign + b"Infinity", 3)
        self._refuse_byte(byte, "a digit")

    def _non_number(self, word: bytes, matched: int) -> Token:
        self._match(word, matched)
        if not self._rules.non_numeric_numbers:
            self._refuse(f"{word.decode()} is no number (see allowNonNumericNumbers)")
        return Token.FRACTION

    def _match(self, word: bytes, matched: int) -> None:
        """The rest of a word of which some bytes have been taken, and no letter behind it."""
        for byte in word[matched:]:
            if self._text[self.at : self.at + 1] != bytes((byte,)):
                self._refuse_word()
            self.at += 1
        behind = self._text[self.at : self.at + 1]
        if behind and behind[0] >= 0x30 and _is_part_of_word(behind[0]):
            self._refuse_word()

    def _refuse_word(self) -> NoReturn:
        """Takes the rest of the word, and what ends it."""
        while self.at < len(self._text):
            self.at += 1
            byte = self._text[self.at - 1]
            if byte >= 0x80:
                self._encoded(byte)
            elif not _is_part_of_word(byte):
                break
        word = self._text[self.starts_at : self.at].decode("utf-8", "replace")
        self._refuse(f"{word[:20]!r} is no value")

    # --- names and strings

    def _name(self, byte: int) -> str:
        starts_at = self.at
        if byte == _QUOTE:
            return self._quoted_name(starts_at, _QUOTE, _PLAIN)
        if byte == _APOSTROPHE and self._rules.single_quotes:
            return self._quoted_name(starts_at, _APOSTROPHE, _PLAIN_IN_APOSTROPHES)
        if not self._rules.unquoted_names or byte not in _NAME_BYTES:
            if byte >= 0x80:
                self._encoded(byte)
            self._refuse_byte(byte, "a name in quotes")
        while self.at < len(self._text) and self._text[self.at] in _NAME_BYTES:
            self.at += 1
        if self.at == len(self._text):
            self._refuse("it ends within a name")
        try:
            return self._text[starts_at - 1 : self.at].decode()
        except UnicodeDecodeError:
            self._refuse("a name is not UTF-8")

    def _quoted_name(self, starts_at: int, end: int, plain: re.Pattern[bytes]) -> str:
        """Other than a string, a name is taken to its end before its letters are looked at."""
        match = plain.match(self._text, starts_at)
        assert match is not None
        if match.end() < len(self._text) and self._text[match.end()] == end:
            self.at = match.end() + 1
            return self._short_name(match[0].decode("ascii"))
        inner = Tokens(self._text, self._rules)
        inner.at = starts_at
        try:
            name = inner._read_until(end, plain, keeps_surrogates=True)
        except _NotUtf8:
            self.at = _end_of_quoted(self._text, starts_at, end)
            raise
        except NotJson:
            self.at = inner.at
            raise
        self.at = inner.at
        joined = _joined(name)
        if _SURROGATE.search(joined):
            self._refuse("a name has half a surrogate pair")
        return self._short_name(joined)

    def _short_name(self, name: str) -> str:
        if len(name) > _NAME_CHARACTERS_MAX:
            self._refuse(f"a name has more than {_NAME_CHARACTERS_MAX} characters")
        return name

    def _read_string(self) -> None:
        self._unread = False
        self._string = self._read_until(_QUOTE, _PLAIN)

    def _skip_string(self) -> None:
        """Jackson looks at what it skips less closely than at what it reads."""
        self._unread = False
        self._read_until(_QUOTE, _PLAIN, skips=True)

    def _read_until(
        self,
        end: int,
        plain: re.Pattern[bytes],
        keeps_surrogates: bool = False,
        skips: bool = False,
    ) -> str:
        parts: list[str] = []
        has_surrogates = False
        while True:
            match = plain.match(self._text, self.at)
            assert match is not None
            if match.end() > self.at:
                parts.append(match[0].decode("ascii"))
                self.at = match.end()
            byte = self._byte("a string")
            if byte == end:
                break
            if byte == _BACKSLASH:
                part = self._escaped()
                has_surrogates = has_surrogates or "\ud800" <= part <= "\udfff"
            elif byte < 0x20:
                if not self._rules.control_characters:
                    self._refuse_byte(byte, "a string without control characters")
                part = chr(byte)
            else:
                part = self._encoded(byte, skips)
            parts.append(part)
        text = "".join(parts)
        if has_surrogates and not keeps_surrogates:
            return _SURROGATE.sub("?", _joined(text))
        return text

    def _escaped(self) -> str:
        byte = self._byte("an escape")
        if byte in _ESCAPES:
            return _ESCAPES[byte]
        if byte != ord("u"):
            if byte == _APOSTROPHE and self._rules.single_quotes:
                return "'"
            escaped = chr(byte) if byte < 0x80 else self._encoded(byte)
            if self._rules.any_escape:
                return escaped
            self._refuse(f"\\{escaped} is no escape")
        code = 0
        for _ in range(4):
            byte = self._byte("an escape")
            digit = b"0123456789abcdef".find(byte | 0x20 if byte > 0x39 else byte)
            if digit < 0:
                self._refuse_byte(byte, "a hexadecimal digit")
            code = code * 16 + digit
        return chr(code)

    def _encoded(self, first: int, skips: bool = False) -> str:
        """A character beyond ASCII; overlong ones are taken, as Jackson takes them."""
        if first < 0xC0 or first >= 0xF8:
            raise _NotUtf8(f"the byte 0x{first:02x} is not UTF-8")
        following = 1 if first < 0xE0 else 2 if first < 0xF0 else 3
        code = first & (0x3F >> following)
        for _ in range(following):
            byte = self._byte("a character")
            if byte & 0xC0 != 0x80:
                raise _NotUtf8(f"the byte 0x{byte:02x} behind 0x{first:02x} is not UTF-8")
            code = code << 6 | byte & 0x3F
        if following == 2 and 0xD800 <= code <= 0xDFFF and not skips:
            raise _NotUtf8("half a surrogate pair is not UTF-8")
        if following == 3 and not 0x10000 <= code <= 0x10FFFF:
            return "??"
        return chr(code)

    # --- errors

    def _refuse_byte(self, byte: int, expected: str) -> NoReturn:
        self._refuse(f"{chr(byte)!r} stands where {expected} is expected")

    def _refuse(self, why: str) -> NoReturn:
        raise NotJson(f"{why}, at byte {self.at}")


class _NotUtf8(NotJson):
    """A string or a name is not UTF-8."""


class _Scope:
    """An array or object that is open, or the root."""

    __slots__ = ("entries", "kind", "name")

    def __init__(self, kind: Token | None) -> None:
        self.kind = kind
        self.entries = 0
        self.name: str | None = None


def _is_part_of_word(byte: int) -> bool:
    return chr(byte).isalnum() or byte in b"_$" or byte >= 0x80 or byte in _IGNORED_IN_WORDS


_IGNORED_IN_WORDS = bytes((*range(9), *range(0x0E, 0x1C), 0x7F))


def _joined(text: str) -> str:
    """Pairs of surrogates as the one character that they are."""
    return _PAIR.sub(
        lambda pair: pair[0].encode("utf-16-le", "surrogatepass").decode("utf-16-le"), text
    )


def _end_of_quoted(text: bytes, at: int, end: int) -> int:
    """Behind the quote that ends a name, escapes left aside."""
    while text[at] != end:
        at += 2 if text[at] == _BACKSLASH else 1
        if at >= len(text):
            return len(text)
    return at + 1


_BASE64_DIGITS = {
    digit: number
    for number, digit in enumerate(
        b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    )
}


class _Base64:
    """Reads Base64 up to a quote; remembers how far it came."""

    def __init__(self, text: bytes, at: int = 0) -> None:
        self._text = text
        self.at = at

    def decode(self) -> bytes:
        made = bytearray()
        while True:
            byte = self._byte()
            if byte == _QUOTE:
                return bytes(made)
            if byte == _BACKSLASH:
                byte = self._unescaped()
            if byte <= 0x20:
                continue
            bits = self._digit(byte) << 6 | self._digit(self._byte())
            third = self._unless_quote()
            if third == ord("="):
                if self._byte() != ord("="):
                    raise NotJson("Base64 is not padded")
                made.append(bits >> 4)
                continue
            bits = bits << 6 | self._digit(third)
            fourth = self._unless_quote()
            if fourth == ord("="):
                made += (bits >> 2).to_bytes(2, "big")
                continue
            made += (bits << 6 | self._digit(fourth)).to_bytes(3, "big")

    def _unescaped(self) -> int:
        inner = Tokens(self._text, JsonRules())
        inner.at = self.at
        try:
            return ord(inner._escaped())
        finally:
            self.at = inner.at

    def _unless_quote(self) -> int:
        byte = self._byte()
        if byte == _QUOTE:
            self.at -= 1
            raise NotJson("Base64 is not padded")
        return byte

    def _digit(self, byte: int) -> int:
        if byte == _BACKSLASH:
            byte = self._unescaped()
        digit = _BASE64_DIGITS.get(byte)
        if digit is None:
            raise NotJson(f"{chr(byte)!r} is not Base64")
        return digit

    def _byte(self) -> int:
        if self.at >= len(self._text):
            raise NotJson("it ends within a string")
        self.at += 1
        return self._text[self.at - 1]
