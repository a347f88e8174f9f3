"""A search text as the words to look for, the same for every store: nothing of it is query syntax afterwards, because
only letters and digits are left. Knows no SQL and no index.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

MAX_WORDS = 16
"""Words of one text that are looked for; the others are left out."""
MAX_LENGTH = 200
"""Characters of one word."""
COMMON_FROM = 1000
"""Below so many texts every word counts."""
COMMON_SHARE = 0.2
"""A word that a larger share of the texts holds tells little, and costs most: "the", "der"."""
PADDED = (10, 12, 18, 40)
"""Digits to which SAP pads numbers with zeros: partners and documents, orders, materials, materials in S/4HANA."""
_SHORTEST_PADDED = 3
SATURATION, LENGTH_SHARE = 1.2, 0.75
"""BM25's k1 and b."""

# What people put between words. Other characters (M-4711/2, 2.5, A_B) join the parts of one word.
_BETWEEN = re.compile(r"[\s;()\[\]{}<>!?\"|=*]+|,(?!\d)|(?<!\d),")
_PART = re.compile(r"(?:[^\W_][\u0300-\u036f]*)+")


@dataclass(frozen=True, slots=True)
class Word:
    """One word and the other ways to write it. Each is one or more parts of letters and digits with a blank between
    them, to be found as whole words side by side."""

    alternatives: tuple[str, ...]


def words(text: str) -> tuple[Word, ...]:
    """The distinct words of `text` in order, at most MAX_WORDS; none when it holds no letter and no digit."""
    found: dict[str, Word] = {}
    for piece in _BETWEEN.split(unicodedata.normalize("NFC", text)):
        word = " ".join(_PART.findall(piece[:MAX_LENGTH]))
        if word:
            found.setdefault(word.casefold(), Word(_alternatives(word)))
        if len(found) == MAX_WORDS:
            break
    return tuple(found.values())


def _alternatives(word: str) -> tuple[str, ...]:
    """A number is stored with leading zeros or without, and looked for with or without."""
    if not (word.isascii() and word.isdigit()):
        return (word,)
    plain = word.lstrip("0") or "0"
    if len(plain) < _SHORTEST_PADDED and plain == word:
        return (word,)
    return tuple(dict.fromkeys([plain, word, *(plain.zfill(length) for length in PADDED)]))


def as_key_value(number: str) -> tuple[str, ...]:
    """What stands in a row's id, a JSON array, where a value of its key is this number (letters and digits): a text,
    with leading zeros or without, or an integer. Any one of them is enough."""
    texts = tuple(f'"{each}"' for each in _alternatives(number))
    plain = number.lstrip("0")
    if not (plain.isascii() and plain.isdigit()):
        return texts
    return (*texts, *(f"{before}{plain}{after}" for before in "[," for after in ",]"))


def weight(count: int, texts: int) -> float:
    """The most that a word adds to a score, when `count` of `texts` texts hold it: k1 + 1 times BM25's inverse document
    frequency, in the form that is never below 0."""
    return math.log1p((texts - count + 0.5) / (count + 0.5)) * (SATURATION + 1)


def most_common(texts: int) -> int:
    """How many of `texts` texts may hold a word that is worth looking for."""
    return texts if texts < COMMON_FROM else int(texts * COMMON_SHARE)


def worth_it(found: Sequence[Word], counts: Sequence[int], texts: int) -> list[int]:
    """Places of the words to look for, when `counts` of `texts` texts hold them: the common ones are left out, unless
    there is no other."""
    limit = most_common(texts)
    rare = [place for place in range(len(found)) if counts[place] <= limit]
    return rare or list(range(len(found)))
