"""The sample rows, computed from the text files in this folder; equal on every machine and in every run."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from decimal import Decimal
from importlib.resources import files
from itertools import count
from random import Random
from typing import Any

Row = tuple[str | None, ...]  # Storage values in the order of the table's fields; DECIMAL as text

PRODUCTIVE, TEST, SISTER = "100", "200", "300"  # the sister plant writes German
INITIAL_DATE = "00000000"
_SEED = 20_240_229
_FIRST_DAY = date(2023, 1, 2)
_USERS = ("MEIERA", "OKAFORJ", "SCHMIDTT", "NOWAKP", "ROSSIL", "BATCHUSER")


@dataclass(slots=True)
class Rows:
    tables: dict[str, list[Row]] = field(default_factory=dict)

    def add(self, table: str, *rows: Row) -> None:
        self.tables.setdefault(table, []).extend(rows)


def text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def generate() -> Rows:
    """Generate all rows except those of `awkward.py`. Leaves the global random generator unchanged."""
    rows, random = Rows(), Random(_SEED)
    _materials(rows, random)
    _notifications(rows, random)
    for number in range(_CUSTOMERS):
        city, postal, country, language = random.choice(_CITIES)
        name = f"{random.choice(_TRADES)} {random.choice(_OWNERS)}"
        second = None if number % 3 else "Filiale" if language == "D" else "Branch"
        street = f"{random.choice(_STREETS)} {random.randrange(1, 180)}"
        phone = f"+{random.randrange(31, 49)} {random.randrange(10**7, 10**8)}"
        client = TEST if number % 6 == 5 else PRODUCTIVE
        address = (street, postal, city, country, phone, language)
        rows.add("KNA1", (client, f"{100_001 + number:010d}", name, second, *address, dats(_day(random))))
    _changes(rows)
    for table, texts in tomllib.loads(text("codes.toml")).items():
        of_clients = [()] if table == "T002T" else [(PRODUCTIVE,), (SISTER,)]
        for code, names in texts.items():
            for language, name in zip("ED", names, strict=True):
                rows.add(table, *((*client, language, *code.split("."), name) for client in of_clients))
    return rows


def dats(day: date) -> str:
    return day.strftime("%Y%m%d")


def _day(random: Random, first: date = _FIRST_DAY, span: int = 700) -> date:
    return first + timedelta(days=random.randrange(span))


# --------------------------------------------------------------------------------------------------------- materials


def _materials(rows: Rows, random: Random) -> None:
    catalogue = tomllib.loads(text("materials.toml"))
    numbers = count(100_001)
    for family in catalogue["family"]:
        for position, variant in enumerate(family["variants"]):
            material = f"{next(numbers):018d}"
            remark = random.choice(catalogue["remarks"])
            growth = Decimal(10 + 4 * position) / 10
            gross = (Decimal(str(family["kg"])) * growth).quantize(Decimal("0.001"))
            net = (gross * Decimal("0.95")).quantize(Decimal("0.001"))
            price = (Decimal(str(family["price"])) * growth).quantize(Decimal("0.01"))
            created = _day(random)
            changed = dats(_day(random, created)) if random.random() < 0.6 else INITIAL_DATE
            head = (
                family["type"],
                family["group"],
                family.get("unit", "ST"),
                str(gross),
                str(net),
                "KG",
                str(price),
                "EUR",
            )
            mara = (*head, dats(created), changed, random.choice(_USERS), "")
            for client in (PRODUCTIVE, TEST) if position == 0 else (PRODUCTIVE,):
                rows.add("MARA", (client, material, *mara))
                for language, name, long_text in _texts(family, variant, remark):
                    rows.add("MAKT", (client, material, language, name))
                    if long_text:
                        rows.add("MATERIAL_TEXT", (client, material, language, long_text))


def _texts(family: dict[str, Any], variant: str, remark: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """(language, description, long text or None) in English and German."""
    yield "E", f"{family['en']} {variant}", f"{family['text']} {remark[0]}"
    german = family.get("text_de")
    yield "D", f"{family['de']} {variant}", f"{german} {remark[1]}" if german else None


# ----------------------------------------------------------------------------------------------------- notifications


def _notifications(rows: Rows, random: Random) -> None:
    english, german = (tomllib.loads(text(name)) for name in ("notifications.toml", "notifications_de.toml"))
    _plant(rows, random, english, PRODUCTIVE, 10_000_001, 1.0)
    _plant(rows, random, english, TEST, 20_000_001, 0.6)
    _plant(rows, Random(_SEED), german, SISTER, 30_000_001, 1.0)  # its own generator: the other rows stay as they were


def _plant(rows: Rows, random: Random, pools: dict[str, Any], client: str, first: int, share: float) -> None:
    told = [story for story in pools["story"] for _ in range(max(1, round(share * story.get("times", 1))))]
    random.shuffle(told)
    day = _FIRST_DAY
    for number, story in enumerate(told, first):
        day += timedelta(days=random.randrange(3))
        machine = random.choice(pools["machines"])
        long_text = story["text"].format(
            machine=machine,
            place=random.choice(pools["places"]),
            when=random.choice(pools["times"]),
            action=random.choice(pools["actions"]),
        )
        equipment = f"{10_000_100 + pools['machines'].index(machine):018d}"
        clock = f"{random.randrange(24):02d}{random.randrange(60):02d}{random.randrange(1, 60):02d}"
        due = dats(day + timedelta(days=14)) if story["prio"] in "12" else INITIAL_DATE
        kind = "M1" if story["prio"] == "1" else "M2"
        place = f"PL01-{machine.upper().replace(' ', '-')}"
        last = (dats(day), clock, due, random.choice(_USERS))
        head = (kind, story["short"], long_text.strip(), story["prio"], equipment, place)
        rows.add("QMEL", (client, f"{number:012d}", *head, *last))


# ------------------------------------------------------------------------------------------- rows with their changes


def _changes(rows: Rows) -> None:
    """A table that Datasphere keeps, and one that SDI keeps. Each has rows marked as deleted."""
    moment = "2024-02-29 06:00:00.0000000"
    suppliers = (("1", "Pumps and valves", "I"), ("2", "Office chairs", "I"), ("3", "Brown and green bottles", "U"))
    rows.add("SUPPLIERS_Delta", *((*supplier, moment) for supplier in (*suppliers, ("4", "Labels and glue", "D"))))
    rows.add(
        "T001W",
        (PRODUCTIVE, "1000", "Bottling plant", "Walldorf", None, None),
        (PRODUCTIVE, "1100", "Syrup kitchen", "Köln", None, None),
        (PRODUCTIVE, "1200", "Mineral spring", "Lyon", "U", moment),
        (PRODUCTIVE, "1300", "Old brewery", "Leeds", "D", moment),
    )


# --------------------------------------------------------------------------------------------------------- customers

_TRADES = (
    "Getränkemarkt",
    "Beverage Wholesale",
    "Hotel",
    "Catering",
    "Cash & Carry",
    "Sportclub",
    "Kantine",
    "Brasserie",
)
_OWNERS = ("Adler", "Okonkwo", "Lindqvist", "Moreau", "Ferrari", "Novák", "Müller", "O'Brien", "Yılmaz", "de Vries")
_CITIES = (
    ("Walldorf", "69190", "DE", "D"),
    ("Köln", "50667", "DE", "D"),
    ("Zürich", "8001", "CH", "D"),
    ("Wien", "1010", "AT", "D"),
    ("Lyon", "69002", "FR", "F"),
    ("Bologna", "40121", "IT", "I"),
    ("Leeds", "LS1 4AP", "GB", "E"),
    ("Gdańsk", "80-001", "PL", "L"),
    ("Utrecht", "3511", "NL", "N"),
)
_STREETS = ("Hauptstraße", "Station Road", "Rue du Port", "Via Roma", "Am Brunnen", "Mill Lane", "Długa")
_CUSTOMERS = 240
