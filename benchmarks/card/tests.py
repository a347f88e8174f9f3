"""The tests that need a card, run by plain pytest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from app.src.benchmark.harness import ROOT, Figure

from .models import minilm
from .run import Run


def tests(run: Run) -> Iterator[Figure | str]:
    """Run the tests of tests/core marked gpu by plain pytest."""
    folder = minilm(run.model) or run.folder_of("minilm")[1]
    files = sorted(
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests/core").rglob("test_*.py")
        if "pytest.mark.gpu" in file.read_text(encoding="utf-8")
    )
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "tests.xml"
        plain = ["-c", os.devnull, f"--rootdir={ROOT}", "--import-mode=importlib", "-p", "no:cacheprovider", "-v"]
        # The conftest of the checkout is for all tests and needs more.
        plain += [f"--confcutdir={ROOT / 'tests/core'}", "-W", "ignore::pytest.PytestUnknownMarkWarning"]
        command = [sys.executable, "-m", "pytest", *plain, "-m", "gpu", f"--junitxml={out}", *files]
        environment = os.environ | {"OWL_TEST_MINILM": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sys.stderr)
        try:
            process.wait(max(1.0, 1.2 * run.left))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then writes what it has
            process.wait()
        cases = list(ElementTree.parse(out).iter("testcase")) if out.exists() else []  # nosec B314 # our own
    outcomes = {"passed": 0, "skipped": 0, "failed": 0}
    reasons: dict[str, int] = {}
    for case in cases:
        name = f"{case.get('classname')}.{case.get('name')}"
        wrong = [each for each in case if each.tag in ("failure", "error")]
        skipped = case.find("skipped")
        outcomes["failed" if wrong else "passed" if skipped is None else "skipped"] += 1
        if wrong:
            yield Figure(f"test {name}", (), error=str(wrong[0].get("message")).partition("\n")[0][:200])
        elif skipped is not None:
            reason = str(skipped.get("message"))
            reasons[reason] = reasons.get(reason, 0) + 1
    yield from (f"tests, {count} skipped: {reason}" for reason, count in reasons.items())
    for outcome, count in outcomes.items():
        yield Figure(f"tests {outcome}", [count], "")
    if process.returncode not in (0, 1) or not cases:
        raise RuntimeError(f"pytest ended with exit code {process.returncode} and {len(cases)} tests")
