"""The demonstration: its parts, and the whole of it once with the real model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.src import demo
from app.src.api.openapi import BASE
from app.src.demo import Demo
from app.src.settings import Settings
from connector.errors import ConfigurationError, Unavailable
from connector.extras import emulator_command

ROOT = Path(__file__).parents[2]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_demo_asks_twelve_queries_of_three_collections() -> None:
    prepared = Demo(Settings())
    assert len(prepared.queries) == 12
    assert len({query["collection"] for query in prepared.queries}) == 3
    assert all(query["expect"] for query in prepared.queries)


def test_the_test_embedder_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="real model"):
        Demo(Settings.model_validate({"embedding": {"model": "hash:8"}}))


@pytest.mark.not_fast
def test_an_emulator_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "emulator_command", lambda: ["/bin/false"])
    with pytest.raises(Unavailable, match="did not start"), demo.emulator(tmp_path):
        pass


@pytest.mark.not_fast
def test_the_emulator_ends_with_its_context(tmp_path: Path) -> None:
    with demo.announced([*emulator_command(), "--port", "0", "--data", str(tmp_path)], tmp_path) as (process, _):
        assert alive(process.pid)
    assert not alive(process.pid)


@pytest.mark.slow
def test_the_whole_demo_and_its_rest_service(tmp_path: Path) -> None:
    before = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "demo", "--json", "--serve", "--port", "0"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "PATH": os.defpath, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        report = json.loads(process.stdout.readline() or "null")
        assert report, process.communicate()[1]
        assert report["ok"]
        assert [search["found"] for search in report["searches"]] == [True] * 12
        assert all(verified["ok"] for verified in report["verify"])
        assert sum(synced["tokens"] for synced in report["sync"]) <= 120_000
        assert {each["model"] for each in report["models"]} == {"all-MiniLM-L6-v2", "use-multilingual"}
        assert all(len(each["weights_sha256"]) == 64 for each in (report, *report["models"]))
        url = json.loads(process.stdout.readline())["url"]
        assert httpx.get(f"{url}/health/ready", timeout=30).status_code == 200
        body = {"query": "seat for a bad back", "k": 3, "filter": {"SPRAS": "E"}}
        assert "/console/main.js" in httpx.get(f"{url}/", timeout=30).text
        hits = httpx.post(f"{url}/v1/collections/materials/search", json=body, timeout=30).json()["hits"]
        assert len(hits) == 3
        found = first_of_the_clients_page(url)
        assert "Ergonomic swivel chair" in found.hits[0].text
        assert found.hits[0].key["MATNR"] in {"000000000000100194", "000000000000100195", "000000000000100196"}
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
    assert list(tmp_path.glob("owl-sap-demo-*")) == []
    assert time.monotonic() - before < 240


def first_of_the_clients_page(url: str) -> Any:
    """What the first example of docs/client.md finds in the demo."""
    page = (ROOT / "docs/client.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)[0].replace(BASE, url), names)
    names["client"].close()
    return names["found"]
