""".ci/run with stubs for check and test: what makes it red, and what the time limit does."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.ops.conftest import Host

ROOT = Path(__file__).resolve().parents[2]
SLOW = "-m slow -x --durations=20"
STUB = """#!/usr/bin/env bash
printf '%s\\n' "CI=$CI ${0##*/} $*" >>"$STUB_LOG"
case "${0##*/} $*" in
  "check ") exit "${STUB_CHECK:-0}" ;;
  "test ") exit "${STUB_TEST:-0}" ;;
  "test -m slow -x --durations=20") exit "${STUB_SLOW:-0}" ;;
esac
"""


@pytest.fixture
def project(host: Host) -> Host:
    (host.folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", host.folder / ".ci/run")
    for name in ("check", "test"):
        path = host.folder / "scripts" / name
        path.write_text(STUB)
        path.chmod(0o755)
    return host


def test_runs_check_test_and_slow_tests_as_ci(project: Host) -> None:
    result = project.run(".ci/run")
    assert result.returncode == 0, result.stdout
    assert project.log.splitlines() == ["CI=true check ", "CI=true test ", f"CI=true test {SLOW}"]


@pytest.mark.parametrize(
    ("variable", "status", "code"),
    [
        pytest.param("STUB_CHECK", "1", 1, marks=pytest.mark.slow),
        ("STUB_TEST", "1", 1),
        ("STUB_TEST", "5", 1),  # no tests at all is no green
        ("STUB_SLOW", "1", 1),
        pytest.param("STUB_SLOW", "5", 0, marks=pytest.mark.slow),  # there are no slow tests
        ("STUB_SLOW", "124", 0),  # cut off by the time limit
    ],
)
def test_what_makes_it_red(project: Host, variable: str, status: str, code: int) -> None:
    project.variables[variable] = status
    result = project.run(".ci/run")
    assert result.returncode == code
    assert len(project.log.splitlines()) == 3, "one red step does not keep the others from running"


def test_slow_tests_are_left_out_when_there_is_no_time(project: Host) -> None:
    project.variables["OWL_CI_MINUTES"] = "0"
    result = project.run(".ci/run")
    assert result.returncode == 0
    assert "no time left for the slow tests" in result.stdout
    assert "-m slow" not in project.log


@pytest.mark.slow
def test_a_suite_that_outlasts_the_limit_is_red(project: Host) -> None:
    (project.folder / "scripts/test").write_text("#!/usr/bin/env bash\nexec sleep 20\n")
    project.variables["OWL_CI_MINUTES"] = "0"
    result = project.run(".ci/run")
    assert result.returncode == 1
    assert "FAILED: test" in result.stdout


def test_no_slow_test_begins_shortly_before_the_limit(project: Host) -> None:
    """pytest is told until when: a test that is cut off in its middle looks like one that failed."""
    slow = project.folder / "scripts/test"
    slow.write_text('#!/usr/bin/env bash\necho "until ${OWL_TESTS_UNTIL:-ever}"\n')
    project.variables["OWL_CI_MINUTES"] = "10"
    before = time.time()
    result = project.run(".ci/run")
    assert result.returncode == 0
    default, slow_ones = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("until ")]
    assert default == "ever"
    assert before + 340 < float(slow_ones) < time.time() + 370


def test_a_test_after_the_time_is_skipped(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins: list[Any] = list(pytestconfig.pluginmanager.get_plugins())
    (ours,) = [each for each in plugins if getattr(each, "__file__", None) == str(ROOT / "conftest.py")]
    assert float(os.environ.get("OWL_TESTS_UNTIL", "inf")) == ours.UNTIL
    monkeypatch.setattr(ours, "UNTIL", time.time() - 60)
    with pytest.raises(pytest.skip.Exception, match="the time of this run is over"):
        ours.pytest_runtest_setup()
