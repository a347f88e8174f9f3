"""Which build of torch a card and its driver need; no card and no torch needed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from app.src.core.device import BUILDS, builds_for, driver_ceiling, what_to_install

ROOT = Path(__file__).resolve().parents[2]
CU126 = "--index-url https://download.pytorch.org/whl/cu126"


# capability, driver branch -> what the sentence has
ADVICE: list[tuple[tuple[int, int], int | None, list[str]]] = [
    ((6, 1), None, ["pip install 'torch==2.13.*'", CU126, "up to torch 2.14", "driver 525 to 580"]),
    ((6, 0), 550, [CU126, "driver 525 to 580"]),
    ((7, 0), 580, [CU126, "up to torch 2.14", "driver 525 to 580"]),
    ((7, 5), 580, ["pip install 'torch==2.13.*' (", "CUDA 13.0", "driver 580 or newer"]),
    ((7, 5), 550, [CU126, "driver 525 or newer"]),
    ((8, 9), 535, [CU126]),
    ((9, 0), None, ["CUDA 13.0"]),
    ((10, 0), 575, ["pip install 'torch==2.10.*' (", "CUDA 12.8"]),
    ((12, 0), 580, ["CUDA 13.0"]),
    ((7, 5), 470, ["driver 470 is too old", "install 580 or newer"]),
    ((6, 1), 470, ["driver 470 is too old", "install 525 to 580"]),
    ((3, 5), None, ["no build of torch", "3.5"]),
]


@pytest.mark.parametrize(("capability", "driver", "words"), ADVICE)
def test_what_to_install(capability: tuple[int, int], driver: int | None, words: list[str]) -> None:
    sentence = what_to_install(capability, driver)
    assert [word for word in words if word not in sentence] == []
    assert sentence[-1] != "."


def test_old_cards_have_no_ordinary_wheel_and_no_newer_driver() -> None:
    for capability in ((6, 0), (6, 1)):
        assert [build.index is None for build in builds_for(capability)] == [False]
    assert builds_for((7, 0))[0].index is not None
    assert driver_ceiling((7, 0)) == 580
    assert driver_ceiling((7, 5)) is None
    assert builds_for((3, 5)) == []


def test_builds_are_releases_that_pyproject_takes() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (bounds,) = [re.findall(r"\d+\.(\d+)", each) for each in extras["engine"] if each.startswith("torch")]
    least, below = (int(bound) for bound in bounds)
    minors = [int(build.torch.partition(".")[2]) for build in BUILDS]
    assert all(least <= minor < below for minor in minors)
    assert max(minors) == below - 1


def test_the_script_of_deployment_picks_from_them() -> None:
    """`deploy_t4_optimized.sh` knows the same releases and floors, and the image's locks hold those releases."""
    host = (ROOT / "scripts/lib/deploy/host.sh").read_text(encoding="utf-8")
    wheels = [build for build in BUILDS if build.index is None]
    releases = {build.torch for build in wheels}
    assert releases == set(re.findall(r"\b(\d+\.\d+) \(CUDA", host))
    floors = {int(number) for number in re.findall(r"\bdriver_\w+=(\d+)", host)}
    assert {build.driver for build in wheels} == floors
    locks = [ROOT / f"deployment/requirements/cuda{number}.txt" for number in (12, 13)]
    locked = [re.findall(r"^torch==(\d+\.\d+)\.", lock.read_text(encoding="utf-8"), re.M) for lock in locks]
    assert {release for each in locked for release in each} == releases
