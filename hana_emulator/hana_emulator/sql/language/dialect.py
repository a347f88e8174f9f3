"""Parse HANA's SQL with sqlglot: functions stay plain calls, each `?` is numbered, hints are removed.

Names and types are resolved elsewhere.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, ClassVar

from sqlglot import exp, tokens
from sqlglot.dialects.dialect import Dialect, NormalizationStrategy
from sqlglot.errors import ParseError, TokenError
from sqlglot.parser import Parser as SqlParser
from sqlglot.tokenizer_core import Token, TokenType

from hana_emulator.errors import HanaError, not_supported, syntax_error
from hana_emulator.registry import Registry

logging.getLogger("sqlglot").setLevel(logging.CRITICAL)
"""sqlglot logs the text of statements that it only partly understands, including literals."""
_LONGEST_QUOTED = 40
# Exceptions that sqlglot's parser sometimes raises for text that is not SQL
_STUMBLES = (TypeError, AttributeError, ValueError, LookupError)
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


class ReplaceRegexpr(exp.Expression):
    """REPLACE_REGEXPR(expression IN this WITH replacement FROM start OCCURRENCE occurrence)."""

    arg_types: ClassVar[dict[str, bool]] = {
        "this": True,
        "expression": True,
        "flag": False,
        "replacement": False,
        "start": False,
        "occurrence": False,
    }


class LikeRegexpr(exp.Expression, exp.Predicate):
    """this LIKE_REGEXPR expression FLAG flag."""

    arg_types: ClassVar[dict[str, bool]] = {"this": True, "expression": True, "flag": False}


_FUNCTION_PARSERS: Registry[str, Callable[[Any], exp.Expr]] = Registry()  # Functions with clauses between arguments


@_FUNCTION_PARSERS("CAST")
def _cast(parser: SqlParser) -> exp.Expr:
    value = parser._parse_disjunction()
    if not parser._match(TokenType.ALIAS):
        parser.raise_error("Expected AS and a type")
    name = parser._advance_any()
    sizes = []
    if parser._match(TokenType.L_PAREN):
        sizes = parser._parse_csv(parser._parse_number)
        if not parser._match(TokenType.R_PAREN):
            parser.raise_error("Expected )")
    return parser.expression(HanaCast(this=value, to=name.text.upper() if name else "", expressions=sizes))


@_FUNCTION_PARSERS("SCORE")
def _score(parser: SqlParser) -> exp.Expr:
    term = parser._parse_bitwise()
    if not parser._match(TokenType.IN) or not parser._match(TokenType.L_PAREN):
        parser.raise_error("Expected IN ( after the search term")
    columns = parser._parse_csv(parser._parse_column)
    if not parser._match_text_seq("EXACT", "SEARCH", "MODE") or not parser._match(TokenType.STRING):
        parser.raise_error("Expected EXACT SEARCH MODE 'text'")
    if not parser._match(TokenType.R_PAREN):
        parser.raise_error("Expected )")
    return parser.expression(Score(this=term, expressions=columns))


@_FUNCTION_PARSERS("REPLACE_REGEXPR")
def _replace_regexpr(parser: SqlParser) -> exp.Expr:
    pattern = parser._parse_bitwise()
    flag = parser._parse_bitwise() if parser._match_text_seq("FLAG") else None
    if not parser._match(TokenType.IN):
        parser.raise_error("Expected IN")
    subject = parser._parse_bitwise()
    clauses: dict[str, exp.Expr | None] = {}
    for word, argument in (("WITH", "replacement"), ("FROM", "start"), ("OCCURRENCE", "occurrence")):
        if parser._match_text_seq(word):
            everything = word == "OCCURRENCE" and parser._match_text_seq("ALL")
            clauses[argument] = exp.Literal.number(0) if everything else parser._parse_bitwise()
    return parser.expression(ReplaceRegexpr(this=subject, expression=pattern, flag=flag, **clauses))


def _like_regexpr(parser: SqlParser, this: exp.Expr | None) -> exp.Expr:
    pattern = parser._parse_bitwise()
    flag = parser._parse_bitwise() if parser._match_text_seq("FLAG") else None
    return parser.expression(LikeRegexpr(this=this, expression=pattern, flag=flag))


class Hana(Dialect):
    NORMALIZATION_STRATEGY = NormalizationStrategy.UPPERCASE

    class Tokenizer(tokens.Tokenizer):
        # Otherwise sqlglot reads everything after RENAME, CALL and similar words as one string
        COMMANDS: ClassVar[set[TokenType]] = set()
        HEX_STRINGS: ClassVar[list[Any]] = [("x'", "'"), ("X'", "'")]
        KEYWORDS: ClassVar[dict[str, TokenType]] = {
            **{
                word: kind
                for word, kind in tokens.Tokenizer.KEYWORDS.items()
                if kind not in _CLOCK_TOKENS and "{" not in word
            },
            "TOP": TokenType.TOP,
            "MINUS": TokenType.EXCEPT,
            "LIKE_REGEXPR": TokenType.RLIKE,
        }
        # '#' can be part of a name; the names of local temporary tables begin with it
        SINGLE_TOKENS: ClassVar[dict[str, TokenType]] = {
            sign: kind for sign, kind in tokens.Tokenizer.SINGLE_TOKENS.items() if sign != "#"
        }
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
            **_FUNCTION_PARSERS,
        }
        RANGE_PARSERS: ClassVar[dict[Any, Any]] = {
            **SqlParser.RANGE_PARSERS,
            TokenType.RLIKE: _like_regexpr,
        }
        NO_PAREN_FUNCTION_PARSERS: ClassVar[dict[str, Any]] = {"CASE": SqlParser.NO_PAREN_FUNCTION_PARSERS["CASE"]}


def tokenize(sql: str, *, semicolons: bool = False) -> list[Token]:
    """The tokens of `sql`, one for each word, without semicolons by default. Raises HanaError 257."""
    try:
        found = Hana.get_or_raise(Hana).tokenize(sql)
    except TokenError as error:
        # sqlglot's message is used only if it names the missing text; others quote the statement and its values.
        message = str(error)
        known = message.startswith("Missing ") and len(message) < 80
        detail = message if known else "a string or a comment does not end"
        raise syntax_error(f"cannot read the statement: {detail}") from None
    return _with_numbered_parameters(
        [
            part
            for token in found
            if semicolons or token.token_type is not TokenType.SEMICOLON
            for part in _single_words(token, sql)
        ]
    )


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
    """Join `:1` into one token; sqlglot splits the colon from the number."""
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
    return token.token_type is TokenType.PLACEHOLDER


def parameter_numbers(tokens: list[Token]) -> set[int]:
    """The numbers of the parameters: k for the k-th `?`, n for `:n`. Numbers may repeat or have gaps.

    Source: go-hdb, `driver/driver_test.go`, "positional args" and "mixed args".
    """
    found = [token.text for token in tokens if is_parameter(token)]
    numbered = {int(text[1:]) for text in found if text != "?"}
    return numbered | set(range(1, found.count("?") + 1))


def numbered_parameter(token: Token, number: int) -> str:
    """Return the parameter in sqlglot's form, with its own number, or with `number` if it is `?`."""
    return f":{PARAMETER_PREFIX}{token.text[1:] or number} "


