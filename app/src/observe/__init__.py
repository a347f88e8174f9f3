"""Metrics, and the checks of `doctor`, `start`, `health` and readiness."""

from __future__ import annotations


class Fault(Exception):
    """A check found something wrong: what, and in `fix` what to do."""

    def __init__(self, detail: str, fix: str) -> None:
        super().__init__(detail)
        self.fix = fix
