"""Vectors of every float precision are one family: what one machine stored in bf16 another may check in fp32, and the
other way round, without taking rounding for damage; real damage is found all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.src.core.loading import EngineOptions, load_engine
from app.src.service.wiring import EngineEmbedder
from connector.model import CollectionSpec, TableRef, Vectors
from connector.stores.local.store import LocalStore
from connector.sync.run import Ends, sync
from connector.sync.verify import verify
from tests.connector.conftest import MemorySource
from tests.core.test_pytorch import ODD, mixed_lengths

SPEC = CollectionSpec("materials", TableRef("S", "MARA"), "{MAKTX}", metadata=("MTART",))
TEXTS = [text.replace("\x00", "") for text in (*ODD, *mixed_lengths(60)[:6])]


class Shifted:
    """An embedder that gives other vectors than were stored."""

    def __init__(self, embedder: EngineEmbedder) -> None:
        self._embedder = embedder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedder, name)

    def embed_documents(self, texts: Sequence[str]) -> Vectors:
        return np.roll(self._embedder.embed_documents(texts), 1, axis=1)


Embedders = Callable[[str], EngineEmbedder]


@pytest.fixture(scope="module")
def embedders() -> Iterator[Embedders]:
    """By their precision, loaded when first asked for."""
    with ExitStack() as opened:

        @cache
        def get(precision: str) -> EngineEmbedder:
            return EngineEmbedder(opened.enter_context(load_engine(EngineOptions(device="cpu", precision=precision))))

        yield get


def test_bf16_is_far_nearer_than_verify_asks(embedders: Embedders) -> None:
    exact, rounded = (embedders(precision).embed_documents(TEXTS) for precision in ("fp32", "bf16"))
    worst = 1 - float(np.einsum("ij,ij->i", exact, rounded).min())
    assert worst < (1 - embedders("bf16").least_cosine) / 3


@pytest.mark.parametrize(
    ("stored", "checked"),
    [
        ("bf16", "fp32"),
        pytest.param("fp32", "bf16", marks=pytest.mark.slow),
        pytest.param("auto", "auto", marks=pytest.mark.slow),
    ],
)
def test_rounding_is_no_damage_and_damage_is(embedders: Embedders, tmp_path: Path, stored: str, checked: str) -> None:
    source: Any = MemorySource()
    for number, text in enumerate(TEXTS):
        source.put("100", f"M{number:03}", MAKTX=text, MTART="FERT")
    store = LocalStore(tmp_path)
    try:
        sync(SPEC, Ends(source, store, embedders(stored)))
        report = verify(SPEC, Ends(source, store, embedders(checked)))
        assert report.ok, report
        again = sync(SPEC, Ends(source, store, embedders(checked)))
        assert (again.upserted, again.embedded_texts) == (0, 0)
        assert verify(SPEC, Ends(source, store, Shifted(embedders(checked)))).bad_vectors > 0
    finally:
        store.close()
