"""Compute the share of a search text's words that a row contains, ignoring function words. Knows English and German
endings and compounds.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from connector.stores.words import TRANSCRIPTION, words

_ENGLISH = """
a about after again against all also am an and any are as at be because been before being between both but by can
could did do does doing for from get had has have having he her here him his how i if in into is it its just me more
most my need no not now of off on once only or other our out over own please she should so some somebody someone
something such than that the their them then there these they thing this those through to too under until up us very
was we were what when where which while who whom whose why will with without would you your
"""
_GERMAN = """
aber alle allem allen aller alles als also am an auch auf aus bei beim bin bis bist bitte da damit dann das dass dem
den denn der des die dies diese diesem diesen dieser dieses doch dort du durch ein eine einem einen einer eines er
es etwas für gegen gibt hab habe haben hat ich ihm ihn ihnen ihr ihre im in ist ja jede jedem jeden jeder jedes
jemand kann kein keine können man mehr mein mit muss müssen nach nicht nichts noch nun nur ob oder ohne sehr sein
seine sich sie sind so soll um und uns unser unter vom von vor war waren was wegen weil welche welcher wenn wer
werden wie wieder will wir wird wo zu zum zur
"""
_ENDINGS = (  # longest first
    *("lichen", "ungen", "ingly", "liche"),
    *("ings", "lich"),
    *("ing", "ung", "ern", "ers"),
    *("ly", "ed", "er", "en", "es", "em"),
    *("e", "n", "s"),
)
_PART = re.compile(r"[^\W_]+")
_SHORTEST_STEM = 4
_SHORTEST_BEGINNING = 5  # letters of a stem that may begin a longer word: Pumpe, Pumpengehäuse
# Letters of a stem that may end a compound, and of what precedes it: Lager, Kugellager; but not table, stable.
_SHORTEST_END = 4
_SHORTEST_MISTYPED = 6  # letters of a word that may be mistyped: with fewer, motor would match rotor
_TRANSCRIBED = re.compile("(?<=[aou])e")


def _plain(word: str) -> str:
    """Return a word without case and accents: ä becomes a, ß becomes ss."""
    if word.isascii():
        return word.lower()
    parts = unicodedata.normalize("NFD", word.casefold())
    return "".join(part for part in parts if not unicodedata.combining(part)).lower()


def folded(word: str) -> str:
    """Return a word without case and accents: ä and ae become a, ß becomes ss."""
    return _TRANSCRIBED.sub("", _plain(word))


# Grammatical words without content. Not by `folded`: due and toe would become du and to.
FUNCTION_WORDS = frozenset(
    map(_plain, (*_ENGLISH.split(), *_GERMAN.split(), *_GERMAN.translate(TRANSCRIPTION).split()))
)


def content_words(text: str) -> tuple[str, ...]:
    """Return the words of a search text without function words, unchanged; () if no others remain."""
    found = (word.alternatives[0] for word in words(text))
    return tuple(word for word in found if _plain(word) not in FUNCTION_WORDS)


def asked_words(text: str) -> tuple[str, ...]:
    """Return `content_words`, or all words if there are no content words."""
    return content_words(text) or tuple(word.alternatives[0] for word in words(text))


def parts_of(text: str) -> frozenset[str]:
    """Return the distinct words of a text, folded; M-4711/2 has three."""
    return frozenset(_PART.findall(folded(text)))


class Coverage:
    """Compute the coverage of one search text by many rows. Cache each distinct word, because rows share most of their
    words. Not thread-safe."""

    def __init__(self, asked: Sequence[str]) -> None:
        """`asked`: the result of `content_words`."""
        whole = [parts_of(word) for word in asked]
        bits = {part: 1 << place for place, part in enumerate(frozenset[str]().union(*whole))}
        self._asked = [sum(bits[part] for part in parts) for parts in whole]
        # By whether a part has letters only, because such parts match none of the others.
        self._bits = {
            kind: {part: bit for part, bit in bits.items() if part.isalpha() is kind} for kind in (True, False)
        }
        self._answered: dict[str, int] = {}  # the parts that match a word of a text, as bits
        self._shares: dict[int, float] = {}  # by the parts that match a text

    def of(self, text: str) -> float:
        """Return the share of the asked words that `text` contains, from 0 to 1; 0 if no words were asked. A word of
        several parts (M-4711) counts only if all its parts are present."""
        if not self._asked:
            return 0.0
        there = 0
        for word in parts_of(text):
            found = self._answered.get(word)
            if found is None:
                alike = self._bits[word.isalpha()].items()
                found = self._answered[word] = sum(bit for part, bit in alike if related(part, word))
            there |= found
        share = self._shares.get(there)
        if share is None:
            held = sum(parts & there == parts for parts in self._asked)
            share = self._shares[there] = held / len(self._asked)
        return share


@lru_cache(maxsize=100_000)
def related(asked: str, other: str) -> bool:
    """Return whether two folded words match: same stem, one stem inside a longer word, or one letter missing, added,
    replaced or swapped. A number matches only itself, with or without leading zeros."""
    if asked == other:
        return True
    if not (asked.isalpha() and other.isalpha()):
        return asked.isdigit() and other.isdigit() and asked.lstrip("0") == other.lstrip("0")
    one, two = stem(asked), stem(other)
    if one == two:
        return True
    if len(one) >= _SHORTEST_BEGINNING and two.startswith(one):
        return True
    if len(one) >= _SHORTEST_END and any(
        whole.endswith(one) and len(whole) - len(one) >= _SHORTEST_END for whole in (two, other)
    ):
        return True
    if len(two) >= _SHORTEST_BEGINNING and one.startswith(two) and len(one) - len(two) <= 3:
        return True
    alike = abs(len(asked) - len(other)) <= 1 and (asked[0] == other[0] or asked[-1] == other[-1])
    return alike and min(len(asked), len(other)) >= _SHORTEST_MISTYPED and _mistyped(asked, other)


def _mistyped(one: str, two: str) -> bool:
    """Return whether two words, whose lengths differ by at most 1, differ by one letter or by two adjacent letters
    swapped: a Damerau-Levenshtein distance of 1."""
    same = next((n for n, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    if len(one) == len(two):
        swapped = one[same : same + 2] == two[same : same + 2][::-1] and one[same + 2 :] == two[same + 2 :]
        return swapped or one[same + 1 :] == two[same + 1 :]
    longer, shorter = (one, two) if len(one) > len(two) else (two, one)
    return longer[same + 1 :] == shorter[same:]


@lru_cache(maxsize=100_000)
def stem(word: str) -> str:
    """Return the word without its ending if at least four letters remain. This simple rule serves both languages,
    because the language of a search text is unknown."""
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= _SHORTEST_STEM:
            return word[: -len(ending)]
    return word
