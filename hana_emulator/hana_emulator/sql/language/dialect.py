"""Parse HANA's SQL with sqlglot: functions stay plain calls, `?` are numbered, hints are removed.

Names and types are resolved elsewhere.
"""

from __future__ import annotations

import logging
import re
from typing import Any, ClassVar

from sqlglot import exp, tokens
from sqlglot.dialects.dialect import Dialect, NormalizationStrategy
from sqlglot.errors import ParseError, TokenError
from sqlglot.parser import Parser as SqlParser
from sqlglot.tokenizer_core import Token, TokenType

from hana_emulator.errors import HanaError, syntax_error
from hana_emulator.sql.language import clauses, grammar

logging.getLogger("sqlglot").setLevel(logging.CRITICAL)
"""It logs the text of statements that it only half understands, literals and all."""
_LONGEST_QUOTED = 40
_STUMBLES = (TypeError, AttributeError, ValueError, LookupError)
"""What sqlglot's parser raises here and there at text that is no SQL."""
PARAMETER_PREFIX = "P__"
_PARAMETER_NUMBER = re.compile(r"[1-9][0-9]{0,5}")
_CLOCK_TOKENS = {
    TokenType.CURRENT_DATE,
    TokenType.CURRENT_DATETIME,
    TokenType.CURRENT_TIME,
    TokenType.CURRENT_TIMESTAMP,
    TokenType.CURRENT_USER,
}
_QUOTED = {TokenType.IDENTIFIER, TokenType.STRING, TokenType.NATIONAL_STRING}
_KEPT_FUNCTION_PARSERS = ("TRIM", "EXTRACT")


class Score(exp.Expression):
    """SCORE(term IN (columns EXACT SEARCH MODE 'text'))."""

    arg_types: ClassVar[dict[str, bool]] = {"this": True, "expressions": True}


class HanaCast(exp.Expression):
    """CAST(this AS to(expressions)) with HANA's own type names."""

    arg_types: ClassVar[dict[str, bool]] = {"this": True, "to": True, "expressions": False}


def _plain_keywords(keywords: dict[str, TokenType]) -> dict[str, TokenType]:
    kept = {word: kind for word, kind in keywords.items() if kind not in _CLOCK_TOKENS and "{" not in word}
    return {**kept, "TOP": TokenType.TOP, "MINUS": TokenType.EXCEPT, "LIKE_REGEXPR": TokenType.RLIKE}


class Hana(Dialect):
    NORMALIZATION_STRATEGY = NormalizationStrategy.UPPERCASE

    class Tokenizer(tokens.Tokenizer):
        COMMANDS: ClassVar[set[TokenType]] = set()
        """sqlglot would take what follows RENAME, CALL and the like as one string."""
        HEX_STRINGS: ClassVar[list[Any]] = [("x'", "'"), ("X'", "'")]
        KEYWORDS: ClassVar[dict[str, TokenType]] = _plain_keywords(tokens.Tokenizer.KEYWORDS)
        SINGLE_TOKENS: ClassVar[dict[str, TokenType]] = {
            sign: kind for sign, kind in tokens.Tokenizer.SINGLE_TOKENS.items() if sign != "#"
        }
        """A # belongs to a name, and begins that of a local temporary table."""
        VAR_SINGLE_TOKENS: ClassVar[set[str]] = {"#", "$"}

    class Parser(SqlParser):
        FUNCTIONS: ClassVar[dict[str, Any]] = {}
        NO_PAREN_FUNCTIONS: ClassVar[dict[Any, Any]] = {}
        FUNCTION_PARSERS: ClassVar[dict[str, Any]] = {
            **{
                name: SqlParser.FUNCTION_PARSERS[name]
                for name in _KEPT_FUNCTION_PARSERS
                if name in SqlParser.FUNCTION_PARSERS
            },
            "CAST": lambda self: self._parse_hana_cast(),
            "SCORE": lambda self: self._parse_score(),
            "REPLACE_REGEXPR": clauses.replace_regexpr,
        }
        RANGE_PARSERS: ClassVar[dict[Any, Any]] = {
            **SqlParser.RANGE_PARSERS,
            TokenType.RLIKE: clauses.like_regexpr,
        }
        NO_PAREN_FUNCTION_PARSERS: ClassVar[dict[str, Any]] = {"CASE": SqlParser.NO_PAREN_FUNCTION_PARSERS["CASE"]}

        def _parse_hana_cast(self) -> exp.Expr:
            value = self._parse_disjunction()
            if not self._match(TokenType.ALIAS):
                self.raise_error("Expected AS and a type")
            name = self._advance_any()
            sizes = []
            if self._match(TokenType.L_PAREN):
                sizes = self._parse_csv(self._parse_number)
                if not self._match(TokenType.R_PAREN):
                    self.raise_error("Expected )")
            return self.expression(HanaCast(this=value, to=name.text.upper() if name else "", expressions=sizes))

        def _parse_score(self) -> exp.Expr:
            term = self._parse_bitwise()
            if not self._match(TokenType.IN) or not self._match(TokenType.L_PAREN):
                self.raise_error("Expected IN ( after the search term")
            columns = self._parse_csv(self._parse_column)
            if not self._match_text_seq("EXACT", "SEARCH", "MODE") or not self._match(TokenType.STRING):
                self.raise_error("Expected EXACT SEARCH MODE 'text'")
            if not self._match(TokenType.R_PAREN):
                self.raise_error("Expected )")
            return self.expression(Score(this=term, expressions=columns))


