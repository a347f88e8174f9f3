"""Compare the languages of rows and search texts with those that a model knows, and propose a packaged model that knows
them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from app.src.core.backends.packaged import PACKAGED
from connector.discovery.languages import NAMES, of_text, present
from connector.extras import install_command

_PREFERRED = "use-multilingual"
# Other models that were trained on English, according to their authors.
_ENGLISH = re.compile(r"(.*/)?(all-MiniLM-L(6|12)-v[12]|all-mpnet-base-v[12]|(bge|gte|e5)-\w+-en(-v[\d.]+)?)")


@lru_cache(maxsize=256)
def known_languages(model: str) -> tuple[str, ...]:
    """Return the languages of a model as ISO 639-1 codes; () if unknown. `model`: its name, folder or hub id, or the id
    that a store records."""
    name = re.sub("@[0-9a-f]{8}$", "", model)
    if name in PACKAGED:
        return PACKAGED[name].languages
    return ("en",) if _ENGLISH.fullmatch(name) else ()


def model_for(languages: Iterable[str]) -> str | None:
    """Return the packaged model that knows all these languages, or None."""
    fitting = [name for name, model in PACKAGED.items() if set(languages) <= set(model.languages)]
    return next((name for name in fitting if name == _PREFERRED), fitting[0] if fitting else None)


@dataclass(frozen=True, slots=True)
class ModelAdvice:
    """Why the rows need another model, and which packaged one knows their languages (None: none does). `install`: the
    command that installs it, "" if it is installed."""

    reason: str
    model: str | None
    install: str = ""


def advice_on_rows(languages: Mapping[str, int], sampled: int, model: str) -> ModelAdvice | None:
    """Return advice if `model` does not know a language of the sampled rows. `languages`: rows by language."""
    found, known = present(languages), known_languages(model)
    unknown = [code for code in found if known and code not in known]
    if not unknown:
        return None
    first, *others = unknown
    rows = [f"{languages[first]} of {sampled} sampled rows are {NAMES[first]}"]
    rows += [f"{languages[code]} {NAMES[code]}" for code in others]
    reason = f"{', '.join(rows)}; {_knows(model)}"
    other = model_for(found)
    missing = other is not None and importlib.util.find_spec(PACKAGED[other].package) is None
    return ModelAdvice(reason, other, install_command(PACKAGED[other].extra) if other and missing else "")


def note_on_rows(collection: str, languages: Mapping[str, int], sampled: int, model: str) -> list[str]:
    """Return a warning if `model` does not know a language of the sampled rows."""
    advice = advice_on_rows(languages, sampled, model)
    if advice is None:
        return []
    return [f"{advice.reason}, so searches by meaning hardly find them; {_way_out(collection, advice.model)}"]


def note_on_text(collection: str, text: str, model: str) -> list[str]:
    """Return a warning if the search text is certainly in a language that `model` does not know."""
    known = known_languages(model)
    language = of_text(text) if known else None
    if language is None or language in known:
        return []
    way_out = _way_out(collection, model_for((language, *known)))
    return [f"the search text is {NAMES[language]} and {_knows(model)}, so hits by meaning are unreliable; {way_out}"]


def _knows(model: str) -> str:
    known = known_languages(model)
    name = re.sub("@[0-9a-f]{8}$", "", model)
    return f"{name} knows only {NAMES[known[0]]}" if len(known) == 1 else f"{name} does not know that language"


def _way_out(collection: str, model: str | None) -> str:
    setting = f'model = "{model}"' if model else "a model that knows these languages (docs/search.md)"
    return f"set {setting} for {collection}, sync, then run owl-sap generations {collection} --switch"
