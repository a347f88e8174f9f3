"""The Python of docs/client.md runs, block after block, against a served application; the ABAP of docs/rest.md names
operations and bodies that there are."""

from __future__ import annotations

import json
import re

import pytest

from app.src.api.openapi import BASE
from tests.docs.sections import ROOT
from tests.docs.test_rest_examples import Stage, described, stage

__all__ = ["stage"]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def test_the_pages_python_runs(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWL_SAP_API_KEY", "any")
    found = blocks("docs/client.md", "python")
    assert len(found) == 9
    stage.add_reranker()
    names: dict[str, object] = {}
    try:
        for block in found:
            exec(block.replace(BASE, stage.url), names)
    finally:
        names["client"].close()  # type: ignore[attr-defined]
    said = capsys.readouterr().out
    assert "Hydraulic oil pump" in said
    assert "OWL-" in said
    assert "result" in said


def test_the_page_names_all_arguments_and_errors() -> None:
    import owl_sap_client
    from owl_sap_client.sending import Connection

    page = (ROOT / "docs/client.md").read_text(encoding="utf-8")
    assert [name for name in (*Connection.__annotations__, *owl_sap_client.__all__) if f"`{name}" not in page] == []


def test_abap_asks_for_what_there_is() -> None:
    known = {operation.partition(" ")[2] for operation in described()}
    found = blocks("docs/rest.md", "abap")
    asked = [path for block in found for path in re.findall(r"['|](/(?:v1|embed)[^'|]*)['|]", block)]
    assert len(asked) == 4
    for path in asked:
        pattern = path.replace("materials", "{name}").replace("{ ls_started-job }", "{job_id}")
        assert pattern in known, path
    bodies = [re.sub(r"\{ escape.*?\}", "q", text) for block in found for text in _bodies(block)]
    assert [sorted(json.loads(body)) for body in bodies] == [["filter", "k", "mode", "query"], ["inputs"], ["full"]]


def _bodies(block: str) -> list[str]:
    """Literals in quotes, templates between bars, joined; in a template braces are escaped."""
    calls = re.findall(r"(?:set_text|set_cdata)\(\s*(.*?)\s\)\.\n", block, re.S)
    joined = ["".join(a or b for a, b in re.findall(r"'(\{.*\})'|\|(.*?)\|(?:\s|$)", call)) for call in calls]
    return [text.replace("\\{", "{").replace("\\}", "}") for text in joined]
