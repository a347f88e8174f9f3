"""Coverage-guided fuzzing of the filter language: `python -m tests.fuzz.filter_target CORPUS...`

An input is two JSON documents, a filter and the metadata of a row, with a zero byte between them.
"""

from __future__ import annotations

import json
import sys

import atheris

with atheris.instrument_imports(include=["connector"]):
    from tests.fuzz import outcomes

DATABASE = outcomes.database()


def run(data: bytes) -> None:
    where, _, metadata = data.partition(b"\0")
    try:
        given = json.loads(where), json.loads(metadata or b"{}")
    except (ValueError, RecursionError):
        return
    outcomes.check_filter(given[0], given[1] if isinstance(given[1], dict) else {}, DATABASE)


if __name__ == "__main__":
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
