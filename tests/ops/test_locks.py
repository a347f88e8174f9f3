"""The image's locked requirements: they are what pyproject.toml permits, whole, hashed, from PyPI alone; and the check
that finds stale ones. Nothing is resolved or installed here.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.lib import locks

CUDA = pytest.mark.parametrize("cuda", locks.TORCH)


def locked(*names: str) -> dict[str, locks.Pin]:
    found: dict[str, locks.Pin] = {}
    for name in names:
        found |= locks.pins((locks.FOLDER / name).read_text(encoding="utf-8"))
    return found


def test_the_folder_holds_the_locks_and_nothing_else() -> None:
    assert sorted(file.name for file in locks.FOLDER.iterdir()) == sorted(locks.names())


@CUDA
@pytest.mark.parametrize("extras", [(), ("onnx",), ("ray",), ("train",), ("onnx", "train"), locks.EXTRAS])
def test_every_dependency_is_locked_at_a_permitted_version(cuda: str, extras: tuple[str, ...]) -> None:
    found = locked(f"cuda{cuda}.txt", *(f"cuda{cuda}-{extra}.txt" for extra in extras))
    wanted = locks.wanted(locks.project(), (*locks.BASE, *extras))
    assert len(wanted) > 20
    for requirement in wanted:
        pin = found[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin.version, prereleases=True), (
            f"{requirement} is locked at {pin.version}"
        )


@CUDA
def test_torch_is_the_one_for_the_driver(cuda: str) -> None:
    base = locked(f"cuda{cuda}.txt")
    wanted = {"13": "2.13", "12": "2.10"}[cuda]
    assert str(base["torch"].version).startswith(f"{wanted}.")
    assert any(name.endswith(f"-cu{cuda}") for name in base), "its CUDA libraries come with it"
    other = {"13": "-cu12", "12": "-cu13"}[cuda]
    assert not any(name.endswith(other) for name in base)


@CUDA
def test_the_cuda_libraries_are_of_the_line_that_torch_was_built_with(cuda: str) -> None:
    """Those that CUDA numbers by its own release. The bindings are Python's, of the same major version."""
    base = locked(f"cuda{cuda}.txt")
    numbered = ("cuda-toolkit", "nvidia-cuda-", "nvidia-nvtx", "nvidia-nvjitlink")
    lines = {name: pin.version.release[:2] for name, pin in base.items() if name.startswith(numbered)}
    assert len(lines) >= 5
    assert set(lines.values()) == {{"13": (13, 0), "12": (12, 8)}[cuda]}, lines
    assert base["cuda-bindings"].version.major == int(cuda)


@pytest.mark.slow
@CUDA
def test_every_pin_is_what_the_packages_themselves_require(cuda: str, tmp_path: Path) -> None:
    """From the metadata on PyPI: torch's pins of nvidia-* among them. They are installed with --no-deps."""
    pinned = locked(f"cuda{cuda}.txt", *(f"cuda{cuda}-{extra}.txt" for extra in locks.EXTRAS))
    source, lines = tmp_path / "all.in", [f"{name}=={pin.version}" for name, pin in pinned.items()]
    source.write_text("\n".join(lines))
    resolved = locks.resolve(source, tmp_path / "all.txt", [], [])
    assert {name: pin.version for name, pin in resolved.items()} == {name: pin.version for name, pin in pinned.items()}
    changed = [line for line in lines if not line.startswith("nvidia-cublas")]
    source.write_text(
        "\n".join([*changed, {"13": "nvidia-cublas==13.0.2.14", "12": "nvidia-cublas-cu12==12.9.1.4"}[cuda]])
    )
    with pytest.raises(subprocess.CalledProcessError):
        locks.resolve(source, tmp_path / "changed.txt", [], [])


@CUDA
def test_extras_add_to_the_base_and_agree_with_each_other(cuda: str) -> None:
    """They are installed one after the other with --no-deps."""
    base, *added = (locked(f"cuda{cuda}{extra}.txt") for extra in ("", *(f"-{extra}" for extra in locks.EXTRAS)))
    versions: dict[str, Version] = {}
    for more in added:
        assert more
        assert not set(more) & set(base)
        for name, pin in more.items():
            assert versions.setdefault(name, pin.version) == pin.version


