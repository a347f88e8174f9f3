"""The supported part of sqlglot's syntax. sqlglot accepts more than HANA and stores it as extra arguments of ordinary
nodes (a negated LIKE, a QUALIFY). Anything not listed is rejected, so that nothing is ignored."""

from __future__ import annotations

from sqlglot import exp

from hana_emulator.errors import not_supported

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


def check(tree: exp.Expr) -> None:
    """Raise HanaError 7 for the first unsupported node or argument."""
    for node in tree.walk():
        name = type(node).__name__
        if name not in _ARGUMENTS:
            raise not_supported(name.upper())
        extra = [argument for argument, value in node.args.items() if value and argument not in _ARGUMENTS[name]]
        if extra:
            raise not_supported(f"{extra[0].strip('_').upper()} in {name.upper()}")
