"""The command `owl-sap`: `application` (options, errors), `commands` and its neighbours (verbs), `exits` (codes),
`output` (what is printed), `progress` and `interrupts`. Every verb calls one method of the service; torch is only
imported by verbs that compute vectors.
"""

from app.src.cli import (  # noqa: F401 - they register their verbs
    agents,
    benchmark,
    calibrating,
    changes,
    commands,
    containers,
    discovery,
    emulator,
    evaluating,
    explain,
    finetune,
    generations,
    grants,
    initialising,
    jobs,
    keys,
    output,
    quarantine,
    searching,
    worker,
)
from app.src.cli.application import app


def main() -> None:
    try:
        app(prog_name="owl-sap")
    finally:
        output.finish()


__all__ = ["app", "main"]
