"""The template language: `{COLUMN}` and literal text, which is removed around empty columns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from connector.errors import ConfigurationError

_TOKEN = re.compile(
    r'\{\{|\}\}|\{\s*"(?P<quoted>(?:[^"]|"")+)"\s*\}|\{\s*(?P<plain>[^{}"\s](?:[^{}"]*[^{}"\s])?)\s*\}|[^{}]+|[{}]'
)
_SEPARATORS = r"[\s.,;:|/·•–—-]"
_LEADING = re.compile(rf"^{_SEPARATORS}*")
_TRAILING = re.compile(rf"{_SEPARATORS}*$")
_LABEL = re.compile(r"[^\s.,;|(\[][^.,;|\n(\[]*[:=]\s*$")
_UNIT = re.compile(r"^[^.,;|\n)\]]*")
_BRACKETS = {"(": ")", "[": "]", "<": ">"}
_OPENING, _CLOSING = tuple(_BRACKETS), tuple(_BRACKETS.values())
_SHOWN = 60  # characters of a template to show in an error
_PLANS = 1024  # cached combinations of empty columns; few of all possible ones occur


class Template:
    """A parsed template: n columns (`slots`, including repeated ones) between n + 1 literal texts."""

    __slots__ = ("_plans", "columns", "literals", "slots")

    def __init__(self, slots: Sequence[str], literals: Sequence[str]) -> None:
        self.slots = tuple(slots)
        self.literals = tuple(literals)
        self.columns = tuple(dict.fromkeys(slots))  # distinct, in order of first use
        self._plans: dict[tuple[bool, ...], str] = {}

    @classmethod
    def parse(cls, text: str) -> Template:
        """Parse `{COL}`, or `{"/BIC/TXT"}` for names with braces, quotes (doubled) or outer blanks. `{{` and `}}` are
        literal braces. Raises ConfigurationError with the position, counted from 1."""
        slots: list[str] = []
        literals = [""]
        for token in _TOKEN.finditer(text):
            name = _name(token)
            if name is not None:
                slots.append(name)
                literals.append("")
            elif token.group() in "{}":
                raise ConfigurationError(_complaint(text, token.start()))
            else:
                literals[-1] += {"{{": "{", "}}": "}"}.get(token.group(), token.group())
        if not slots:
            raise ConfigurationError("the template names no column: write one in braces, {MAKTX}")
        return cls(slots, literals)

    def render(self, values: Sequence[str]) -> str:
        """Return the text for one formatted value per slot; "" if all are empty. An empty slot also removes its
        separators, its brackets, and its label with the text up to the next mark ("Weight: {BRGEW} kg, ")."""
        mask = tuple(map(bool, values))
        plan = self._plans.get(mask)
        if plan is None:
            plan = self._plan(mask)
        return (plan % tuple(value for value in values if value)).strip()

    def _plan(self, mask: tuple[bool, ...]) -> str:
        """Return a %-pattern of the literal texts around non-empty columns; cached per combination."""
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        literals = list(self.literals)
        kept = [literals[0]]
        for position, filled in enumerate(mask):
            if filled:
                kept.append(literals[position + 1])
            else:
                kept[-1] = _join(
                    kept[-1],
                    literals[position + 1],
                    first=len(kept) == 1,
                    last=not any(mask[position:]),
                )
        plan = "%s".join(literal.replace("%", "%%") for literal in kept) if any(mask) else ""
        self._plans[mask] = plan
        return plan


def _name(token: re.Match[str]) -> str | None:
    quoted, plain = token.group("quoted"), token.group("plain")
    return quoted.replace('""', '"') if quoted is not None else plain


def _complaint(text: str, position: int) -> str:
    where = f"template, position {position + 1}"
    if text[position] == "}":
        return f"{where}: a single }}; write }}}} for a literal brace"
    end = text.find("}", position)
    if end < 0:
        return f"{where}: this {{ is never closed; write {{{{ for a literal brace"
    inside = text[position + 1 : end]
    if not inside.strip():
        return f"{where}: no column name between the braces"
    inside = inside if len(inside) <= _SHOWN else f"{inside[:_SHOWN]}..."
    return f'{where}: invalid column name {inside!r}; put odd names in double quotes, {{"/BIC/TXT"}}'


def _join(before: str, after: str, *, first: bool, last: bool) -> str:
    """Return what remains of the texts on both sides of an empty column. `first`, `last`: no filled column precedes or
    follows them."""
    without_label = _LABEL.sub("", before)
    if without_label != before:
        before, after = without_label, _UNIT.sub("", after)
    before, after = _without_brackets(before, after)
    words = _TRAILING.sub("", before, count=1)
    rest = _LEADING.sub("", after, count=1)
    separators = before[len(words) :], after[: len(after) - len(rest)]
    if (first and not words) or words.endswith(_OPENING) or rest.startswith(_CLOSING):
        return words + rest
    if last and not rest:
        return words + separators[1]
    return words + _stronger(*separators) + rest


def _without_brackets(before: str, after: str) -> tuple[str, str]:
    opening, closing = before.rstrip(), after.lstrip()
    if opening and closing and _BRACKETS.get(opening[-1]) == closing[0]:
        return opening[:-1], closing[1:]
    return before, after


def _stronger(one: str, other: str) -> str:
    """Return the stronger separator: line break, full stop, other marks, blank."""

    def strength(separator: str) -> int:
        if "\n" in separator:
            return 4
        if any(mark in separator for mark in ".;"):
            return 3
        return 2 if separator.strip() else len(separator[:1])

    return other if strength(other) > strength(one) else one
