"""JSON_VALUE and JSON_QUERY with their clauses, and the ..._REGEXPR functions: from syntax trees to SQLite calls."""

from __future__ import annotations

from hana_emulator.sql import calls, expressions
from hana_emulator.sql.clauses import JsonCall, JsonRules, LikeRegexpr, Regexpr
from hana_emulator.sql.coercion import coerce, text_of
from hana_emulator.sql.datatypes import type_named
from hana_emulator.sql.names import literal
from hana_emulator.sql.scope import Binding, Bound, Scope
from hana_emulator.types import BOOLEAN, DEFAULT_PARAMETER, INTEGER, NCLOB, HanaType


def rules_of(rules: JsonRules, *, scalar: bool) -> list[str | None]:
    """The rules in the order that `builtin.json_rules` takes them; no wrapper for a scalar."""
    wrapper = "" if scalar else rules.wrapper
    return [wrapper, rules.on_empty, rules.on_error, rules.empty_default, rules.error_default]


def bind_json(binding: Binding, scope: Scope, node: JsonCall) -> Bound:
    name, rules = str(node.this), node.args["rules"]
    document, path = (
        expressions.bind(binding, scope, part, kind)
        for part, kind in zip(node.expressions, (DEFAULT_PARAMETER, DEFAULT_PARAMETER), strict=True)
    )
    if rules == JsonRules():
        return calls.by_signature(name, [document, path])
    kind = type_named(*rules.returning) if rules.returning is not None else DEFAULT_PARAMETER
    written = ", ".join(
        "NULL" if rule is None else literal(rule) for rule in rules_of(rules, scalar=name == "JSON_VALUE")
    )
    size = f"{int(kind.code)}, {kind.length}, {kind.scale}"
    sql = f"hana_json_by_rules({text_of(document).sql}, {text_of(path).sql}, {size}, {written})"
    return Bound(sql, kind, constant=document.constant and path.constant)


# --- regular expressions ----------------------------------------------------------------------------------------------


def bind_regexpr(binding: Binding, scope: Scope, node: Regexpr) -> Bound:
    name = str(node.this).replace("SUBSTR_", "SUBSTRING_")
    pattern, subject = (text_of(expressions.bind(binding, scope, part, DEFAULT_PARAMETER)) for part in node.expressions)
    flag = _text(binding, scope, node, "flag")
    start = _number(binding, scope, node, "start", 1)
    arguments = [pattern, flag, subject]
    kind: HanaType = INTEGER
    if name == "REPLACE_REGEXPR":
        # Without OCCURRENCE every match is replaced.
        arguments += [_text(binding, scope, node, "replacement"), start, _number(binding, scope, node, "occurrence", 0)]
        kind = _longest(subject)
    else:
        arguments.append(start)
        if name != "OCCURRENCES_REGEXPR":
            arguments += [_number(binding, scope, node, "occurrence", 1), _number(binding, scope, node, "group", 0)]
        if name == "LOCATE_REGEXPR":
            arguments.append(Bound(str(int(bool(node.args.get("after")))), INTEGER, constant=True))
        if name == "SUBSTRING_REGEXPR":
            kind = _longest(subject)
    sql = f"hana_{name.lower()}({', '.join(argument.sql for argument in arguments)})"
    return Bound(sql, kind, constant=all(argument.constant for argument in arguments))


def bind_like_regexpr(binding: Binding, scope: Scope, node: LikeRegexpr) -> Bound:
    text, pattern = (
        text_of(expressions.bind(binding, scope, part, DEFAULT_PARAMETER)) for part in (node.this, node.expression)
    )
    flag = _text(binding, scope, node, "flag")
    sql = f"(hana_like_regexpr({text.sql}, {pattern.sql}, {flag.sql}) = 1)"
    return Bound(sql, BOOLEAN, constant=text.constant and pattern.constant and flag.constant)


def _longest(subject: Bound) -> HanaType:
    return NCLOB if subject.type is not None and subject.type.code is NCLOB.code else DEFAULT_PARAMETER


def _text(binding: Binding, scope: Scope, node: Regexpr | LikeRegexpr, clause: str) -> Bound:
    part = node.args.get(clause)
    if part is None:
        return Bound("''", DEFAULT_PARAMETER, nullable=False, constant=True)
    return text_of(expressions.bind(binding, scope, part, DEFAULT_PARAMETER))


def _number(binding: Binding, scope: Scope, node: Regexpr, clause: str, default: int) -> Bound:
    part = node.args.get(clause)
    if part is None:
        return Bound(str(default), INTEGER, nullable=False, constant=True)
    return coerce(expressions.bind(binding, scope, part, INTEGER), INTEGER)
