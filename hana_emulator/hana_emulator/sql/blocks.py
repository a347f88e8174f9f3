"""Rewrite an anonymous block, DO BEGIN ... END, as one statement: its table variables become derived tables.

Supported are queries and MAP_MERGE that are assigned to variables, and at the end one statement that writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from sqlglot.tokenizer_core import Token, TokenType

from hana_emulator.errors import HanaError, not_supported
from hana_emulator.sql.catalog.catalog import Catalog
from hana_emulator.sql.language import dialect, limits
from hana_emulator.sql.language.names import hana_identifier, quoted_key
from hana_emulator.sql.language.reader import TokenReader, is_word

_WRITING = ("INSERT", "UPDATE", "DELETE", "MERGE", "UPSERT")


def as_statement(sql: str, catalog: Catalog, schema: str) -> str:
    """The statement that does what the block `sql` does; its parameters are numbered. Raises HanaError 7, 257, 328."""
    reader = TokenReader(sql, dialect.tokenize(sql, semicolons=True))
    reader.expect("DO")
    variables = _parameters(reader)
    reader.expect("BEGIN")
    written = ""
    while not reader.take("END"):
        tokens = _until_semicolon(reader)
        limits.check_variables(len(variables))
        if written:
            raise not_supported("a block in which a statement follows one that writes")
        if len(tokens) > 2 and is_word(tokens[1], "="):
            name = TokenReader(sql, tokens).identifier()
            variables[name] = _assigned(TokenReader(sql, tokens[2:]), variables, catalog, schema)
        elif any(is_word(tokens[0], word) for word in _WRITING):
            written = _replaced(sql, tokens, variables)
        else:
            raise not_supported(f"a block with {tokens[0].text[:20].upper()}")
    reader.take(";")
    reader.end()
    if not written:
        raise not_supported("a block that writes nothing")
    return written


def _parameters(reader: TokenReader) -> dict[str, str]:
    """Read (IN name type => value, ...); return the SQL text of each value."""
    found: dict[str, str] = {}
    if reader.take("("):
        while True:
            reader.take("IN")
            name = reader.identifier()
            reader.type()
            reader.expect("=>")
            value = reader.expression_text(frozenset())
            number = 1 + sum(text.startswith(":") for text in found.values())
            found[name] = f":{number}" if value == "?" else value
            if not reader.take(","):
                break
        reader.expect(")")
    return found


def _until_semicolon(reader: TokenReader) -> list[Token]:
    start = reader.index
    while not reader.peek(";"):
        if reader.at_end:
            raise reader.error(";")
        reader.index += 1
    tokens = reader.tokens[start : reader.index]
    reader.take(";")
    if not tokens:
        raise reader.error("a statement")
    return tokens


def _assigned(reader: TokenReader, variables: Mapping[str, str], catalog: Catalog, schema: str) -> str:
    """The derived table that a variable gets: of a query, or of MAP_MERGE(:variable, function(arguments))."""
    if not reader.take("MAP_MERGE", "("):
        return f"({_replaced(reader.sql, reader.tokens, variables)})"
    reader.expect(":")
    source = reader.identifier()
    if source not in variables:
        raise HanaError(467, f"cannot use parameter variable: {hana_identifier(source)}")
    reader.expect(",")
    name = reader.name()
    reader.expect("(")
    arguments = [] if reader.peek(")") else reader.several(lambda: reader.expression_text(frozenset()))
    reader.expect(")", ")")
    reader.end()
    function = catalog.objects.functions.get((name.schema or schema, name.name))
    if function is None:
        raise HanaError(328, f"invalid name of function or procedure: {hana_identifier(name.name)}")
    if len(arguments) != len(function.parameters):
        raise HanaError(316, f"wrong number of arguments in function invocation: {hana_identifier(name.name)}")
    # The function is evaluated for each row of the variable, so its query over DUMMY becomes a query over the variable.
    row = {**variables, source: quoted_key(source)}
    values = [_replaced(text, dialect.tokenize(text), row) for text in arguments]
    tokens = dialect.tokenize(function.query)
    if not (len(tokens) > 2 and is_word(tokens[-2], "FROM") and is_word(tokens[-1], "DUMMY")):
        raise not_supported("MAP_MERGE with a function that reads more than DUMMY")
    query = _replaced(function.query, tokens[:-1], dict(zip(function.parameters, values, strict=True)))
    return f"({query} {variables[source]} AS {quoted_key(source)})"


def _replaced(sql: str, tokens: Sequence[Token], values: Mapping[str, str]) -> str:
    """The text of `tokens` with each `:name` replaced by its value. Raises HanaError 467 for an unknown name."""
    pieces, position = [], tokens[0].start
    for colon, token in pairwise(tokens):
        if colon.token_type is not TokenType.COLON or token.start != colon.end + 1:
            continue
        name = TokenReader(sql, [token]).identifier()
        if name not in values:
            raise HanaError(467, f"cannot use parameter variable: {hana_identifier(name)}")
        pieces += [sql[position : colon.start], values[name]]
        position = token.end + 1
    pieces.append(sql[position : tokens[-1].end + 1])
    limits.check_block(sum(map(len, pieces)))
    return "".join(pieces)
