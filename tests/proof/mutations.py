"""Plants the bugs of mutations.toml, one at a time, into a copy of the product and runs the tests named with each:
those pass without it and fail with it, or the tests are not worth their name.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutations.toml")
SOURCES = (".", "hana_emulator", "owl_sap_client")
COPIED = (
    "app",
    "connector",
    "hana_emulator",
    "owl_sap_client",
    "tests",
    "conftest.py",
    "pyproject.toml",
    "owl-sap.example.toml",
)
SECONDS = 180
HURRY = ("--hypothesis-profile=hurry",)
"""A failing example need not be made small."""
PASSED, FAILED = 0, 1
"""What pytest exits with; anything else (no such test, an error while collecting) proves nothing."""


PRODUCT = ("app", "connector")
EACH_RUN = 16


@dataclass(frozen=True, slots=True)
class Mutation:
    """In the function or class `place` of `file`, `old` becomes `new`; then at least one of `tests` must fail."""

    name: str
    file: str
    place: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Return `text` with the bug; raises ValueError when `old` does not stand once in that place."""
        found = [match for first, end in places(text, self.place) for match in self._pattern.finditer(text, first, end)]
        if len(found) != 1:
            raise ValueError(f"{self.name}: found {len(found)} times in {self.place} of {self.file}, not once")
        start, end = found[0].span()
        line = text[text.rfind("\n", 0, start) + 1 :]
        indent = line[: len(line) - len(line.lstrip())]
        changed = text[:start] + self.new.replace("\n", "\n" + indent) + text[end:]
        compile(changed, self.file, "exec")
        return changed

    @property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(r"\n\s*".join(re.escape(line.strip()) for line in self.old.splitlines()))

    def located(self, root: Path) -> Path:
        """Return the file that takes the bug: the one named, or the only other one with that place."""
        if (named := root / self.file).is_file() and self._fits(named):
            return named
        others = [path for folder in PRODUCT for path in sorted((root / folder).rglob("*.py")) if self._fits(path)]
        if len(others) != 1:
            raise ValueError(f"{self.name}: {self.place} of {self.file} has changed; {len(others)} other files fit")
        return others[0]

    def _fits(self, path: Path) -> bool:
        try:
            self.applied(path.read_text(encoding="utf-8"))
        except (ValueError, SyntaxError):
            return False
        return True


def places(text: str, name: str) -> Iterator[tuple[int, int]]:
    """Yield where the functions and classes of this qualified name begin and end in the text."""
    starts = [0, *(match.end() for match in re.finditer("\n", text)), len(text)]
    waiting: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    while waiting:
        prefix, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            own = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own = f"{prefix}.{child.name}".lstrip(".")
                if own == name:
                    yield starts[child.lineno - 1], starts[child.end_lineno or child.lineno]
            waiting.append((own, child))


def chosen_for_commit() -> tuple[list[Mutation], list[Mutation]]:
    """Return the mutations that this commit plants, and the others; another commit plants others."""
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    every = mutations()
    first = int(done.stdout.strip()[:8] or "0", 16) % len(every)
    turned = every[first:] + every[:first]
    step = max(1, len(every) // EACH_RUN)
    chosen = turned[::step][:EACH_RUN]
    return chosen, [mutation for mutation in every if mutation not in chosen]


def mutations() -> list[Mutation]:
    entries = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutation"]
    return [Mutation(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]


def unhurried() -> dict[str, str]:
    """The environment without the time at which .ci/run lets no further test begin (conftest.py): tests that are
    skipped for it pass, and would not have noticed the bug."""
    return {name: value for name, value in os.environ.items() if name != "OWL_TESTS_UNTIL"}


class Copy:
    """A copy of the product and its tests, in which things may be broken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, folder / name)

    @contextmanager
    def broken(self, mutation: Mutation) -> Iterator[None]:
        file = mutation.located(self._folder)
        whole = file.read_text(encoding="utf-8")
        file.write_text(mutation.applied(whole), encoding="utf-8")
        try:
            yield
        finally:
            file.write_text(whole, encoding="utf-8")

    def test(self, tests: Sequence[str], seconds: int = SECONDS) -> tuple[int, str]:
        """Pytest's exit code and the end of what it said."""
        done = subprocess.run(
            [
                sys.executable,
                "-B",
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-m",
                "not slow",
                *HURRY,
                *tests,
            ],
            cwd=self._folder,
            env=unhurried() | {"PYTHONPATH": os.pathsep.join(str(self._folder / name) for name in SOURCES)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
        return done.returncode, done.stdout[-3000:]


def judged(copy: Copy, mutation: Mutation) -> str:
    """What is wrong; nothing when it was caught."""
    try:
        with copy.broken(mutation):
            code, said = copy.test(mutation.tests)
    except (ValueError, SyntaxError) as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"{mutation.name}: its tests did not end within {SECONDS} s"
    if code == PASSED:
        return f"{mutation.name}: no test noticed it"
    return "" if code == FAILED else f"{mutation.name}: pytest ended with {code}, which proves nothing\n{said}"


def run(chosen: Sequence[Mutation], workers: int = 2) -> list[str]:
    """What is wrong with the list or the tests; empty when every bug was caught."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies: SimpleQueue[Copy] = SimpleQueue()
        first = Copy(Path(folder) / "0")
        tests = sorted({test for mutation in chosen for test in mutation.tests})
        code, said = first.test(tests, SECONDS * (1 + len(tests) // 6))
        if code != PASSED:
            return [f"without any bug the tests end with {code}\n{said}"]
        copies.put(first)
        for number in range(1, workers):
            copies.put(Copy(Path(folder) / str(number)))

        def one(mutation: Mutation) -> str:
            copy, began = copies.get(), time.perf_counter()
            try:
                wrong = judged(copy, mutation)
            finally:
                copies.put(copy)
            outcome = "NOT CAUGHT" if wrong else "caught"
            print(f"{outcome:>10}  {time.perf_counter() - began:5.1f} s  {mutation.name}", flush=True)
            return wrong

        with ThreadPoolExecutor(workers) as threads:
            return [wrong for wrong in threads.map(one, chosen) if wrong]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutations", description=__doc__)
    parser.add_argument("-k", default="", metavar="WORDS", help="only those with these words in their names")
    parser.add_argument("-j", type=int, default=2, metavar="N", help="so many at once (default: 2)")
    arguments = parser.parse_args()
    chosen = [mutation for mutation in mutations() if arguments.k in mutation.name]
    wrong = run(chosen, arguments.j)
    for each in wrong:
        print(each, file=sys.stderr)
    if not wrong:
        print(f"all {len(chosen)} bugs were caught")
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
