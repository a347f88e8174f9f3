"""The command that adds an extra, by how the package was installed."""

from __future__ import annotations

import importlib.util
import json
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from connector import extras
from connector.extras import install_command


def installed_from(origin: dict[str, object] | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This package is installed as pip records it: `origin` is the content of direct_url.json, None: from an index."""
    info = folder / "owl_sap_connector-0.1.0.dist-info"
    info.mkdir()
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(info))


def clone(folder: Path) -> Path:
    made = folder / "a clone"
    made.mkdir()
    (made / "pyproject.toml").touch()
    return made


def test_from_a_clone_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = clone(tmp_path)
    installed_from({"url": folder.as_uri(), "dir_info": {"editable": True}}, tmp_path, monkeypatch)
    assert install_command("hana", "engine") == f'pip install -e ".[hana,engine]" in the folder {folder}'


def test_from_a_clone_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = clone(tmp_path)
    installed_from({"url": folder.as_uri(), "dir_info": {}}, tmp_path, monkeypatch)
    index = "https://index.example"
    assert (
        install_command("mcp", index=index) == f'pip install ".[mcp]" --extra-index-url {index} in the folder {folder}'
    )


@pytest.mark.parametrize(
    "origin",
    [
        pytest.param(None, id="index"),
        pytest.param({"url": "file:///a.whl", "archive_info": {}}, id="wheel"),
        pytest.param({"url": "file:///gone", "dir_info": {"editable": True}}, id="clone that is gone"),
    ],
)
def test_from_elsewhere(origin: dict[str, object] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed_from(origin, tmp_path, monkeypatch)
    assert install_command("hana") == 'pip install "owl-sap-connector[hana]"'


def test_not_installed_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    root = Path(extras.__file__).parents[1]
    assert install_command("hana") == f'pip install -e ".[hana]" in the folder {root}'


def test_an_emulator_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the folder hana_emulator/ of a clone lies on the path without the package."""
    assert extras.emulator_command()[1:] == ["-m", "hana_emulator"]
    folder = clone(tmp_path)
    installed_from({"url": folder.as_uri(), "dir_info": {"editable": True}}, tmp_path, monkeypatch)
    for found in (None, ModuleSpec("hana_emulator", None)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        with pytest.raises(ModuleNotFoundError) as caught:
            extras.emulator_command()
        assert extras.missing_module(caught.value) == str(caught.value)
        assert f"pip install ./hana_emulator in the folder {folder}" in str(caught.value)
