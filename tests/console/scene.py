"""What the console is tried on: a table in memory with texts to find, columns of every kind to filter by, and hostile
rows; and what a page did that it must not do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from playwright.sync_api import ConsoleMessage, Page, Request

from app.src.settings import Settings
from connector.model import Column, Table
from tests.api.conftest import MATERIALS, TableSource

SCRIPT = '<img src=x onerror="document.title=\'owned\'"><script>document.title="owned"</script>'
OVERRIDE = "\u202egnp.exe\u2066 backwards"
LONG_WORD = "Donaudampfschifffahrt" * 5_000
"""105,000 characters without a blank."""
HOSTILE = {"H1": f"{SCRIPT} hostile markup", "H2": f"{OVERRIDE} hostile direction", "H3": f"hostile {LONG_WORD}"}
KINDS = ("gearbox bearing steel", "garden hose rubber", "hydraulic oil pump", "office chair with wheels")
COLUMNS = (
    Column("MATNR", "NVARCHAR", 18),
    Column("MAKTX", "NCLOB"),
    Column("MTART", "NVARCHAR", 4),
    Column("BRGEW", "DOUBLE"),
    Column("ERDAT", "DATE"),
    Column("LVORM", "BOOLEAN"),
)


class Shelf(TableSource):
    """S.MARA with 40 ordinary rows, one with accents and the hostile ones."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(MATERIALS, COLUMNS, primary_key=("MATNR",))
        self.rows_by_key = {f"{number:03}": _row(number) for number in range(1, 41)}
        self.rows_by_key["041"] = _row(41) | {"MAKTX": "Ölpumpe für Getriebe, geräuscharm"}
        for key, text in HOSTILE.items():
            self.rows_by_key[key] = _row(3) | {"MATNR": key, "MAKTX": text, "MTART": "<b>X"}


def _row(number: int) -> dict[str, Any]:
    return {
        "MATNR": f"{number:03}",
        "MAKTX": f"{KINDS[number % 4]} number {number}",
        "MTART": ("FERT", "ROH", "HALB")[number % 3],
        "BRGEW": number * 1.5,
        "ERDAT": date(2024, 1 + number % 12, 1 + number % 28),
        "LVORM": number % 10 == 0,
    }


def settings_in(folder: Path, **more: Any) -> Settings:
    """The test embedder, a local store under `folder`; `more`: sections of the settings, such as `access`."""
    block = {
        "name": "materials",
        "source": "S.MARA",
        "template": "{MAKTX}",
        "metadata": ["MTART", "BRGEW", "ERDAT", "LVORM"],
        "chunk": {"max_tokens": 64, "overlap": 8},
    }
    return Settings.model_validate(
        {
            "store": {"kind": "local", "path": folder / "vectors"},
            "embedding": {"model": "hash:64"},
            "collections": [block, block | {"name": "never"}],
        }
        | more
    )


@dataclass
class Watch:
    """What went wrong in pages: errors and warnings of its console (violations of the policy are among them), scripts
    that raised, requests that failed, and requests to anywhere but the service. Refused answers (4xx, 5xx) that a test
    wants are allowed by their status. `homes`: the addresses of services."""

    homes: set[str] = field(default_factory=set)
    troubles: list[str] = field(default_factory=list)
    _allowed: set[int] = field(default_factory=set)

    def allow(self, *statuses: int) -> None:
        self._allowed.update(statuses)

    def attach(self, page: Page, home: str) -> None:
        self.homes.add(home)
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.troubles.append(f"raised: {error}"))
        page.on("requestfailed", self._failed)
        page.context.on("request", self._asked)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            if any(f"the server responded with a status of {status} " in message.text for status in self._allowed):
                return
            self.troubles.append(f"{message.type}: {message.text}")

    def _failed(self, request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page's own wish
            self.troubles.append(f"failed: {request.method} {request.url} {request.failure}")

    def _asked(self, request: Request) -> None:
        if not any(request.url.startswith(f"{home}/") for home in self.homes):
            self.troubles.append(f"asked elsewhere: {request.url}")
