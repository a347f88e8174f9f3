"""Peers embed the same texts as we do, with the model's prompt once."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import numpy as np
import pytest

from app.src.benchmark import embed
from app.src.benchmark.peers import PeerProcess
from app.src.core.backends.folder import find_folder
from app.src.core.loading import EngineOptions, load_engine
from app.src.settings import EmbeddingSettings
from tests.core.conftest import make_tiny_folder


@pytest.mark.not_fast
def test_the_texts_of_peers_begin_with_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "PAUSE", 0.0)
    (tmp_path / "strict.py").write_text(
        textwrap.dedent("""
            import numpy as np
            from embedding import serve

            def load(model, device, threads, cache):
                def encode(texts, setting):
                    if not all(text.startswith("passage: ") for text in texts):
                        raise ValueError("a text without the prompt")
                    return np.eye(len(texts), 16, dtype=np.float32) + 1
                return encode, ("only",), {}

            serve((), load)
        """),
        encoding="utf-8",
    )
    wanted = EmbeddingSettings(model="hash:16", document_prompt="passage: ")
    with load_engine(EngineOptions(wanted.model, document_prompt=wanted.document_prompt)) as engine:
        report = embed.measure(engine, wanted, [str(tmp_path / "strict.py")], lambda _: None, rounds=1, scale=0.02)
    assert len(report.figures) > 0


@pytest.mark.not_fast
def test_the_worker_of_sentence_transformers_adds_no_prompt(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, find_folder("all-MiniLM-L6-v2"))
    prompts = {"prompts": {"query": "query: ", "document": "passage: "}, "default_prompt_name": "document"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    texts, out = tmp_path / "texts.json", tmp_path / "vectors.npy"
    texts.write_text(json.dumps(["passage: oil pump"]))
    with PeerProcess("sentence-transformers", "embed", tmp_path) as worker:  # in our own environment
        worker.ask("load", model=str(folder), device="cpu", threads=1, cache=str(tmp_path))
        worker.ask("embed", texts=str(texts), out=str(out))
    with load_engine(EngineOptions(str(folder), device="cpu", precision="fp32")) as engine:
        np.testing.assert_allclose(np.load(out), engine.embed(["oil pump"]), atol=2e-6)
