"""OWL_SAP_FAILPOINT: a process that ends itself where a test wants it to; inactive unless the environment says so."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from connector.failpoints import NAMES, hook
from tests.adversity.scene import Scene

Cli = Callable[..., Any]


@pytest.mark.proves(1)
def test_the_process_ends_there_and_the_next_run_heals(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene("local")
    code, _, errors = scene.cli("sync", "rows", env={"OWL_SAP_FAILPOINT": "after_apply:2"})
    assert (code, "after_apply:2 is armed" in errors) == (-signal.SIGKILL, True)
    assert 20 <= len(scene.sound()) <= 60
    scene.converges()


def test_one_that_raises_is_an_unexpected_error(make_scene: Callable[..., Scene]) -> None:
    scene = make_scene("local")
    code, _, errors = scene.cli("sync", "rows", env={"OWL_SAP_FAILPOINT": "after_lease:1:raise"})
    assert (code, "unexpected error" in errors, "InjectedFailure" in errors) == (4, True, True), errors
    scene.converges()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("after_breakfast", "unknown failpoint 'after_breakfast'; use one of after_lease"),
        ("after_read:0", "invalid visit number"),
        ("after_read:many", "invalid visit number"),
        ("after_read:1:explode", "kill, stop, raise"),
    ],
)
def test_an_invalid_failpoint_is_refused_before_anything_happens(cli: Cli, text: str, words: str) -> None:
    run = cli("status", OWL_SAP_FAILPOINT=text)
    assert (run.code, run.out) == (2, "")
    assert "environment OWL_SAP_FAILPOINT" in run.err
    assert words in run.err


def test_no_file_can_arm_one(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("OWL_SAP_FAILPOINT=after_read\n")
    run = cli("status")
    assert (run.code, "only the environment" in run.err) == (2, True)


@pytest.mark.parametrize("name", NAMES)
def test_each_counts_its_own_visits(name: str) -> None:
    visit = hook(f"{name}:2:raise")
    for other in NAMES:
        visit(other)
    with pytest.raises(RuntimeError, match=name):
        visit(name)
    visit(name)
