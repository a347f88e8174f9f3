"""Read the tokens of statements that sqlglot cannot parse: DDL, transaction control, UPSERT."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from sqlglot.tokenizer_core import Token, TokenType

from hana_emulator.errors import HanaError, syntax_error
from hana_emulator.sql.language.datatypes import type_named
from hana_emulator.types import HanaType

_LONGEST_QUOTED = 40
_STRINGS = (TokenType.STRING, TokenType.NATIONAL_STRING)
_WHOLE_NUMBER = re.compile(r"[0-9]{1,38}")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Name:
    """A possibly qualified name; `schema` is '' if absent."""

    schema: str
    name: str


class TokenReader:
    """Reads `tokens` of `sql` from the left. Each `expect_...` raises HanaError 257 with the position."""

    def __init__(self, sql: str, tokens: list[Token]) -> None:
        self.sql = sql
        self.tokens = tokens
        self.index = 0

    @property
    def current(self) -> Token | None:
        return self.tokens[self.index] if self.index < len(self.tokens) else None

    @property
    def at_end(self) -> bool:
        return self.current is None

    def error(self, expected: str) -> HanaError:
        token = self.current
        if token is None:
            return syntax_error(f"{expected} expected at the end of the statement", len(self.sql))
        near = "'...'" if token.token_type in _STRINGS else token.text[:_LONGEST_QUOTED]
        return syntax_error(f'incorrect syntax near "{near}": {expected} expected', token.start + 1)

    def peek(self, *words: str) -> bool:
        """Whether these unquoted words or signs are next."""
        following = self.tokens[self.index : self.index + len(words)]
        return len(following) == len(words) and all(map(is_word, following, words))

    def take(self, *words: str) -> bool:
        if not self.peek(*words):
            return False
        self.index += len(words)
        return True

    def expect(self, *words: str) -> None:
        if not self.take(*words):
            raise self.error(" ".join(words))

    def end(self) -> None:
        if not self.at_end:
            raise self.error("end of statement")

    def identifier(self) -> str:
        token = self.current
        if (
            token is None
            or token.token_type in (TokenType.STRING, TokenType.NUMBER)
            or not (
                token.token_type is TokenType.IDENTIFIER
                or token.text.replace("_", "A").replace("$", "A").replace("#", "A").isalnum()
            )
        ):
            raise self.error("a name")
        self.index += 1
        return str(token.text) if token.token_type is TokenType.IDENTIFIER else str(token.text).upper()

    def password(self) -> str:
        """Read a password; it keeps its case even without quotes."""
        text = str(self.current.text) if self.current is not None else ""
        self.identifier()
        return text

    def several(self, read: Callable[[], Result]) -> list[Result]:
        """Read comma-separated items."""
        found = [read()]
        while self.take(","):
            found.append(read())
        return found

    def dotted(self) -> list[str]:
        """Read name.name. ..."""
        parts = [self.identifier()]
        while self.take("."):
            parts.append(self.identifier())
        return parts

    def name(self) -> Name:
        first = self.identifier()
        return Name(first, self.identifier()) if self.take(".") else Name("", first)

    def string(self) -> str:
        token = self.current
        if token is None or token.token_type not in _STRINGS:
            raise self.error("a string")
        self.index += 1
        return str(token.text)

    def number(self) -> int:
        negative = self.take("-")
        token = self.current
        if token is None or token.token_type is not TokenType.NUMBER or not _WHOLE_NUMBER.fullmatch(token.text):
            raise self.error("a whole number")
        self.index += 1
        return -int(token.text) if negative else int(token.text)

    def identifiers(self) -> list[str]:
        self.expect("(")
        found = self.several(self.identifier)
        self.expect(")")
        return found

    def type(self) -> HanaType:
        name = self.identifier()
        if name == "DOUBLE":
            self.take("PRECISION")
        sizes: list[int] = []
        if self.take("("):
            sizes = self.several(self.number)
            self.expect(")")
        return type_named(name, sizes)

    def enclosed(self) -> str:
        """Read ( text ); return it without the parentheses."""
        self.expect("(")
        start, depth = self.index, 1
        while depth and not self.at_end:
            depth += self.peek("(") - self.peek(")")
            self.index += 1
        if depth:
            raise self.error(")")
        if self.index - start < 2:
            raise syntax_error("an expression expected between parentheses", self.tokens[start].start + 1)
        return self.sql[self.tokens[start].start : self.tokens[self.index - 2].end + 1]

    def rest(self) -> str:
        token = self.current
        self.index = len(self.tokens)
        return self.sql[token.start : self.tokens[-1].end + 1] if token is not None else ""

    def expression_text(self, stop: frozenset[str]) -> str:
        """The text up to a ',' or ')' outside parentheses, or one of the words of `stop`."""
        first, depth = self.current, 0
        while (token := self.current) is not None:
            text = token.text.upper() if token.token_type is not TokenType.STRING else ""
            if not depth and (text in (",", ")") or (text in stop and token is not first)):
                break
            depth += (text == "(") - (text == ")")
            self.index += 1
        last = self.tokens[self.index - 1]
        if first is None or first is self.current:
            raise self.error("an expression")
        return self.sql[first.start : last.end + 1]


def is_word(token: Token, word: str) -> bool:
    return token.token_type not in (TokenType.IDENTIFIER, TokenType.STRING) and token.text.upper() == word


class Parsers(dict[tuple[str, ...], Callable[["TokenReader"], Result]], Generic[Result]):
    """Parsers by the first words of a statement. The decorator `@PARSERS("CREATE", "USER")` adds one."""

    def __call__(self, *words: str) -> Callable[[Callable[[TokenReader], Result]], Callable[[TokenReader], Result]]:
        def register(parser: Callable[[TokenReader], Result]) -> Callable[[TokenReader], Result]:
            self[words] = parser
            return parser

        return register

    def parse(self, reader: TokenReader) -> Result | None:
        """Parse with the parser that matches the most words; None if none matches."""
        for words in sorted(self, key=len, reverse=True):
            if reader.take(*words):
                result = self[words](reader)
                reader.end()
                return result
        return None
