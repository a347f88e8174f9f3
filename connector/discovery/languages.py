"""Detect the languages of a sample of rows, and that of a search text: by py3langid, a naive Bayes classifier over byte
n-grams with its model in the package, and by SAP's language keys. Loads the classifier on first use, in about 0.5 CPU
seconds and 50 MB.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connector.discovery.sap_tables import ISO, LANGUAGE_NAMES

SAMPLE = 200  # rows to judge a table by
_CERTAIN = 0.7  # no false alarm on 127 English queries and 3,000 English fragments; 82 % of German queries of 3+ words
_PRIOR = {"en": 4.0, "de": 2.0}  # of SAP texts, against 1 for others
_KEY = 20.0  # weight of a language key: decides for texts that do not
_PRESENT = 0.1  # least share of the judged rows: other models cost English rows a little
_LONGEST = 1000  # characters of a text that are looked at
_ROUNDS = 20
_CODES = tuple(LANGUAGE_NAMES)
_lock, _loaded = threading.Lock(), list[Any]()


def iso(key: object) -> str:
    """Return the ISO 639-1 code of a language key: SAP's (E), ISO's (EN) or a locale (en_GB); "" for an unknown one."""
    text = str(key or "").strip()
    code = ISO.get(text, "") if len(text) == 1 else text.replace("-", "_").partition("_")[0].lower()
    return code if code in LANGUAGE_NAMES else ""


def load() -> Any:
    """Load the classifier, once, and return it."""
    with _lock:
        if not _loaded:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier

            whole = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
            whole.set_languages(list(_CODES))
            # Of these languages only: the whole model takes another 25 MB.
            parts = whole.nb_ptc, whole.nb_pc, whole.nb_classes, whole.tk_nextmove, whole.tk_output
            _loaded.append(LanguageIdentifier(*parts, norm_probs=True, tk_row=whole.tk_row))
        return _loaded[0]


def of_text(text: str) -> str | None:
    """Return the language of a short text as ISO 639-1 code; None if uncertain, as for codes and most names. Costs less
    than 0.1 ms; nothing of the text is kept."""
    found = _probabilities(text)
    if found is None:
        return None
    best = int(found.argmax())
    return _CODES[best] if found[best] >= _CERTAIN else None


def of_rows(texts: Sequence[str], keys: Sequence[object] = ()) -> dict[str, int]:
    """Return how many texts are in which language, most frequent first; texts without words, and those that remain
    uncertain, are not counted. `keys`: the rows' language keys, evidence where the text itself does not decide.

    A short text is judged by the languages of the others: the shares are fitted by expectation maximisation.
    """
    judged = []
    for number, text in enumerate(texts):
        found, key = _probabilities(text), iso(keys[number]) if keys else ""
        if key:
            found = np.ones(len(_CODES)) if found is None else found
            found[_CODES.index(key)] *= _KEY
        if found is not None:
            judged.append(found / found.sum())
    if not judged:
        return {}
    each = np.array(judged)
    fitted, shares = each, np.full(len(_CODES), 1 / len(_CODES))
    for _ in range(_ROUNDS):
        fitted = each * shares
        fitted /= fitted.sum(axis=1, keepdims=True)
        shares = fitted.mean(axis=0)
    certain = fitted[fitted.max(axis=1) >= _CERTAIN].argmax(axis=1)
    return dict(Counter(_CODES[place] for place in certain.tolist()).most_common())


def present(counts: Mapping[str, int]) -> list[str]:
    """Return the languages of a sample that are more than stray rows."""
    total = sum(counts.values())
    return [code for code, rows in counts.items() if rows >= _PRESENT * total]


def _probabilities(text: str) -> NDArray[np.float64] | None:
    """Return the probability of each of `_CODES`; None for a text without words. Words with digits say nothing."""
    words = " ".join(word for word in text[:_LONGEST].split() if not any(map(str.isdigit, word)))
    if not any(map(str.isalpha, words)):
        return None
    ranked = dict(load().rank(words.lower() if words.isupper() else words))
    found: NDArray[np.float64] = np.array([float(ranked[code]) * _PRIOR.get(code, 1.0) for code in _CODES])
    found /= found.sum()
    return found
