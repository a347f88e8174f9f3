"""Coverage-guided fuzzing of templates: `python -m tests.fuzz.template_target CORPUS...`

An input is a template and the values of its columns, with zero bytes between them.
"""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["connector"]):
    from tests.fuzz import outcomes


def run(data: bytes) -> None:
    text, *values = data.decode("utf-8", "surrogateescape").split("\0")
    outcomes.check_template(text, values)


if __name__ == "__main__":
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
