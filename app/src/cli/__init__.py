"""The command `owl-sap`: `application` registers the verbs, `exits` defines their exit codes, `output` prints; the
other modules hold the verbs. A verb imports what it needs when it runs, so that `--help` is quick."""

import gc

from app.src.cli import (  # noqa: F401 - they register their verbs
    advanced,
    collections,
    demo,
    init,
    keys,
    output,
    preparation,
    processes,
    scale,
    search,
)
from app.src.cli.application import app


def main() -> None:
    try:
        app(prog_name="owl-sap")
    finally:
        output.finish()
        gc.freeze()  # else Python looks for garbage once more before it ends, with torch for 0.2 s


__all__ = ["app", "main"]
