"""The template language: `{COLUMN}` and literal text, which is removed around empty columns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from connector.document.values import clean
from connector.errors import ConfigurationError

_TOKEN = re.compile(
    r'\{\{|\}\}|\{\s*"(?P<quoted>(?:[^"]|"")+)"\s*\}|\{\s*(?P<plain>[^{}"\s](?:[^{}"]*[^{}"\s])?)\s*\}|[^{}]+|[{}]'
)
_SEPARATORS = r"[\s.,;:|/·•–—-]"
_LEADING = re.compile(rf"^{_SEPARATORS}*")
_TRAILING = re.compile(rf"{_SEPARATORS}*$")
# Words with whole brackets; other brackets belong to the columns beside them.
_WORDS = r"(?:[^.,;|\n()\[\]<>]|\([^()]*\)|\[[^\[\]]*\]|<[^<>]*>)*"
_LABEL = re.compile(rf"[^\s.,;|()\[\]<>]{_WORDS}[:=]\s*$")
_UNIT = re.compile(rf"^{_WORDS}")
_BRACKETS = {"(": ")", "[": "]", "<": ">"}
_OPENING, _CLOSING = tuple(_BRACKETS), tuple(_BRACKETS.values())
# In place of brackets without a counterpart, which are words, as in "a)", "->" and "<=". `clean` removes these.
_WORD_FOR = dict(zip((*_OPENING, *_CLOSING), "\1\2\3\4\5\6", strict=True))
_BRACKET_FOR = str.maketrans({word: bracket for bracket, word in _WORD_FOR.items()})


class Template:
    """A parsed template: n columns (`slots`, including repeated ones) between n + 1 literal texts."""

    def __init__(self, slots: Sequence[str], literals: Sequence[str]) -> None:
        self.slots = tuple(slots)
        self.literals = tuple(literals)
        self._texts = _with_paired_brackets(self.literals)
        self.columns = tuple(dict.fromkeys(slots))  # distinct, in order of first use
        self._plans: dict[tuple[bool, ...], str] = {}

    @classmethod
    def parse(cls, text: str) -> Template:
        """Parse `{COL}`, or `{"/BIC/TXT"}` for names with braces, quotes (doubled) or outer blanks. `{{` and `}}` are
        literal braces. Raises ConfigurationError with the position, counted from 1."""
        slots: list[str] = []
        literals = [""]
        for token in _TOKEN.finditer(text):
            quoted, plain = token.group("quoted"), token.group("plain")
            if quoted is not None or plain is not None:
                slots.append(plain if quoted is None else quoted.replace('""', '"'))
                literals.append("")
            elif token.group() in "{}":
                raise ConfigurationError(
                    f"template, position {token.start() + 1}: write a column as {{MAKTX}}, with an odd name as "
                    '{"/BIC/TXT"}, and a literal brace as {{ or }}'
                )
            else:
                literals[-1] += {"{{": "{", "}}": "}"}.get(token.group(), clean(token.group()))
        if not slots:
            raise ConfigurationError("the template names no column: write one in braces, {MAKTX}")
        return cls(slots, literals)

    def render(self, values: Sequence[str]) -> str:
        """Return the text for one formatted value per slot; "" if all are empty. An empty slot also removes its
        separators, its brackets, and its label with the text up to the next punctuation ("Weight: {BRGEW} kg, ") or the
        next column's bracket."""
        mask = tuple(map(bool, values))
        if (plan := self._plans.get(mask)) is None:
            plan = self.pattern(mask)
        return (plan % tuple(filter(None, values))).strip()

    def render_all(self, columns: Sequence[Sequence[str]]) -> list[str]:
        """Return `render` of each row. `columns`: the formatted values of each slot."""
        rows = zip(*columns, strict=True)
        if all(map(all, columns)):
            plan = self.pattern((True,) * len(columns))
            return [(plan % row).strip() for row in rows]
        return list(map(self.render, rows))

    def pattern(self, mask: tuple[bool, ...]) -> str:
        """Return a %-pattern of the literal texts around non-empty columns; cached per combination."""
        if len(self._plans) >= 1024:  # in practice only few combinations occur
            self._plans.clear()
        kept = [self._texts[0]]
        for position, (filled, literal) in enumerate(zip(mask, self._texts[1:], strict=True)):
            if filled:
                kept.append(literal)
            else:
                kept[-1] = _join(kept[-1], literal, first=len(kept) == 1, last=not any(mask[position:]))
        plan = "%s".join(literal.replace("%", "%%") for literal in kept) if any(mask) else ""
        self._plans[mask] = plan = plan.translate(_BRACKET_FOR)
        return plan


def _with_paired_brackets(literals: Sequence[str]) -> list[str]:
    """Return the texts with brackets only where the template has both of a pair, and `_WORD_FOR` the others."""
    text = list("\0".join(literals))
    for opening, closing in _BRACKETS.items():
        unpaired: list[int] = []
        for place, char in enumerate(text):
            if char == closing and unpaired and text[unpaired[-1]] == opening:
                unpaired.pop()
            elif char in (opening, closing):
                unpaired.append(place)
        for place in unpaired:
            text[place] = _WORD_FOR[text[place]]
    return "".join(text).split("\0")


def _join(before: str, after: str, *, first: bool, last: bool) -> str:
    """Return what remains of the texts on both sides of an empty column. `first`, `last`: no filled column precedes or
    follows them."""
    without_label = _LABEL.sub("", before)
    if without_label != before:
        before, after = without_label, _UNIT.sub("", after)
    opening, closing = before.rstrip(), after.lstrip()
    while opening and closing and _BRACKETS.get(opening[-1]) == closing[0]:
        before, after = opening[:-1], closing[1:]
        opening, closing = before.rstrip(), after.lstrip()
    words = _TRAILING.sub("", before, count=1)
    rest = _LEADING.sub("", after, count=1)
    separators = before[len(words) :], after[: len(after) - len(rest)]
    if (first and not words) or words.endswith(_OPENING) or rest.startswith(_CLOSING):
        return words + rest
    if last and not rest:
        return words + separators[1]
    # Keep the stronger separator: line break, then full stop or semicolon, then other marks, then blank.
    stronger = max(
        separators,
        key=lambda text: 4 if "\n" in text else 3 if set(text) & set(".;") else 2 if text.strip() else len(text[:1]),
    )
    return words + stronger + rest
