"""scripts/pin-images with stub commands: digests come from the registry, all or none, and none without docker."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "sha256:" + "ab" * 32
TOOLS = ("bash", "sed", "grep", "sort", "comm", "mktemp", "mkdir", "dirname", "chmod", "mv", "rm", "cat", "env")
BUILDX = """#!/bin/bash
printf 'docker %s\\n' "$*" >>"$STUB_LOG"
case "$*" in
  "buildx version") [[ $STUB_BUILDX == yes ]] ;;
  "buildx imagetools inspect --format {{.Manifest.Digest}} "*)
    [[ $STUB_REGISTRY == up && $* != *"$STUB_GONE"* ]] && printf '%s\\n' "$STUB_DIGEST" ;;
  "pull --quiet "*) [[ $STUB_REGISTRY == up ]] ;;
  "image inspect --format {{index .RepoDigests 0}} "*) image=${!#}; printf '%s@%s\\n' "${image%:*}" "$STUB_DIGEST" ;;
  *) exit 99 ;;
esac
"""


class Place:
    """A checkout with nothing but what the script reads, and a PATH of stubs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.target = folder / "deployment" / "images.env"
        self.log = folder / "log"
        (folder / "scripts").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("scripts/pin-images", "docker-compose.t4-optimized.yml"):
            (folder / name).write_text((ROOT / name).read_text(encoding="utf-8"))
        for tool in TOOLS:
            found = next(path for place in os.get_exec_path() if (path := Path(place) / tool).exists())
            (self.bin / tool).symlink_to(found)
        self.docker(BUILDX)

    def docker(self, text: str | None) -> None:
        stub = self.bin / "docker"
        stub.unlink(missing_ok=True)
        if text is not None:
            stub.write_text(text)
            stub.chmod(0o755)

    def run(self, *arguments: str, **stub: str) -> subprocess.CompletedProcess[str]:
        told = {"STUB_BUILDX": "yes", "STUB_REGISTRY": "up", "STUB_DIGEST": DIGEST, "STUB_GONE": "nothing-of-ours"}
        return subprocess.run(
            ["bash", str(self.folder / "scripts" / "pin-images"), *arguments],
            env={"PATH": str(self.bin), "STUB_LOG": str(self.log)} | told | stub,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def pinned(self) -> dict[str, str]:
        lines = self.target.read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "checkout")


@pytest.mark.parametrize("buildx", ["yes", "no"])
def test_every_image_of_the_compose_file_gets_the_digest_that_the_registry_gives(place: Place, buildx: str) -> None:
    done = place.run(STUB_BUILDX=buildx)
    assert done.returncode == 0, done.stderr
    compose = (ROOT / "docker-compose.t4-optimized.yml").read_text(encoding="utf-8")
    defaults = dict(re.findall(r"\$\{(OWL_[A-Z]+_IMAGE):-([^}]+)\}", compose))
    assert len(defaults) == 6
    assert place.pinned() == {name: f"{image}@{DIGEST}" for name, image in defaults.items()}


@pytest.mark.parametrize(
    ("stub", "told"),
    [
        ({"STUB_REGISTRY": "down"}, "no digest for"),
        ({"STUB_GONE": "grafana"}, "no digest for grafana/grafana"),
        ({"STUB_DIGEST": "latest"}, "no digest for"),
        ({"STUB_DIGEST": ""}, "no digest for"),
        ({"STUB_REGISTRY": "down", "STUB_BUILDX": "no"}, "no digest for"),
    ],
)
def test_without_every_digest_nothing_is_written(place: Place, stub: dict[str, str], told: str) -> None:
    place.target.parent.mkdir()
    place.target.write_text("as it was\n")
    done = place.run(**stub)
    assert (done.returncode, told in done.stderr) == (1, True), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [file.name for file in place.target.parent.iterdir()] == ["images.env"]
    assert place.target.read_text() == "as it was\n"


def test_without_docker_it_refuses(place: Place) -> None:
    place.docker(None)
    done = place.run()
    assert (done.returncode, "docker was not found" in done.stderr) == (1, True)
    assert not place.target.exists()


def test_check_tells_whether_tags_have_moved_and_writes_nothing(place: Place) -> None:
    nothing = place.run("--check")
    assert (nothing.returncode, "nothing is pinned yet" in nothing.stderr) == (1, True)
    place.run()
    before = place.target.read_text()
    assert place.run("--check").returncode == 0
    moved = place.run("--check", STUB_DIGEST="sha256:" + "cd" * 32)
    assert (moved.returncode, "python:3.11-slim@sha256:cdcd" in moved.stderr) == (1, True)
    assert place.target.read_text() == before


def test_unknown_arguments_and_help(place: Place) -> None:
    assert place.run("--force").returncode == 2
    assert "usage:" in place.run("--help").stdout


def test_no_digest_stands_in_the_repository() -> None:
    """None was ever asked for here."""
    for name in ("Dockerfile.t4", "docker-compose.t4-optimized.yml", ".env.example"):
        assert not re.search(r"sha256:[0-9a-f]{64}", (ROOT / name).read_text(encoding="utf-8"))
