"""Split a search text into words, for every store. Only letters and digits remain, so words have no query syntax."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

MAX_WORDS = 16  # words of one search text; later words are ignored
MAX_LENGTH = 200  # characters of one word
COMMON_FROM = 1000  # texts; in a smaller collection no word is too common
COMMON_SHARE = 0.2  # A word in a larger share of the texts adds little and costs most: "the", "der"
PADDED = (10, 12, 18, 40)
"""Digits to which SAP pads numbers with zeros: partners and documents, orders, materials, materials in S/4HANA."""
SATURATION, LENGTH_SHARE = 1.2, 0.75
"""BM25's k1 and b."""

# Separators of words. Other characters (M-4711/2, 2.5, A_B) join the parts of one word.
_BETWEEN = re.compile(r"[\s;()\[\]{}<>!?\"|=*]+|,(?!\d)|(?<!\d),")
TRANSCRIPTION = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss"})
_UMLAUT = re.compile("ae|oe|(?<![aeq])ue")  # not in neue, Steuer, Frequenz
_PART = re.compile(r"(?:[^\W_][\u0300-\u036f]*)+")


@dataclass(frozen=True, slots=True)
class Word:
    """One word and its spellings. Each spelling is one or more parts of letters and digits, separated by a blank. It
    matches a text that has these parts as adjacent whole words."""

    alternatives: tuple[str, ...]


def words(text: str) -> tuple[Word, ...]:
    """Return the distinct words of `text` in order, at most MAX_WORDS; () if it has no letters or digits."""
    found: dict[str, Word] = {}
    for piece in _BETWEEN.split(unicodedata.normalize("NFC", text)):
        word = " ".join(_PART.findall(piece[:MAX_LENGTH]))
        if word:
            found.setdefault(word.casefold(), Word(_alternatives(word)))
        if len(found) == MAX_WORDS:
            break
    return tuple(found.values())


def _alternatives(word: str) -> tuple[str, ...]:
    """Return spellings with and without leading zeros, and with and without umlauts, because either may be stored or
    searched."""
    if not (word.isascii() and word.isdigit()):
        written = word.lower()
        others = [
            written.translate(TRANSCRIPTION),
            _UMLAUT.sub(lambda found: "äöü"["aou".index(found[0][0])], written),
        ]
        return (word, *(each for each in others if each != written))
    plain = word.lstrip("0") or "0"
    if len(plain) < 3 and plain == word:
        return (word,)
    return tuple(dict.fromkeys([plain, word, *(plain.zfill(length) for length in PADDED)]))


def as_key_value(number: str) -> tuple[str, ...]:
    """Return the forms in which a row's id (a JSON array) may contain this number (letters and digits) as a key value:
    text with or without leading zeros, or an integer."""
    texts = tuple(f'"{each}"' for each in _alternatives(number))
    plain = number.lstrip("0")
    if not (plain.isascii() and plain.isdigit()):
        return texts
    return (*texts, *(f"{before}{plain}{after}" for before in "[," for after in ",]"))


def weight(count: int, texts: int) -> float:
    """Return the most that a word in `count` of `texts` texts can add to a score: k1 + 1 times BM25's inverse
    document frequency, in the form that is never negative."""
    return math.log1p((texts - count + 0.5) / (count + 0.5)) * (SATURATION + 1)


def most_common(texts: int) -> int:
    """Return the largest number of texts, out of `texts`, in which a word worth searching may occur."""
    return texts if texts < COMMON_FROM else int(texts * COMMON_SHARE)


def worth_it(found: Sequence[Word], counts: Sequence[int], texts: int) -> list[int]:
    """Return the positions of the words to search, given that `counts` of `texts` texts contain them. Omits common
    words unless all are common."""
    limit = most_common(texts)
    rare = [place for place in range(len(found)) if counts[place] <= limit]
    return rare or list(range(len(found)))
