"""Parse calls with clauses between their arguments (JSON_VALUE ... ON EMPTY, REPLACE_REGEXPR ... IN ...)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from sqlglot import exp
from sqlglot.parser import Parser
from sqlglot.tokenizer_core import TokenType

TypeText = tuple[str, tuple[int, ...]]
"""A type as written: its name in upper case and its sizes."""


class JsonCall(exp.Expression):
    """JSON_VALUE or JSON_QUERY (`this`) of a document and a path (`expressions`); `rules` is a `JsonRules`."""

    arg_types: ClassVar[dict[str, bool]] = {"this": True, "expressions": True, "rules": True}


class JsonTable(exp.Expression):
    """JSON_TABLE(this, path COLUMNS (...)); `columns` is a tuple of `JsonColumn`."""

    arg_types: ClassVar[dict[str, bool]] = {"this": True, "path": True, "columns": True, "strict": False}


class Regexpr(exp.Expression):
    """One of the ..._REGEXPR functions (`this`) of a pattern and a subject (`expressions`)."""

    arg_types: ClassVar[dict[str, bool]] = {
        "this": True,
        "expressions": True,
        "flag": False,
        "replacement": False,
        "start": False,
        "occurrence": False,
        "group": False,
        "after": False,
    }


class LikeRegexpr(exp.Expression, exp.Predicate):
    """this LIKE_REGEXPR expression FLAG flag."""

    arg_types: ClassVar[dict[str, bool]] = {"this": True, "expression": True, "flag": False}


@dataclass(frozen=True, slots=True)
class JsonRules:
    """The result type and wrapper of a JSON function, and its result when the value is empty or an error: NULL, ERROR,
    a DEFAULT (the text of a literal), EMPTY ARRAY or EMPTY OBJECT."""

    returning: TypeText | None = None
    wrapper: str = "WITHOUT"
    on_empty: str = "NULL"
    on_error: str = "NULL"
    empty_default: str | None = None
    error_default: str | None = None


@dataclass(frozen=True, slots=True)
class JsonColumn:
    """A column of JSON_TABLE; FOR ORDINALITY has no `type`, and NESTED PATH has `nested` and no name."""

    name: str = ""
    type: TypeText | None = None
    path: str = ""
    as_json: bool = False
    rules: JsonRules = JsonRules()
    nested: tuple[JsonColumn, ...] = ()


def type_text(parser: Parser) -> TypeText:
    name = parser._advance_any()
    if not name:
        parser.raise_error("Expected a type")
    sizes: list[int] = []
    if parser._match(TokenType.L_PAREN):
        sizes = [int(size.this) for size in parser._parse_csv(parser._parse_number) if size.this.isdigit()]
        _close(parser)
    return name.text.upper() if name else "", tuple(sizes)


def _close(parser: Parser) -> None:
    if not parser._match(TokenType.R_PAREN):
        parser.raise_error("Expected )")


def _open(parser: Parser) -> None:
    if not parser._match(TokenType.L_PAREN):
        parser.raise_error("Expected (")


def _comma(parser: Parser) -> None:
    if not parser._match(TokenType.COMMA):
        parser.raise_error("Expected ,")


def _string(parser: Parser) -> str:
    if not parser._match(TokenType.STRING):
        parser.raise_error("Expected a string")
    return str(parser._prev.text)


# --- JSON -------------------------------------------------------------------------------------------------------------


def json_call(name: str) -> Callable[[Parser], exp.Expr]:
    def parse(parser: Parser) -> exp.Expr:
        document = parser._parse_bitwise()
        _comma(parser)
        path = parser._parse_bitwise()
        scalar = name == "JSON_VALUE"
        returning = type_text(parser) if parser._match_text_seq("RETURNING") else None
        rules = _behaviour(parser, returning, scalar=scalar)
        return parser.expression(JsonCall(this=name, expressions=[document, path], rules=rules))

    return parse


def _behaviour(parser: Parser, returning: TypeText | None, *, scalar: bool) -> JsonRules:
    wrapper = "WITHOUT" if scalar else _wrapper(parser)
    found: dict[str, tuple[str, str | None]] = {}
    while (act := _act(parser, scalar=scalar)) is not None:
        if not parser._match_text_seq("ON"):
            parser.raise_error("Expected ON EMPTY or ON ERROR")
        word = "EMPTY" if parser._match_text_seq("EMPTY") else "ERROR" if parser._match_text_seq("ERROR") else ""
        if not word or word in found:
            parser.raise_error("Expected ON EMPTY and ON ERROR, once each")
        found[word] = act
    on_empty, on_error = found.get("EMPTY", ("NULL", None)), found.get("ERROR", ("NULL", None))
    return JsonRules(returning, wrapper, on_empty[0], on_error[0], on_empty[1], on_error[1])


def _act(parser: Parser, *, scalar: bool) -> tuple[str, str | None] | None:
    for word in ("NULL", "ERROR"):
        if parser._match_text_seq(word):
            return word, None
    if scalar and parser._match_text_seq("DEFAULT"):
        return "DEFAULT", _literal(parser)
    if not scalar and parser._match_text_seq("EMPTY"):
        for word in ("ARRAY", "OBJECT"):
            if parser._match_text_seq(word):
                return f"EMPTY {word}", None
        parser.raise_error("Expected EMPTY ARRAY or EMPTY OBJECT")
    return None


def _literal(parser: Parser) -> str:
    sign = "-" if parser._match(TokenType.DASH) else ""
    if not (parser._match(TokenType.NUMBER) or (not sign and parser._match(TokenType.STRING))):
        parser.raise_error("Expected a literal after DEFAULT")
    return sign + str(parser._prev.text)


def _wrapper(parser: Parser) -> str:
    if parser._match_text_seq("WITHOUT"):
        word = "WITHOUT"
    elif parser._match_text_seq("WITH"):
        word = "CONDITIONAL" if parser._match_text_seq("CONDITIONAL") else "WITH"
        parser._match_text_seq("UNCONDITIONAL")
    else:
        return "WITHOUT"
    parser._match_text_seq("ARRAY")
    if not parser._match_text_seq("WRAPPER"):
        parser.raise_error("Expected WRAPPER")
    return word


def json_table(parser: Parser) -> exp.Expr:
    document = parser._parse_bitwise()
    _comma(parser)
    path = parser._parse_bitwise()
    columns = _columns(parser)
    strict = bool(parser._match_text_seq("ERROR", "ON", "ERROR"))
    if not strict:
        parser._match_text_seq("EMPTY", "ON", "ERROR")
    return parser.expression(JsonTable(this=document, path=path, columns=columns, strict=strict))


def _columns(parser: Parser) -> tuple[JsonColumn, ...]:
    if not parser._match_text_seq("COLUMNS"):
        parser.raise_error("Expected COLUMNS")
    _open(parser)
    found = [_column(parser)]
    while parser._match(TokenType.COMMA):
        found.append(_column(parser))
    _close(parser)
    return tuple(found)


def _column(parser: Parser) -> JsonColumn:
    if parser._match_text_seq("NESTED"):
        parser._match_text_seq("PATH")
        path = _string(parser)
        return JsonColumn(path=path, nested=_columns(parser))
    node = parser._parse_id_var(any_token=True)
    if not isinstance(node, exp.Identifier):
        parser.raise_error("Expected a column name")
        return JsonColumn()
    name = str(node.this) if node.quoted else str(node.this).upper()
    if parser._match_text_seq("FOR", "ORDINALITY"):
        return JsonColumn(name)
    kind = type_text(parser)
    as_json = bool(parser._match_text_seq("FORMAT", "JSON"))
    if not parser._match_text_seq("PATH"):
        parser.raise_error("Expected PATH")
    path = _string(parser)
    return JsonColumn(name, kind, path, as_json, _behaviour(parser, kind, scalar=not as_json))


# --- regular expressions ----------------------------------------------------------------------------------------------


def regexpr(name: str) -> Callable[[Parser], exp.Expr]:
    def parse(parser: Parser) -> exp.Expr:
        after = bool(name == "LOCATE_REGEXPR" and parser._match_text_seq("AFTER"))
        if name == "LOCATE_REGEXPR" and not after:
            parser._match_text_seq("START")
        pattern = parser._parse_bitwise()
        flag = parser._parse_bitwise() if parser._match_text_seq("FLAG") else None
        if not parser._match(TokenType.IN):
            parser.raise_error("Expected IN")
        subject = parser._parse_bitwise()
        clauses: dict[str, Any] = {}
        for word, argument in _REGEXPR_CLAUSES[name].items():
            if parser._match_text_seq(word):
                everything = word == "OCCURRENCE" and name == "REPLACE_REGEXPR" and parser._match_text_seq("ALL")
                clauses[argument] = exp.Literal.number(0) if everything else parser._parse_bitwise()
        return parser.expression(Regexpr(this=name, expressions=[pattern, subject], flag=flag, after=after, **clauses))

    return parse


_PLACE = {"FROM": "start", "OCCURRENCE": "occurrence", "GROUP": "group"}
_REGEXPR_CLAUSES: dict[str, dict[str, str]] = {
    "REPLACE_REGEXPR": {"WITH": "replacement", "FROM": "start", "OCCURRENCE": "occurrence"},
    "SUBSTRING_REGEXPR": _PLACE,
    "SUBSTR_REGEXPR": _PLACE,
    "LOCATE_REGEXPR": _PLACE,
    "OCCURRENCES_REGEXPR": {"FROM": "start"},
}


def like_regexpr(parser: Parser, this: exp.Expr | None) -> exp.Expr:
    pattern = parser._parse_bitwise()
    flag = parser._parse_bitwise() if parser._match_text_seq("FLAG") else None
    return parser.expression(LikeRegexpr(this=this, expression=pattern, flag=flag))


FUNCTION_PARSERS: dict[str, Callable[[Any], exp.Expr]] = {
    "JSON_VALUE": json_call("JSON_VALUE"),
    "JSON_QUERY": json_call("JSON_QUERY"),
    "JSON_TABLE": json_table,
    **{name: regexpr(name) for name in _REGEXPR_CLAUSES},
}
