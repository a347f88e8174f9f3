"""`owl-sap benchmark embed --profile` shows every part of the packed path, and changes no vector."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.src.benchmark import profile
from app.src.core.backends.folder import find_folder
from app.src.core.loading import EngineOptions, load_engine
from connector.errors import ConfigurationError
from tests.core.conftest import make_tiny_folder


def test_the_parts_are_the_whole_and_vectors_stay(tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, find_folder("all-MiniLM-L6-v2"))
    with load_engine(EngineOptions(str(folder), device="cpu", precision="fp32")) as engine:
        before, attributes = engine.embed(["oil pump", "valve"]), dict(vars(profile.packed_encoder(engine)))
        report = profile.measure(engine, lambda _: None, rounds=2, scale=0.02, threads=1)
        np.testing.assert_array_equal(engine.embed(["oil pump", "valve"]), before)
        assert vars(profile.packed_encoder(engine)) == attributes
    assert [figure.name.partition(":")[0] for figure in report.figures] == ["short", "skewed", "long"]
    for figure in report.figures:
        parts = report.details[figure.name.partition(":")[0]]
        assert [part["part"] for part in parts] == list(profile.PARTS)
        assert sum(part["seconds"] for part in parts) == pytest.approx(figure.more["seconds"], rel=0.01)
        assert sum(part["share"] for part in parts) == pytest.approx(1, abs=0.01)
        products = [part for part in parts if part["floor_seconds"] is not None]
        assert [part["part"] for part in products] == ["QKV", "attention out", "wide + GELU", "narrow"]
        assert all(part["seconds"] > 0 for part in parts if part["part"] != "rest")


@pytest.mark.parametrize("options", [{"model": "hash:16"}, {"packed": False}])
def test_a_model_that_is_not_packed_has_no_profile(options: dict[str, object], tmp_path: Path) -> None:
    folder = make_tiny_folder(tmp_path, find_folder("all-MiniLM-L6-v2"))
    with (
        load_engine(EngineOptions(**{"model": str(folder), "device": "cpu", **options})) as engine,  # type: ignore[arg-type]
        pytest.raises(ConfigurationError, match=f"path {engine.path} on cpu"),
    ):
        profile.measure(engine, lambda _: None, rounds=1, scale=0.02, threads=1)


def test_int8_has_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts are not the products that are timed alone."""
    folder = make_tiny_folder(tmp_path, find_folder("all-MiniLM-L6-v2"))
    with load_engine(EngineOptions(str(folder), device="cpu", precision="fp32")) as engine:
        monkeypatch.setattr(engine, "precision", "int8")
        with pytest.raises(ConfigurationError, match="computed in int8 by the path packed"):
            profile.measure(engine, lambda _: None, rounds=1, scale=0.02, threads=1)
