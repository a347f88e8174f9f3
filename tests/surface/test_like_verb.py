"""`owl-sap search --like` over each kind of store."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from typer.testing import CliRunner

from app.src.cli import app as owl_sap
from tests.adversity.scene import Scene


def run(scene: Scene, *arguments: str, code: int = 0) -> Any:
    done, out, errors = scene.verb(*arguments)
    assert done == code, errors
    return out, errors


def test_from_a_hit_to_others_like_it(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene("hana", rows=40)
    scene.sync()
    name = scene.spec.name
    (first,) = json.loads(run(scene, "search", name, "pump 8 of plant 1", "-k", "1", "--json")[0])
    alike = json.loads(run(scene, "search", name, "--like", first["id"], "-k", "5", "--json")[0])
    assert len(alike) == 5
    assert first["id"] not in {hit["id"] for hit in alike}


def test_what_is_refused(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene("local", rows=10)
    scene.sync()
    name = scene.spec.name
    for arguments, words in (
        (("search", name, "--like", '["nobody"]'), "has no row with this id"),
        (("search", name, "--like", "[1]", "--mode", "hybrid"), "searches words"),
        (("search", "nobody", "x"), 'no collection is named "nobody"'),
    ):
        assert words in run(scene, *arguments, code=2)[1]
    refused = run(scene, "search", name, "--like", "4711", code=2)[1]
    assert re.search(rf"has no row with this id.*; owl-sap search {name} --json shows ids \[OWL-1017\]", refused)


def test_either_a_text_or_a_row() -> None:
    for more in ((), ("pump", "--like", "x")):
        refused = CliRunner().invoke(owl_sap, ["search", "materials", *more])
        assert refused.exit_code == 2
        assert "either TEXT or --like ID" in refused.stderr