def tokenize(sql: str, *, semicolons: bool = False) -> list[Token]:
    """The tokens of `sql`, one for each word, without semicolons by default. Raises HanaError 257."""
    try:
        found = Hana.get_or_raise(Hana).tokenize(sql)
    except TokenError as error:
        raise syntax_error(f"cannot read the statement: {_unreadable(str(error))}") from None
    return _with_numbered_parameters(
        [
            part
            for token in found
            if semicolons or token.token_type is not TokenType.SEMICOLON
            for part in _single_words(token, sql)
        ]
    )


def _unreadable(message: str) -> str:
    """Use sqlglot's message only if it names the missing text; others quote the statement with its values."""
    return message if message.startswith("Missing ") and len(message) < 80 else "a string or a comment does not end"


def _single_words(token: Token, sql: str) -> list[Token]:
    """Split tokens such as PRIMARY KEY, which sqlglot joins."""
    if token.token_type in _QUOTED or (" " not in token.text and not any(map(str.isspace, token.text))):
        return [token]
    words = re.finditer(r"\S+", sql[token.start : token.end + 1])
    return [
        Token(
            TokenType.VAR, word.group(), token.line, token.col, token.start + word.start(), token.start + word.end() - 1
        )
        for word in words
    ]


def _with_numbered_parameters(found: list[Token]) -> list[Token]:
    """Join `:1` to one token; sqlglot splits the colon from the number."""
    tokens: list[Token] = []
    for token in found:
        before = tokens[-1] if tokens else None
        if (
            before is not None
            and before.token_type is TokenType.COLON
            and (
                token.token_type is TokenType.NUMBER
                and token.start == before.end + 1
                and _PARAMETER_NUMBER.fullmatch(token.text) is not None
            )
        ):
            tokens[-1] = Token(TokenType.PLACEHOLDER, f":{token.text}", token.line, token.col, before.start, token.end)
        else:
            tokens.append(token)
    return tokens


def is_parameter(token: Token) -> bool:
    """`?` or `:1`."""
    return token.token_type is TokenType.PLACEHOLDER


def parameter_numbers(tokens: list[Token]) -> set[int]:
    """The numbers of the parameters: k for the k-th `?`, n for `:n`. Numbers may repeat or have gaps.

    Source: go-hdb, `driver/driver_test.go`, "positional args" and "mixed args".
    """
    found = [token.text for token in tokens if is_parameter(token)]
    numbered = {int(text[1:]) for text in found if text != "?"}
    return numbered | set(range(1, found.count("?") + 1))


def numbered_parameter(token: Token, number: int) -> str:
    """The parameter in sqlglot's form, with its own number, or `number` for `?`."""
    return f":{PARAMETER_PREFIX}{token.text[1:] or number} "


def number_parameters(sql: str, found: list[Token]) -> str:
    """`sql` with its k-th `?` as :P__k (k from 1), and without a final WITH HINT."""
    pieces, position, number = [], 0, 0
    for token in found:
        if is_parameter(token):
            number += token.text == "?"
            pieces += [sql[position : token.start], numbered_parameter(token, number)]
            position = token.end + 1
    return "".join([*pieces, sql[position : _end_without_hint(sql, found)]])


def _end_without_hint(sql: str, found: list[Token]) -> int:
    for index in range(len(found) - 2, 0, -1):
        if found[index].text.upper() == "WITH" and found[index + 1].text.upper() == "HINT":
            return int(found[index].start)
    return int(found[-1].end) + 1 if found else len(sql)


def hints(found: list[Token]) -> frozenset[str]:
    """The names in a final WITH HINT (...), upper-cased."""
    for index in range(len(found) - 2, 0, -1):
        if found[index].text.upper() == "WITH" and found[index + 1].text.upper() == "HINT":
            return frozenset(str(token.text).upper() for token in found[index + 2 :])
    return frozenset()


def parse(sql: str) -> exp.Expr:
    """The syntax tree of a statement with numbered parameters. Raises HanaError 7, or 257 with the position."""
    try:
        trees = Hana.get_or_raise(Hana).parse(sql)
    except (ParseError, TokenError) as error:
        details = getattr(error, "errors", None) or [{}]
        line, column = details[0].get("line") or 1, details[0].get("col") or 0
        position = sum(len(text) + 1 for text in sql.split("\n")[: line - 1]) + column
        near = details[0].get("highlight") or ""
        near = "'...'" if "'" in near else near[:_LONGEST_QUOTED]
        raise syntax_error(
            f'incorrect syntax near "{near}": line {line} col {column} (at pos {position})', position
        ) from None
    except RecursionError:
        raise HanaError(257, "sql syntax error: nested too deeply") from None
    except _STUMBLES:
        raise syntax_error("the statement is not understood by this emulator") from None
    if len(trees) != 1 or trees[0] is None:
        raise syntax_error("exactly one statement is expected")
    grammar.check(trees[0])
    return trees[0]


def parse_condition(sql: str) -> exp.Expr:
    """The syntax tree of a single expression or condition."""
    tree = parse(f"SELECT 1 FROM DUMMY WHERE {sql}")
    where = tree.args["where"]
    assert isinstance(where, exp.Where)
    condition: exp.Expr = where.this.pop()
    return condition


def parameter_number(node: exp.Expr) -> int | None:
    """k for the k-th `?` of the statement, None for other nodes."""
    if isinstance(node, exp.Placeholder) and isinstance(node.this, str):
        digits = node.this.removeprefix(PARAMETER_PREFIX)
        return int(digits) if digits != node.this and digits.isdecimal() else None
    return None
