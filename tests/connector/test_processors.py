import os

import pytest

from connector.processors import processors


@pytest.fixture(autouse=True)
def of_the_host(monkeypatch):
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this system has no CPU affinity")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


@pytest.mark.parametrize(
    ("quota", "allowed"),
    [
        ("200000 100000\n", 2),
        ("250000 100000\n", 3),
        ("25000 100000\n", 1),
        ("9900000 100000\n", 64),
        ("max 100000\n", 64),
    ],
)
def test_a_quota_limits_the_processors(tmp_path, quota, allowed):
    (tmp_path / "cpu.max").write_text(quota)
    assert processors(tmp_path) == allowed


@pytest.mark.parametrize(("quota", "allowed"), [("150000\n", 2), ("-1\n", 64)])
def test_a_quota_of_version_1(tmp_path, quota, allowed):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(quota)
    assert processors(tmp_path) == 64, "half of the files"
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert processors(tmp_path) == allowed


def test_without_control_groups(tmp_path):
    assert processors(tmp_path / "missing") == 64
