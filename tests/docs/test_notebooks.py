"""The notebooks run from the first cell to the last, in a kernel of their own, and what they assert holds."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from app.src.settings.variables import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def name_of(path: Path) -> str:
    return path.stem


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
@pytest.mark.filterwarnings("ignore::RuntimeWarning:zmq", "ignore::DeprecationWarning")
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    assert all(cell["execution_count"] for cell in notebook.cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_what_is_committed_was_run_and_names_no_machine(path: Path) -> None:
    """In order, from a fresh kernel, without an error; and no folder of whoever ran it."""
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    told = " ".join(
        str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", "")) for output in outputs
    )
    assert "/tmp/" not in told
    assert "/home/" not in told
    assert str(ROOT) not in told
