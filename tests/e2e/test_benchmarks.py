"""Benchmarks run to their end and say what they measured; how fast it was is no test's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


FORMS = ("base64", "floats", "raw")
ALONE = os.environ | {"OMP_NUM_THREADS": "1"}
"""Threads of OpenMP wait for each other within every operation: on busy cores that takes minutes."""


def read(out):
    report = json.loads(out.read_text())
    return report, {figure["name"]: figure for figure in report["figures"]}


@pytest.mark.slow
def test_the_benchmark_of_syncs_runs(tmp_path):
    parts = ["rate", "unchanged", "memory", "one", "delta"]
    command = [sys.executable, "benchmarks/sync.py", *parts, "--rows", "400", "--rounds", "2"]
    out = tmp_path / "sync.json"
    done = subprocess.run([*command, "--out", str(out)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report, found = read(out)
    assert list(dict.fromkeys(name.split(",")[0] for name in found)) == parts
    for kind in ("local", "hana"):
        assert found[f"rate, {kind}"]["median"] > 0
        assert found[f"rate, {kind}"]["target"]
        assert len(found[f"unchanged, {kind}"]["rounds"]) == 2
        assert found[f"memory, {kind}"]["few"][0] > 10
    assert report["machine"]["commit"]


@pytest.mark.slow
def test_the_benchmark_of_several_engines_runs(tmp_path):
    command = [sys.executable, "benchmarks/scale.py", "sleeping", "--rows", "400", "--rounds", "2"]
    out = tmp_path / "scale.json"
    done = subprocess.run([*command, "--out", str(out)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, found = read(out)
    for count in (4, 8):
        assert len(found[f"sleeping, {count} engines"]["rounds"]) == 2
        assert found[f"sleeping, {count} engines"]["median"] <= 1


@pytest.mark.slow
def test_the_benchmark_of_a_cluster_runs(tmp_path):
    pytest.importorskip("ray")
    out = tmp_path / "ray.json"
    command = [sys.executable, "benchmarks/scale.py", "overhead", "--rows", "400", "--rounds", "1", "--out", str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, env=ALONE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, found = read(out)
    assert found["overhead, time"]["median"] > 0
    assert found["overhead, CPU of all"]["median"] > 0
    assert 0 < found["overhead, CPU of this process"]["median"] < 1000


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
    report, found = read(out)
    judged = {name for name, figure in found.items() if figure["target"]}
    small = [f"small, {route}{key}" for route in ("embed", "openai") for key in ("", " with a key")]
    assert judged == {*small, *(f"forms, {form}, CPU of each" for form in FORMS)}
    assert found["small, embed, CPU of each"]["median"] > found["small, bare, CPU of each"]["median"]
    assert found["forms, floats, CPU of each"]["median"] > found["forms, raw, CPU of each"]["median"]
    assert report["machine"]["uvicorn"]


@pytest.mark.slow
def test_the_benchmark_of_searches_runs(tmp_path):
    out = tmp_path / "search.json"
    sizes = ["--sizes", "1000", "2000"]
    command = [
        sys.executable,
        "benchmarks/search.py",
        "store",
        "filters",
        "visible",
        "keyword",
        "service",
        "--rounds",
        "2",
        *sizes,
    ]
    done = subprocess.run([*command, "--out", str(out)], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report, found = read(out)
    for rows in ("1,000 rows", "2,000 rows"):
        assert found[f"{rows}, store"]["median"] > 0
        assert found[f"{rows}, visible, worst"]["target"] == "<= 100"
        assert len(found[f"{rows}, keyword, hybrid"]["rounds"]) == 2
        assert report["details"][rows]["build_seconds"] >= 0
    assert found["1,000 rows, service, hybrid / vector"]["target"] == "<= 3"


@pytest.mark.slow
def test_the_benchmark_of_searches_beside_loads_runs(tmp_path):
    out = tmp_path / "together.json"
    command = [sys.executable, "benchmarks/together.py", "--rounds", "1", "--rows", "60", "--think", "0.01"]
    done = subprocess.run(
        [*command, "--out", str(out)], cwd=REPOSITORY, env=ALONE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    _, found = read(out)
    ratio = found["embedding, p95 beside the load / idle"]
    assert ratio["idle_ms"]["searches"] == 60
    assert ratio["beside_ms"]["searches"] > 0
    assert found["embedding, load alone"]["median"] > 0


@pytest.mark.slow
def test_the_load_test_runs(tmp_path):
    out = tmp_path / "load.json"
    few = ["--model", "hash:64", "--connections", "100", "--seconds", "2", "--pause", "0.3", "--rounds", "2"]
    few += ["--rows", "300", "--questions", "50"]
    command = [sys.executable, "benchmarks/load.py", *few, "--out", str(out)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report, found = read(out)
    assert found["crowd, wrong answers"]["verdict"] == "met"
    assert found["crowd, wrong answers"]["compared"] > 100
    assert found["crowd, failures"]["verdict"] == "met", found["crowd, failures"]
    assert found["crowd, connections lost"]["verdict"] == "met"
    assert found["crowd, server grows by at most"]["before_mb"] > 10
    assert report["machine"]["uvicorn"]
