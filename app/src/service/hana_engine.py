"""The engine of a model that HANA computes, for searches and requests. A sync does not use it: HANA embeds while it
writes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.src.core.backends import Backend, InputType, ModelInfo, Pause, TokenBatch, Vectors
from app.src.core.device import DeviceProfile
from app.src.core.engine import EmbeddingEngine
from app.src.core.memory import ModelShape
from connector.hana.embedding import LANGUAGES, MAX_TOKENS, TOGETHER, HanaModel, TextType, estimated_tokens, token_spans
from connector.model import IN_DATABASE

PATH = "hana"
_KINDS: dict[InputType, TextType] = {"document": "DOCUMENT", "query": "QUERY"}
_CODES = {kind: code for code, kind in enumerate(_KINDS)}


class HanaBackend(Backend):
    """A text's ids are its kind and its characters. Does not cut texts: HANA does, at its own limit."""

    def __init__(self, model: HanaModel) -> None:
        self._model = model
        self.profile = DeviceProfile.cpu("SAP HANA")
        self.info = ModelInfo(
            name=IN_DATABASE + model.model.name,
            dimension=model.dimension,
            max_tokens=MAX_TOKENS,
            special_tokens=0,
            pooling="hana",
            weights_sha256="",
            tokenizer_sha256="",
            precision="fp32",
            precision_reason="HANA computes it",
            shape=ModelShape(model.dimension, model.dimension, 1, MAX_TOKENS),
            path=PATH,
            path_reason="VECTOR_EMBEDDING in the database; tokens are estimated",
            languages=LANGUAGES.get(model.model.name, ()),
        )

    def tokenize(self, texts: Sequence[str], input_type: InputType = "document") -> TokenBatch:
        marked = [chr(_CODES[input_type]) + text for text in texts]
        ids = np.frombuffer("".join(marked).encode("utf-32-le", "surrogatepass"), dtype="<i4").astype(np.int32)
        offsets = np.cumsum([0, *map(len, marked)], dtype=np.intp)
        return TokenBatch(ids, offsets, np.array(self.count(texts), dtype=np.intp))

    def count(self, texts: Sequence[str]) -> list[int]:
        return [estimated_tokens(text) for text in texts]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        return token_spans(text)

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        vectors = np.full((len(batch), self.info.dimension), np.nan, np.float32)
        if exact:  # HANA has only one precision, so asking again for a vector gains nothing
            return vectors
        texts = [ids.astype("<i4").tobytes().decode("utf-32-le", "surrogatepass") for ids in batch]
        for input_type, kind in _KINDS.items():
            places = [place for place, text in enumerate(texts) if ord(text[0]) == _CODES[input_type]]
            for start in range(0, len(places), TOGETHER):
                if pause is not None and start:
                    pause()
                some = places[start : start + TOGETHER]
                vectors[some] = self._model.embed([texts[place][1:] for place in some], kind)
        return vectors


class HanaEngine(EmbeddingEngine):
    def __init__(self, model: HanaModel) -> None:
        backend = self._hana = HanaBackend(model)
        super().__init__(backend)
        source = "" if model.model.remote_source is None else f"@{model.model.remote_source}"
        self.fingerprint = f"{self.model}{source}/{self.dimension}/unit"

    def _tokenize(self, texts: Sequence[str], input_type: InputType) -> TokenBatch:
        self._runner.check_open()
        if input_type not in _CODES:
            raise ValueError(f'input_type must be "query" or "document", not {input_type!r}')
        return self._hana.tokenize(texts, input_type)
