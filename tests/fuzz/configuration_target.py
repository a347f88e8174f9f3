"""Coverage-guided fuzzing of configuration: `python -m tests.fuzz.configuration_target CORPUS...`

An input is a configuration file, and lines NAME=TEXT of an environment, with a zero byte between them.
"""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["app.src.settings", "tomllib"]):
    from tests.fuzz import outcomes

FOLDER = Path(tempfile.mkdtemp(prefix="owl-sap-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def run(data: bytes) -> None:
    toml, _, lines = data.partition(b"\0")
    pairs = (line.partition("=") for line in lines.decode("utf-8", "surrogateescape").split("\n"))
    outcomes.check_configuration(FOLDER, toml, {name: text for name, equal, text in pairs if equal})


if __name__ == "__main__":
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
