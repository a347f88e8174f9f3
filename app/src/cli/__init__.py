"""The command `owl-sap`: `commands` (the verbs), `exits` (exit codes), `output` (what is printed), `progress` and
`interrupts`. Every verb calls one method of the service; torch is only imported by verbs that compute vectors.
"""

from app.src.cli.commands import main

__all__ = ["main"]
