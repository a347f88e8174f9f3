"""Token ids for trials: no text's, and within the vocabulary, for a card does not raise where a token is not there: it
ends the whole process. Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import TokenIds
from .folder import Folder

_USUAL = 1000
"""Words of a vocabulary that config.json does not tell of."""
_FIRST, _SPAN = 100, 800
"""Where whole words are in most vocabularies, behind the special ones, and how many different ones are enough."""


def words_of(folder: Folder) -> int:
    """Size of the model's vocabulary."""
    return int(folder.config.get("vocab_size") or _USUAL)


def trial_tokens(length: int, words: int, *, start: int = 0) -> TokenIds:
    """Of one sequence, for a vocabulary of so many words; `start` makes sequences of different content."""
    first = min(_FIRST, words // 2)
    return [first + (start + 31 * place) % min(_SPAN, words - first) for place in range(length)]


def trial_batch(tokens: int, longest: int, words: int) -> Sequence[TokenIds]:
    """So many tokens, as few sequences as the model's `longest` allows."""
    return [trial_tokens(min(longest, tokens - start), words, start=start) for start in range(0, tokens, longest)]
