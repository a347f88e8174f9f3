"""Parse calls with clauses between their arguments (JSON_VALUE ... ON EMPTY, REPLACE_REGEXPR ... IN ...)."""

from __future__ import annotations

from typing import ClassVar

from sqlglot import exp
from sqlglot.parser import Parser
from sqlglot.tokenizer_core import TokenType


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


def replace_regexpr(parser: Parser) -> exp.Expr:
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


def like_regexpr(parser: Parser, this: exp.Expr | None) -> exp.Expr:
    pattern = parser._parse_bitwise()
    flag = parser._parse_bitwise() if parser._match_text_seq("FLAG") else None
    return parser.expression(LikeRegexpr(this=this, expression=pattern, flag=flag))
