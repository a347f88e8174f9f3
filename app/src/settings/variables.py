"""Accepted environment variables besides OWL_SAP_<SECTION>__<KEY>: SAP's usual HANA_* names and those of the T4 guides,
each with its setting or the reason why it has no effect."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

Path = tuple[str, ...]  # path of a setting, such as ("hana", "port")


@dataclass(frozen=True, slots=True)
class Variable:
    """`assign` turns the variable's text into settings; its ValueError never shows the text. `assign` None: the
    variable is accepted without effect, and `note` says why."""

    name: str
    note: str
    assign: Callable[[str], Mapping[Path, Any]] | None = None


def _sets(name: str, setting: str, note: str = "", parse: Callable[[str], Any] = str) -> Variable:
    """Return a variable that sets `setting`. `parse` returns None for a text that changes nothing."""
    path = tuple(setting.split("."))

    def assign(text: str) -> Mapping[Path, Any]:
        value = parse(text)
        return {} if value is None else {path: value}

    return Variable(name, note or f"sets {setting}", assign)


def _flag(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("must be true or false")


def _number(text: str, what: str, least: int = 0) -> int:
    if not text.strip().isdecimal() or len(text) > 15 or int(text) < least:  # no memory has more bytes
        raise ValueError(f"must be {what}: a whole number of at least {least}, of 15 digits at most")
    return int(text)


_HANA = {name.upper(): name for name in ["host", "port", "user", "password", "userkey", "schema", "encrypt"]}
_HANA |= {"SSL_TRUST_STORE": "trust_store", "SSL_VALIDATE": "validate_certificate"}
_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "fp32_if_off": lambda text: None if _flag(text) else "fp32",
    "mebibytes": lambda text: _number(text, "in bytes", 1 << 20) >> 20,
    "device": lambda text: f"cuda:{number}" if (number := _number(text, "the number of a GPU")) else None,
}


def _of_guides(group: str) -> Iterator[Variable]:
    for entry in tomllib.loads(files(__package__).joinpath("variables.toml").read_text(encoding="utf-8"))[group]:
        for name in entry["names"]:
            if "sets" in entry:
                yield _sets(name, entry["sets"], entry.get("note", ""), _PARSERS.get(entry.get("parse", ""), str))
            else:
                yield Variable(name, entry["note"])


VARIABLES: tuple[Variable, ...] = (
    *(_sets(f"HANA_{name}", f"hana.{key}") for name, key in _HANA.items()),
    *(_sets(f"HANA_STORE_{name}", f"store.hana.{key}") for name, key in _HANA.items()),
    *_of_guides("t4_gpu"),
)

# HANA_* and T4_GPU_* override these, and OWL_SAP_* overrides them all.
GUIDE_VARIABLES: tuple[Variable, ...] = (
    *_of_guides("guides"),
    Variable(  # last, so that USE_GPU=false overrides GPU_DEVICE_ID
        "USE_GPU",
        "false sets embedding.device to cpu; true makes a missing GPU a warning, a metric and a fault in doctor",
        lambda text: {("embedding", "expect_gpu"): True} if _flag(text) else {("embedding", "device"): "cpu"},
    ),
)
