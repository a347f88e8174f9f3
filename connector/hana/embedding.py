"""Models that HANA computes itself, with its function VECTOR_EMBEDDING."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from connector.errors import ConfigurationError, PermissionRefused, RowRejected, StatementFailed, UnknownTable
from connector.hana.catalog import did_you_mean
from connector.hana.connection import HanaPool
from connector.model import DatabaseModel, Vectors

# This module formats only constants into SQL; values are always bound.
# ruff: noqa: S608

TextType = Literal["DOCUMENT", "QUERY"]
PLAIN_WORD = "pump"
TOGETHER = 16  # texts of one statement
LONGEST_TOGETHER = 2500  # characters of such a text: an NVARCHAR has 5,000 UTF-16 units
# SAP documents 256 tokens for SAP_NEB, with two special ones. For other models no limit was found; HANA cuts longer
# texts without an error.
MAX_TOKENS = 256 - 2
SAPS_OWN = ("SAP_GXY.20250407", "SAP_NEB.20240715")
LANGUAGES = {"SAP_NEB.20240715": ("de", "en", "es", "fr", "pt")}
# HANA has no tokenizer to ask, so tokens are estimated, rather too many than too few: three letters of a word, two
# capitals or digits, or any other character.
_TOKEN = re.compile(r"[A-Z0-9]{2}|[A-Za-z\u00c0-\u024f][a-z\u00df-\u024f]{0,2}|\S")


def embedding(model: DatabaseModel, text: str = "?", kind: TextType = "DOCUMENT") -> str:
    """Return an SQL expression for the vector, of length 1, of the expression `text`. Its parameters: those of `text`,
    then `parameters(model)`."""
    source = "" if model.remote_source is None else ", ?"
    return f"L2NORMALIZE(VECTOR_EMBEDDING({text}, '{kind}', ?{source}))"


def parameters(model: DatabaseModel) -> tuple[str, ...]:
    return (model.name,) if model.remote_source is None else (model.name, model.remote_source)


def probe(model: DatabaseModel) -> tuple[str, tuple[str, ...]]:
    """Return a statement and its parameters that embed a plain word and return the number of dimensions."""
    return f"SELECT CARDINALITY({embedding(model)}) FROM DUMMY", (PLAIN_WORD, *parameters(model))


def embed_plain_word(query: Callable[..., Any], model: DatabaseModel) -> int | None:
    """Return the number of dimensions; None: HANA gives no vector. `query`: of a session, or `read` of a pool.
    Its errors name the model; if HANA refuses it, they say what to check."""
    source = "" if model.remote_source is None else f" of remote source {model.remote_source!r}"
    try:
        ((dimension,),) = query(*probe(model), doing=f"embedding a plain word with hana:{model.name}{source}")
    except (RowRejected, StatementFailed) as error:
        raise type(error)(f"{error} {_needs(model)}", code=error.code) from None
    return None if dimension is None else int(dimension)


class HanaModel:
    """One model in the HANA of `pool`. Thread-safe. The constructor asks HANA for the dimension, and raises
    ConfigurationError if this HANA does not compute the model."""

    def __init__(self, pool: HanaPool, model: DatabaseModel) -> None:
        self._pool = pool
        self.model = model
        try:
            ((dimension,),) = pool.read(*probe(model), doing=f"embedding with HANA's model {model.name}")
        except (PermissionRefused, RowRejected, StatementFailed, UnknownTable) as error:
            raise _unusable(model, error) from None
        if not dimension:
            raise ConfigurationError(f"HANA's model {model.name} gives no vector for a plain word: name another model")
        self.dimension = int(dimension)

    def embed(self, texts: Sequence[str], kind: TextType) -> Vectors:
        """Return float32 (n, dimension) of up to TOGETHER texts; NaN for a text that HANA rejects or gives no vector.
        Raises StatementFailed if HANA rejects a plain word too."""
        vectors = np.full((len(texts), self.dimension), np.nan, np.float32)
        together = len(texts) > 1 and max(map(len, texts)) <= LONGEST_TOGETHER
        found = self._together(texts, kind) if together else self._alone(texts, kind)
        for place, vector in found.items():
            if vector is not None:  # a REAL_VECTOR: the dimension as int32, then float32s, all little-endian
                vectors[place] = np.frombuffer(bytes(vector), dtype="<f4", offset=4)
        return vectors

    def _together(self, texts: Sequence[str], kind: TextType) -> dict[int, Any]:
        """Return REAL_VECTORs by position, from one statement; if HANA rejects some text, from a statement each."""
        row = 'SELECT {} AS "PLACE", TO_NVARCHAR(?) AS "TEXT" FROM DUMMY'
        rows = " UNION ALL ".join(map(row.format, range(len(texts))))
        vector = embedding(self.model, '"TEXT"', kind)
        sql, values = f'SELECT "PLACE", {vector} FROM ({rows})', (*parameters(self.model), *texts)
        try:
            return dict(self._pool.read(sql, values, doing="embedding texts in HANA"))
        except (RowRejected, StatementFailed):
            return self._alone(texts, kind)

    def _alone(self, texts: Sequence[str], kind: TextType) -> dict[int, Any]:
        sql, model = f"SELECT {embedding(self.model, kind=kind)} FROM DUMMY", parameters(self.model)
        found = {}
        for place, text in enumerate(texts):
            try:
                ((found[place],),) = self._pool.read(sql, (text, *model), doing="embedding a text in HANA")
            except RowRejected:
                continue
            except StatementFailed:
                embed_plain_word(self._pool.read, self.model)
        return found


def estimated_tokens(text: str) -> int:
    return len(_TOKEN.findall(text))


def token_spans(text: str) -> list[tuple[int, int]]:
    """Return, for each token by estimate, its first character and one after its last."""
    return [match.span() for match in _TOKEN.finditer(text)]


def _needs(model: DatabaseModel) -> str:
    if model.remote_source is not None:
        return (
            f"Check the remote source {model.remote_source!r} to SAP AI Core (remote_source), this user's "
            "right to use it, and the model's name"
        )
    return (
        "VECTOR_EMBEDDING needs HANA Cloud from 2024 QRC 4 on, with Natural Language Processing switched on in HANA "
        "Cloud Central (the free tier does not have it), and a model that the instance has; a model of SAP AI Core "
        "needs remote_source"
    )


def _unusable(model: DatabaseModel, error: Exception) -> ConfigurationError:
    code = getattr(error, "code", 0)
    said = "the user or the instance lacks a privilege (code 258)." if code == 258 else str(error)
    own = model.remote_source is not None or model.name in SAPS_OWN
    near = "" if own else did_you_mean(model.name, SAPS_OWN)
    return ConfigurationError(
        f"HANA does not embed with the model hana:{model.name}: {said}{near} {_needs(model)}. Or name a model "
        "that runs here, such as all-MiniLM-L6-v2",
        code=code,
    )