@pytest.mark.parametrize("name", locks.names())
def test_every_package_has_hashes_and_no_place_of_its_own(name: str) -> None:
    text = (locks.FOLDER / name).read_text(encoding="utf-8")
    for pin in locks.pins(text).values():
        assert pin.hashes, pin.name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in pin.hashes)
    assert "://" not in text
    assert "@ " not in text
    for line in text.splitlines():
        assert re.match(r"#|[a-z0-9][a-z0-9._-]*==|    --hash=sha256:", line), line


def test_what_runs_the_emulator_or_tests_is_not_in_the_image() -> None:
    everything = locked(*locks.names())
    for name in ("pytest", "hypothesis", "sqlglot", "trustme", "onnxruntime-gpu", "tensorrt-cu13"):
        assert name not in everything


def test_the_tools_that_build_our_wheel_are_locked() -> None:
    found = locked(locks.BUILD)
    assert "hatchling" in found
    assert "editables" not in found


def test_hdbcli_is_fetched_and_not_shipped() -> None:
    assert "hdbcli" in locked("cuda13.txt")
    root = locks.ROOT
    assert not [file for folder in ("deployment", "app", "connector") for file in (root / folder).rglob("*.whl")]


# ---------------------------------------------------------------------------------------------------------------- stale


def test_the_locks_fit_pyproject() -> None:
    assert locks.stale() == []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(locks.FOLDER, tmp_path / "requirements"))


def test_a_missing_and_a_stale_lock_are_named(copy: Path) -> None:
    (copy / "cuda12-onnx.txt").unlink()
    file = copy / "cuda13.txt"
    file.write_text(re.sub(r"sha256:[0-9a-f]{64}$", f"sha256:{'0' * 64}", file.read_text(), count=1, flags=re.M))
    assert locks.stale(copy) == [
        "cuda13.txt does not match the dependencies in pyproject.toml",
        "cuda12-onnx.txt is missing",
    ]


@pytest.mark.parametrize("change", ["dependencies", "onnx", "python", "build"])
def test_a_changed_dependency_makes_them_stale(
    change: str, copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = locks.project()
    if change == "python":
        changed["project"]["requires-python"] = ">=3.12"
    else:
        {
            "dependencies": changed["project"]["dependencies"],
            "onnx": changed["project"]["optional-dependencies"]["onnx"],
            "build": changed["build-system"]["requires"],
        }[change].append("one-more>=1")
    monkeypatch.setattr(locks, "project", lambda: changed)
    assert len(locks.stale(copy)) == len(locks.names())
    assert locks.main(["--check"]) == 1
    assert "run scripts/lock-requirements" in capsys.readouterr().err


def test_what_does_not_go_into_the_image_leaves_them_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = locks.project()
    changed["project"]["optional-dependencies"]["test"].append("one-more>=1")
    changed["project"]["version"] = "9.9"
    monkeypatch.setattr(locks, "project", lambda: changed)
    assert locks.stale() == []


@pytest.mark.parametrize(
    "text",
    ["a==1 \\\n    --hash=md5:00\n", "a>=1 \\\n    --hash=sha256:00\n", "-e .\n", "a @ https://host/a.whl\n"],
)
def test_a_line_that_is_no_pin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a pinned requirement"):
        locks.pins(text)


def test_pins_are_read_with_their_hashes() -> None:
    text = "# head\nA.b==1.0 \\\n    --hash=sha256:11 \\\n    --hash=sha256:22\nc==2 \\\n    --hash=sha256:33\n"
    found = locks.pins(text)
    assert {name: (pin.version, pin.hashes) for name, pin in found.items()} == {
        "a-b": (Version("1.0"), ("sha256:11", "sha256:22")),
        "c": (Version("2"), ("sha256:33",)),
    }


def test_markers_are_read_for_the_image_and_not_for_this_machine() -> None:
    assert set(locks.ENVIRONMENT) <= set(default_environment())
    changed = locks.project()
    changed["project"]["dependencies"] = ["a; sys_platform == 'win32'", "b; platform_machine == 'x86_64'"]
    assert [each.name for each in locks.wanted(changed, ())] == ["b"]
