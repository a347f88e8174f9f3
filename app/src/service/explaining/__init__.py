"""Titles, causes and remedies of errors, from errors.toml, found by class or code. Compares class names, so that
it need not import the classes."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Explained:
    """One error. `causes`: the usual ones; `do`: steps in order; `see`: documentation pages relative to docs/; `exit`:
    the exit code of a command that ends with it."""

    code: str
    error: str
    title: str
    what: str
    do: Sequence[str]
    causes: Sequence[str] = ()
    see: Sequence[str] = ()
    exit: int = 4


@cache
def explained() -> Mapping[str, Explained]:
    """Return the errors by class name, in the order of the file."""
    table = tomllib.loads(files(__package__).joinpath("errors.toml").read_text(encoding="utf-8"))
    return {name: Explained(error=name, **entry) for name, entry in table.items()}


def explained_as(error: BaseException) -> Explained:
    """Return the entry of the error's class, else of its nearest base class, else of "unexpected"."""
    table = explained()
    ours = [kind.__name__ for kind in type(error).__mro__ if kind.__module__.split(".")[0] in ("app", "connector")]
    return next(table[name] for name in (*ours, "Exception") if name in table)


def code_of(error: BaseException) -> str:
    return explained_as(error).code


def by_code(code: str) -> Explained:
    """Return the error with this code, typed as OWL-1011, owl1011 or 1011. Raises
    LookupError, which names the nearest codes."""
    number = re.sub(r"\A(owl)?[-_ ]?", "", code.strip(), flags=re.IGNORECASE)
    known = {each.code: each for each in explained().values()}
    if (found := known.get(f"OWL-{number}")) is None:
        near = difflib.get_close_matches(f"OWL-{number}", known, n=3)
        raise LookupError(
            f"no error has the code {code!r}; {'near it: ' + ', '.join(near) if near else 'see docs/errors.md'}"
        )
    return found
