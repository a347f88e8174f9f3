"""Benchmarks run to their end and say what they measured; how fast it was is no test's business."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.emulator.process import REPOSITORY


@pytest.mark.slow
def test_the_benchmark_of_syncs_runs(tmp_path):
    parts = ["rate", "unchanged", "memory", "one", "methods"]
    command = [sys.executable, "benchmarks/sync.py", *parts, "--rows", "400", "--rounds", "2"]
    out = tmp_path / "sync.json"
    done = subprocess.run([*command, "--out", str(out)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert json.loads(done.stdout) == report
    assert list(report["results"]) == parts
    for kind in ("local", "hana"):
        assert report["results"]["rate"][kind]["median"] > 0
        assert len(report["results"]["unchanged"][kind]["rounds"]) == 2
        assert report["results"]["memory"][kind]["few"][0] > 10
    assert report["machine"]["commit"]


@pytest.mark.slow
def test_a_part_that_does_not_exist_is_named():
    command = [sys.executable, "benchmarks/sync.py", "nothing"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no part nothing" in done.stderr


@pytest.mark.slow
def test_the_benchmark_of_rest_runs(tmp_path):
    out = tmp_path / "rest.json"
    command = [sys.executable, "benchmarks/rest.py", "--rounds", "2", "--seconds", "0.2", "--out", str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert json.loads(done.stdout) == report
    assert set(report["verdicts"]) == set(report["targets"])
    assert (
        report["results"]["small"]["embed"]["cpu_us"]["median"] > report["results"]["small"]["bare"]["cpu_us"]["median"]
    )
    assert report["results"]["forms"]["floats"]["median"] > report["results"]["forms"]["raw"]["median"]
