"""A peer that fails while it is measured ends the comparison with its message."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from app.src.benchmark import embed
from app.src.benchmark.harness import Figure, PeerUnavailable, interleaved
from app.src.core.loading import EngineOptions, load_engine
from app.src.settings import EmbeddingSettings
from benchmarks.program import at_least

GOOD = str(Path(__file__).with_name("fake_embedder.py"))
WANTED = EmbeddingSettings(model="hash:16")


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed here."""
    monkeypatch.setattr(embed, "PAUSE", 0.0)


def failing_embedder(folder: Path, calls: int, how: str) -> str:
    """Embeds so many times, tuning included, and then no more."""
    file = folder / "failing.py"
    file.write_text(
        textwrap.dedent(f"""
            import os
            import numpy as np
            from embedding import serve

            left = [{calls}]

            def load(model, device, threads, cache):
                def encode(texts, setting):
                    left[0] -= 1
                    if left[0] < 0:
                        {how}
                    return np.eye(len(texts), 16, dtype=np.float32) + 1
                return encode, ("only",), {{}}

            serve((), load)
        """),
        encoding="utf-8",
    )
    return str(file)


@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("calls", "how", "words"),
    [
        pytest.param(0, "raise RuntimeError('no')", "failing: RuntimeError: no", id="error when tuned"),
        pytest.param(3, "raise RuntimeError('no more memory')", "RuntimeError: no more memory", id="error in a round"),
        pytest.param(3, "os._exit(3)", "failing: it ended", id="end in a round"),
    ],
)
def test_a_peer_that_fails_ends_the_comparison_and_says_why(tmp_path: Path, calls: int, how: str, words: str) -> None:
    """Two calls of tuning, one that warms up, two rounds, and then the vectors."""
    peers = (failing_embedder(tmp_path, calls, how), GOOD)
    with load_engine(EngineOptions("hash:16")) as engine, pytest.raises(PeerUnavailable, match=words):
        embed.measure(engine, WANTED, peers, lambda text: None, rounds=2, scale=0.02)


def test_any_error_ends_the_rounds() -> None:
    def wrong() -> float:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        interleaved({"wrong": wrong}, 1)


def test_a_failed_figure_is_written_as_null() -> None:
    written = Figure("f", (), "x", at_least(2), error="gone").as_dict()
    assert json.loads(json.dumps(written))["median"] is None
    assert (written["verdict"], written["error"], written["disturbed"]) == ("failed", "gone", False)
    assert "error" not in Figure("f", [1.0]).as_dict()