def number_parameters(sql: str, found: list[Token]) -> str:
    """Return `sql` with its k-th `?` as :P__k (k from 1), and without a final WITH HINT."""
    pieces, position, number = [], 0, 0
    for token in found:
        if is_parameter(token):
            number += token.text == "?"
            pieces += [sql[position : token.start], numbered_parameter(token, number)]
            position = token.end + 1
    hint = _hint_place(found)
    end = found[hint].start if hint is not None else found[-1].end + 1 if found else len(sql)
    return "".join([*pieces, sql[position:end]])


def _hint_place(found: list[Token]) -> int | None:
    """The index of WITH in a final WITH HINT (...)."""
    for index in range(len(found) - 2, 0, -1):
        if found[index].text.upper() == "WITH" and found[index + 1].text.upper() == "HINT":
            return index
    return None


def hints(found: list[Token]) -> frozenset[str]:
    """The names in a final WITH HINT (...), upper-cased."""
    hint = _hint_place(found)
    return frozenset() if hint is None else frozenset(str(token.text).upper() for token in found[hint + 2 :])


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
    _check(trees[0])
    return trees[0]


def parse_condition(sql: str) -> exp.Expr:
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


# The supported part of sqlglot's syntax. sqlglot accepts more than HANA and stores it as extra arguments of ordinary
# nodes (a negated LIKE, a QUALIFY). Anything not listed is rejected, so that nothing is ignored.
_BINARY = "this expression"
_UNDERSTOOD: dict[str, str] = {
    **dict.fromkeys(
        ("Add", "And", "Div", "EQ", "Escape", "GT", "GTE", "Is", "LT", "LTE", "Mul", "NEQ", "Or", "Sub"), _BINARY
    ),
    **dict.fromkeys(("Boolean", "Exists", "From", "Having", "HexString", "National", "Neg", "Not", "Paren"), "this"),
    **dict.fromkeys(("Placeholder", "Var", "Where", "DataType"), "this"),
    **dict.fromkeys(("Distinct", "Group", "Tuple", "Values", "Whens", "With"), "expressions"),
    **dict.fromkeys(("Except", "Intersect", "Union"), "this expression distinct with_ order limit offset"),
    **dict.fromkeys(("Null", "Star"), ""),
    "Alias": "this alias",
    "Anonymous": "this expressions",
    "Between": "this low high",
    "CTE": "this alias",
    "Case": "this ifs default",
    "Cast": "this to",
    "Column": "this table db",
    "DPipe": "this expression safe",
    "Delete": "this where",
    "Extract": "this expression",
    "HanaCast": "this to expressions",
    "Identifier": "this quoted",
    "If": "this true",
    "In": "this expressions query",
    "Insert": "this expression",
    "Join": "this side kind on",
    "LikeRegexpr": "this expression flag",
    "Like": "this expression negate",
    "Limit": "expression",
    "Literal": "this is_string",
    "Lock": "update",
    "Merge": "this on using whens",
    "Offset": "expression",
    "Order": "this expressions",
    "Ordered": "this desc nulls_first",
    "ReplaceRegexpr": "this expression flag replacement start occurrence",
    "Schema": "this expressions",
    "Score": "this expressions",
    "Select": "distinct expressions from_ group having joins limit locks offset order where with_",
    "Subquery": "this alias",
    "Table": "this db alias",
    "TableAlias": "this columns",
    "Trim": "this position expression",
    "Update": "this expressions from_ where",
    "When": "matched condition then",
    "Window": "this partition_by order spec over",
    "WithinGroup": "this expression",
    "WindowSpec": "kind start start_side end end_side",
}
_ARGUMENTS = {name: frozenset(arguments.split()) for name, arguments in _UNDERSTOOD.items()}


def _check(tree: exp.Expr) -> None:
    """Raise HanaError 7 for the first unsupported node or argument."""
    for node in tree.walk():
        name = type(node).__name__
        if name not in _ARGUMENTS:
            raise not_supported(name.upper())
        extra = [argument for argument, value in node.args.items() if value and argument not in _ARGUMENTS[name]]
        if extra:
            raise not_supported(f"{extra[0].strip('_').upper()} in {name.upper()}")
