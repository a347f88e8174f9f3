"""Parse the body of a trigger, between BEGIN and END: INSERT, UPDATE, DELETE, and IF around them.

An IF becomes a condition of each statement inside. Names are not resolved here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlglot import exp
from sqlglot.tokenizer_core import Token, TokenType

from hana_emulator.errors import HanaError, not_supported, syntax_error
from hana_emulator.sql.language import dialect
from hana_emulator.sql.language.reader import TokenReader, is_word
from hana_emulator.sql.query import expressions

# In characters. The three limits bound the conditions, which are repeated for each statement of an IF
LONGEST_BODY = 50_000
_MOST_PARTS = 200  # Statements and conditions of one body
_DEEPEST = 16
_STATEMENTS = ("INSERT", "UPDATE", "DELETE")
_LONGEST_QUOTED = 20


def row_name(variable: str) -> str:
    """The name of the source with a transition variable's columns; no table can have this name."""
    return f":{variable}"


def statements(body: str, rows: Collection[str]) -> list[exp.Expr]:
    """Parse the statements to syntax trees. For each name in `rows`, `:name.column` becomes a column of the source
    `row_name(name)`. Raises HanaError 257, 467, 2048, and 7 for unsupported SQLScript."""
    if len(body) > LONGEST_BODY:
        raise HanaError(2048, f"column store error: the body of a trigger is longer than {LONGEST_BODY} characters")
    reading = _Body(body, rows)
    reading.block((), 0)
    reading.reader.end()
    if not reading.found:
        raise syntax_error("a trigger needs a statement between BEGIN and END")
    return reading.found


class _Body:
    def __init__(self, text: str, rows: Collection[str]) -> None:
        self.reader = TokenReader(text, dialect.tokenize(text, semicolons=True))
        self.found: list[exp.Expr] = []
        self._rows = rows
        self._parts = 0

    def block(self, guards: Sequence[exp.Expr], depth: int) -> None:
        """Read statements until END, ELSE or ELSEIF."""
        reader = self.reader
        while not reader.at_end and not any(reader.peek(word) for word in ("END", "ELSE", "ELSEIF")):
            if reader.take("IF"):
                self._branches(guards, depth + 1)
            else:
                self._statement(guards)
            reader.expect(";")

    def _branches(self, guards: Sequence[exp.Expr], depth: int) -> None:
        if depth > _DEEPEST:
            raise not_supported(f"IF nested more than {_DEEPEST} times")
        before = list(guards)
        while True:
            condition = self._condition()
            self.block((*before, condition), depth)
            # ELSE runs if the condition is false or unknown.
            zero, one = exp.Literal.number(0), exp.Literal.number(1)
            case = exp.Case(ifs=[exp.If(this=condition.copy(), true=zero)], default=one)
            before.append(exp.EQ(this=case, expression=one.copy()))
            if self.reader.take("ELSEIF"):
                continue
            if self.reader.take("ELSE"):
                self.block(before, depth)
            self.reader.expect("END", "IF")
            return

    def _count(self) -> None:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise HanaError(2048, f"column store error: more than {_MOST_PARTS} statements and conditions in a trigger")

    def _condition(self) -> exp.Expr:
        self._count()
        start, cases = self.reader.index, 0
        while not self.reader.at_end and not (self.reader.peek("THEN") and not cases):
            cases += self.reader.peek("CASE") - self.reader.peek("END")
            self.reader.index += 1
        tokens = self.reader.tokens[start : self.reader.index]
        if not tokens:
            raise self.reader.error("a condition")
        self.reader.expect("THEN")
        tree = dialect.parse_condition(f"({self._text(tokens)})")
        if tree.find(exp.Query) is not None or expressions.mentions_sequence(tree):
            raise not_supported("a subquery or a sequence in an IF of a trigger")
        return tree

    def _statement(self, guards: Sequence[exp.Expr]) -> None:
        self._count()
        start = self.reader.index
        while not self.reader.at_end and not self.reader.peek(";"):
            self.reader.index += 1
        tokens = self.reader.tokens[start : self.reader.index]
        if not tokens:
            raise self.reader.error("a statement")
        if not any(is_word(tokens[0], word) for word in _STATEMENTS):
            raise not_supported(f"{tokens[0].text.upper()[:_LONGEST_QUOTED]} in the body of a trigger")
        self.found.append(_guarded(dialect.parse(self._text(tokens)), guards))

    def _text(self, tokens: Sequence[Token]) -> str:
        pieces, position, index = [], tokens[0].start, 0
        while index < len(tokens):
            token = tokens[index]
            if dialect.is_parameter(token):
                raise HanaError(467, "cannot use parameter variable: a trigger has no parameters")
            if token.token_type is TokenType.COLON:
                variable, column = self._transition(tokens[index + 1 : index + 4])
                pieces += [self.reader.sql[position : token.start], f"{_quoted(row_name(variable))}.{_quoted(column)}"]
                index += 3
                position = tokens[index].end + 1
            index += 1
        return "".join([*pieces, self.reader.sql[position : tokens[-1].end + 1]])

    def _transition(self, tokens: Sequence[Token]) -> tuple[str, str]:
        reader = TokenReader(self.reader.sql, list(tokens))
        variable = reader.identifier()
        if variable not in self._rows:
            raise not_supported(f"the variable :{variable[:_LONGEST_QUOTED]}, which REFERENCING does not name")
        reader.expect(".")
        return variable, reader.identifier()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _guarded(tree: exp.Expr, guards: Sequence[exp.Expr]) -> exp.Expr:
    if not guards:
        return tree
    if isinstance(tree, exp.Insert):
        # Limit the rows that an INSERT writes to those for which the guards hold.
        condition = _all(guards)
        if isinstance(tree.expression, exp.Values):
            if len(tree.expression.expressions) != 1:
                raise syntax_error("INSERT takes one row of VALUES")
            row = tree.expression.expressions[0]
            items = row.expressions if isinstance(row, exp.Tuple) else [row]
            table: exp.Expr = exp.Table(this=exp.to_identifier("DUMMY"), db=exp.to_identifier("SYS"))
        else:
            items = [exp.Star()]
            table = exp.Subquery(this=tree.expression, alias=exp.TableAlias(this=exp.to_identifier("SOURCE")))
        tree.set(
            "expression", exp.Select(expressions=items, from_=exp.From(this=table), where=exp.Where(this=condition))
        )
    else:
        where = tree.args.get("where")
        own = [exp.Paren(this=where.this.copy())] if where is not None else []
        tree.set("where", exp.Where(this=_all([*own, *guards])))
    return tree


def _all(conditions: Sequence[exp.Expr]) -> exp.Expr:
    joined = conditions[0].copy()
    for condition in conditions[1:]:
        joined = exp.And(this=joined, expression=condition.copy())
    return joined
