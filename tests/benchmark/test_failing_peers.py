"""A peer that fails while it is measured costs its own figures, never those of the others."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from app.src.benchmark import embed, search
from app.src.benchmark.harness import Figure, PeerUnavailable, Report, Rounds, at_least, interleaved
from app.src.core.loading import EngineOptions, load_engine
from app.src.settings import EmbeddingSettings

GOOD = str(Path(__file__).with_name("fake_embedder.py"))
WANTED = EmbeddingSettings(model="hash:16")


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed here."""
    monkeypatch.setattr(embed, "PAUSE", 0.0)
    monkeypatch.setattr(search, "PAUSE", 0.0)


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


def measured(*peers: str, rounds: int = 2) -> Report:
    with load_engine(EngineOptions("hash:16")) as engine:
        return embed.measure(engine, WANTED, peers, lambda text: None, rounds=rounds, scale=0.02)


def by_name(report: Report) -> dict[str, Figure]:
    return {figure.name: figure for figure in report.figures}


@pytest.mark.not_fast
@pytest.mark.parametrize(
    ("calls", "how", "words"),
    [
        pytest.param(3, "raise RuntimeError('no more memory')", "RuntimeError: no more memory", id="error in a round"),
        pytest.param(3, "os._exit(3)", "failing: it ended", id="end in a round"),
        pytest.param(5, "os._exit(3)", "failing: it ended", id="end when asked for its vectors"),
    ],
)
def test_its_figure_says_why_and_the_others_are_there(tmp_path: Path, calls: int, how: str, words: str) -> None:
    """Two calls of tuning, one that warms up, two rounds, and then the vectors."""
    report = measured(failing_embedder(tmp_path, calls, how), GOOD)
    found = by_name(report)
    assert list(found) == ["short: failing / ours", "short: fake_embedder / ours", "skewed: fake_embedder / ours"]
    broken = report.figures[0]
    assert (broken.verdict, broken.error is not None and words in broken.error) == ("failed", True)
    assert [figure.name for figure in report.failed] == [broken.name]
    for figure in report.figures[1:]:
        assert (len(figure.rounds), figure.error) == (2, None)
        assert "least_cosine" in figure.more


@pytest.mark.not_fast
def test_the_last_one_that_fails_leaves_a_figure_too(tmp_path: Path) -> None:
    (figure,) = measured(failing_embedder(tmp_path, 3, "raise RuntimeError('no')")).figures
    assert figure.error == "failing: RuntimeError: no"


@pytest.mark.not_fast
def test_one_that_fails_before_anything_was_measured_ends_it(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailable, match="RuntimeError: no"):
        measured(failing_embedder(tmp_path, 0, "raise RuntimeError('no')"))


@pytest.mark.not_fast
def test_one_that_cannot_be_tuned_later_keeps_what_was_measured(tmp_path: Path) -> None:
    """Six calls are all of the first workload."""
    report = measured(failing_embedder(tmp_path, 6, "raise RuntimeError('no')"))
    assert [(figure.name, len(figure.rounds)) for figure in report.figures] == [("short: failing / ours", 2)]
    assert report.notes == ["left out: failing: RuntimeError: no"]


@pytest.mark.not_fast
def test_a_search_that_fails(tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text(
        textwrap.dedent("""
            from answering import answer

            def search(**_):
                raise RuntimeError("index lost")

            answer((), build=lambda **_: {"build_seconds": 0.1}, search=search)
        """),
        encoding="utf-8",
    )
    peers = (str(file), "numpy")
    found = by_name(search.measure(peers, lambda text: None, rounds=2, rows=300, queries=3, dimension=16))
    assert list(found) == ["ours", "ours / failing", "ours / numpy"]
    assert found["ours / failing"].error == "failing: RuntimeError: index lost"
    assert found["ours / numpy"].more["their_recall"] == 1.0


# ------------------------------------------------------------------------------------------------------------ the parts


def test_a_failed_work_gets_no_more_turns() -> None:
    turns: list[str] = []

    def broken() -> float:
        turns.append("broken")
        if len([turn for turn in turns if turn == "broken"]) == 2:
            raise PeerUnavailable("no disk")
        return 1.0

    def sound() -> float:
        turns.append("sound")
        return 2.0

    rounds = interleaved({"broken": broken, "sound": sound}, 3)
    assert turns == ["sound", "broken", "broken", "sound", "sound", "sound"]
    assert rounds == Rounds({"sound": [2.0, 2.0, 2.0]}, {"broken": "no disk"})
    ratio = rounds.ratio("speed", "broken", "sound", at_least(2))
    assert (ratio.error, ratio.verdict, ratio.rounds) == ("no disk", "failed", ())
    assert rounds.figure("seconds", "broken").error == "no disk"
    assert rounds.figure("seconds", "sound").median == 2.0


def test_any_other_error_ends_the_rounds() -> None:
    def wrong() -> float:
        raise RuntimeError("ours")

    with pytest.raises(RuntimeError, match="ours"):
        interleaved({"wrong": wrong}, 1)


def test_a_failed_figure_is_written_as_null() -> None:
    written = Figure("f", (), "x", at_least(2), error="gone").as_dict()
    assert json.loads(json.dumps(written))["median"] is None
    assert (written["verdict"], written["error"], written["disturbed"]) == ("failed", "gone", False)
    assert "error" not in Figure("f", [1.0]).as_dict()
    with pytest.raises(ValueError, match="either rounds or an error"):
        Figure("f", ())
