"""One line of doctor's report and how it comes about: a probe gives a detail, or a fault with its fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

_NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `fix` is empty when `ok`. What was not looked at is not ok either."""

    check: str
    ok: bool
    detail: str
    fix: str = ""

    @property
    def skipped(self) -> bool:
        return not self.ok and self.detail.startswith(_NOT_CHECKED)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Fault(Exception):
    """A probe found something wrong: what, and what to do."""

    def __init__(self, detail: str, fix: str) -> None:
        super().__init__(detail)
        self.fix = fix


Probe = Callable[[], str]
"""Returns the detail of a line that is ok; raises Fault, or an error whose message may be shown."""


@dataclass(frozen=True, slots=True)
class Step:
    """A line to be. `needs`: lines without which it makes no sense. `fix`: for errors that bring none of their own."""

    name: str
    probe: Probe
    needs: tuple[str, ...] = ()
    fix: str = ""

    def run(self, done: Mapping[str, Check], expected: tuple[type[Exception], ...]) -> Check:
        """`expected`: errors whose message may be shown; of any other only the class is."""
        for needed in self.needs:
            if needed in done and not done[needed].ok:
                return Check(self.name, False, f'{_NOT_CHECKED}: "{needed}" failed', f'Fix "{needed}" first.')
        try:
            return Check(self.name, True, self.probe())
        except Fault as fault:
            return Check(self.name, False, str(fault), fault.fix)
        except expected as error:
            return Check(self.name, False, str(error), self.fix or "see the message")
        except Exception as error:
            return Check(self.name, False, f"unexpected error: {type(error).__name__}", self.fix or "please report it")
