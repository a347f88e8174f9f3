"""A calibration in a service on a CPU without fast bf16, where `auto` then takes int8: all collections of the model
stay searchable, whichever vectors they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.src.access.principal import OPERATOR
from app.src.core.backends.folder import find_folder
from app.src.service.service import Service
from app.src.service.sync import BuildReport
from app.src.settings import Settings
from connector.errors import ModelMismatch
from connector.sync.documents import NewDocument
from tests.api.conftest import TableSource
from tests.core.conftest import make_tiny_folder
from tests.core.test_int8 import needs_vnni

pytestmark = needs_vnni
NAMES = ("materials", "parts", "notes")


@pytest.fixture
def start(
    settings: Settings, source: TableSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Service]]:
    """Start a service over `materials` and `parts`, which are the same table, and `notes`, written by clients."""
    monkeypatch.setattr("app.src.core.backends.torch.linears.bf16_gain", lambda: 0.02)
    words = ("steel", "rubber", "copper", "oak", "glass"), ("pump", "seal", "wire", "door", "pane", "filter", "hose")
    for number in range(200):
        kind, thing = words[0][number % 5], words[1][number % 7]
        text = f"{kind} {thing} of size {number}"
        source.rows_by_key[f"{number:03}"] = {"MATNR": f"{number:03}", "MAKTX": text, "MTART": "ROH"}
    folder = make_tiny_folder(tmp_path, find_folder("all-MiniLM-L6-v2"))
    block = {"source": "S.MARA", "template": "{MAKTX}"}
    changed = Settings.model_validate(
        {
            "store": {"kind": "local", "path": tmp_path / "vectors"},
            "state": {"path": tmp_path / "state"},
            "embedding": {"model": str(folder), "device": "cpu"},
            "collections": [*(block | {"name": name} for name in NAMES[:2]), {"name": "notes", "documents": True}],
        }
    )
    made: list[Service] = []

    def make() -> Service:
        made.append(Service(changed, source=source))
        return made[-1]

    yield make
    for service in made:
        service.close()


def put(service: Service, *texts: str) -> None:
    service.documents.put("notes", [NewDocument(text, text, {}) for text in texts], principal=OPERATOR)


def found(service: Service, name: str) -> str:
    """Return the first text and the family of vectors that answered."""
    (hit,) = service.search.run(name, "copper wire of size 37", 1, principal=OPERATOR).hits
    return f"{hit.text}, {service.generations.embedder_of(name).fingerprint.rpartition('/')[2]}"


def test_a_calibration_takes_no_collection_from_the_search(start: Callable[[], Service]) -> None:
    before = start()
    for name in NAMES[:2]:
        before.sync.run(name)
    put(before, "copper wire of size 37", "oak door")
    float_ = [found(before, name) for name in NAMES]
    done = before.tuning.calibrate("materials", 160)
    assert done["accepted"], done["reason"]
    assert "the next sync of materials, parts builds a generation in int8" in done["notes"][0]
    assert "notes, written by clients, stays as it is" in done["notes"][1]

    after = start()
    assert after.parts.embedder.engine.precision == "int8"
    assert [found(after, name) for name in NAMES] == float_
    put(after, "glass pane")
    report = after.sync.run("materials")
    assert isinstance(report, BuildReport)
    assert report.serving is not None
    assert (report.serving.embedded_texts, report.upserted) == (0, 204)
    assert [found(after, name) for name in NAMES] == float_
    after.generations.switch("materials")
    in_int8, *others = (found(after, name) for name in NAMES)
    assert in_int8.startswith("copper wire of size 37, int8-")
    assert others == float_[1:]
    assert after.sync.verify("materials").ok
    (kept,) = after.tuning.calibrate("parts", 160)["notes"]
    assert "no vector changes" in kept
    assert found(start(), "materials") == in_int8


def test_a_generation_whose_calibration_is_gone_says_what_to_do(start: Callable[[], Service], tmp_path: Path) -> None:
    first = start()
    assert first.tuning.calibrate("materials", 160)["accepted"]
    calibrated = start()
    calibrated.sync.run("materials")
    for file in calibrated.parts.graphs_folder.glob("ranges-*/*"):
        file.unlink()
    with pytest.raises(ModelMismatch, match=r"no calibration int8-.*owl-sap calibrate NAME.*owl-sap sync materials"):
        start().generations.embedder_of("materials")
