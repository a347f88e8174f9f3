"""The talk with workers in other processes, which environments there are, and what is said of those that are not."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from app.src.benchmark import peers as environments
from app.src.benchmark.harness import PeerUnavailable
from app.src.benchmark.peers import PEERS, RECIPES, PeerProcess, chosen, is_made, make

FAKE = str(Path(__file__).with_name("fake_embedder.py"))


def process(folder: Path, file: str = FAKE) -> PeerProcess:
    return PeerProcess(file, "embed", folder)


def written(folder: Path, code: str) -> str:
    file = folder / "worker.py"
    file.write_text(textwrap.dedent(code), encoding="utf-8")
    return str(file)


def test_a_worker_loads_tunes_and_embeds(tmp_path: Path) -> None:
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps(["a", "b", "a"]), encoding="utf-8")
    with process(tmp_path) as worker:
        assert worker.versions["python"] == sys.version.split()[0]
        assert worker.versions["numpy"] == np.__version__
        loaded = worker.ask("load", model="hash:8", device="cpu", threads=1, cache=str(tmp_path))
        assert loaded["about"] == {"precision": "fp64"}
        tuned = worker.ask("tune", texts=str(texts))
        assert tuned["setting"] in tuned["tried"]
        out = tmp_path / "out.npy"
        took = worker.ask("embed", texts=str(texts), out=str(out))
        assert took["seconds"] > 0
        vectors = np.load(out)
    assert vectors.shape == (3, 8)
    assert vectors.dtype == np.float32
    assert vectors[0].tolist() == vectors[2].tolist()


def test_an_error_is_told_and_the_worker_goes_on(tmp_path: Path) -> None:
    with process(tmp_path) as worker:
        wish = {"device": "cpu", "threads": 1, "cache": str(tmp_path)}
        with pytest.raises(PeerUnavailable, match="ValueError: no model other"):
            worker.ask("load", model="other", **wish)
        with pytest.raises(PeerUnavailable, match="KeyError: 'dance'"):
            worker.ask("dance")
        worker.ask("load", model="hash:4", **wish)


def test_a_worker_that_dies_leaves_its_last_words(tmp_path: Path) -> None:
    file = written(tmp_path, "import sys\nsys.exit('no such library')")
    with pytest.raises(PeerUnavailable, match="it ended: no such library"), process(tmp_path, file):
        pass


def test_a_worker_that_dies_at_work(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        import os
        from answering import answer
        answer((), die=lambda: os._exit(1))
        """,
    )
    with process(tmp_path, file) as worker:
        with pytest.raises(PeerUnavailable, match="it ended"):
            worker.ask("die")
        with pytest.raises(PeerUnavailable, match="it ended"):
            worker.ask("die")


def test_an_answer_that_is_none(tmp_path: Path) -> None:
    file = written(tmp_path, "print('hello')\ninput()")
    with pytest.raises(PeerUnavailable, match="not JSON"), process(tmp_path, file):
        pass


def test_a_worker_that_says_nothing_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.src.benchmark.peers._START_SECONDS", 0.2)
    file = written(tmp_path, "import time\ntime.sleep(60)")
    with pytest.raises(PeerUnavailable, match=r"no answer within 0 s"), process(tmp_path, file):
        pass


def test_nothing_of_ours_is_in_a_workers_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = tmp_path / "ours"
    monkeypatch.setenv("PYTHONPATH", str(ours))
    file = written(
        tmp_path,
        """
        import sys
        from answering import answer
        answer((), path=lambda: {"path": sys.path})
        """,
    )
    with process(tmp_path, file) as worker:
        assert str(ours) not in worker.ask("path")["path"]


def test_every_peer_has_a_worker_and_a_recipe() -> None:
    assert {environment for _, environment in PEERS.values()} == set(RECIPES)
    for kind, worker in (("embed", "embedding"), ("search", "searching")):
        text = (environments.WORKERS / f"{worker}.py").read_text(encoding="utf-8")
        assert [name for name, (its_kind, _) in PEERS.items() if its_kind == kind and f'"{name}"' not in text] == []


def test_workers_import_nothing_of_ours() -> None:
    for file in environments.WORKERS.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert "import app" not in text
        assert "from app" not in text
        assert "connector" not in text


@pytest.mark.parametrize(
    ("name", "words"),
    [("onx", "onnx, onnx-int8, openvino"), ("faiss", "sentence-transformers, infinity"), ("none.py", "file not found")],
)
def test_an_unknown_peer_is_told_what_there_is(name: str, words: str) -> None:
    with pytest.raises(PeerUnavailable, match=words):
        PeerProcess(name, "embed")


def test_a_missing_environment_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(PeerUnavailable, match=r"owl-sap benchmark peers onnx --peers "):
        PeerProcess("onnx-int8", "embed", tmp_path)
    PeerProcess("numpy", "search", tmp_path)  # our own environment has it


def test_another_recipe_makes_an_environment_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip itself is left out: that needs the package index."""
    ran: list[list[str]] = []

    def run(command: list[str], environment: str) -> None:
        ran.append(command)
        (tmp_path / environment).mkdir(exist_ok=True)

    monkeypatch.setattr(environments, "_run", run)
    said: list[str] = []
    make("usearch", tmp_path, said.append)
    assert is_made("usearch", tmp_path)
    assert ran[0][:3] == [sys.executable, "-m", "venv"]
    assert ran[1][-2:] == ["usearch", "numpy"]
    PeerProcess("usearch", "search", tmp_path)
    monkeypatch.setitem(environments.RECIPES, "usearch", ("install usearch==1",))
    assert not is_made("usearch", tmp_path)
    with pytest.raises(PeerUnavailable, match="make it"):
        PeerProcess("usearch", "search", tmp_path)


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "usearch").mkdir()
    mine = tmp_path / "usearch" / "mine.txt"
    mine.touch()
    with pytest.raises(PeerUnavailable, match="is not a virtual environment"):
        make("usearch", tmp_path, lambda text: None)
    assert mine.exists()


@pytest.mark.not_fast
def test_pip_that_fails_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PeerUnavailable, match="environment of usearch could not be made"):
        make("usearch", tmp_path, lambda text: None)
    assert not is_made("usearch", tmp_path)


def test_names_of_peers_and_of_environments_choose() -> None:
    assert chosen(["onnx-int8", "onnx", "faiss"]) == ["onnx", "faiss"]
    assert chosen([]) == list(RECIPES)
    with pytest.raises(PeerUnavailable, match="unknown peer fais"):
        chosen(["fais"])
