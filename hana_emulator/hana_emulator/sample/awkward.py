"""Rows as in real systems: odd keys, missing and very long texts, initial dates, duplicates."""

from __future__ import annotations

from datetime import date, timedelta

from .rows import INITIAL_DATE, PRODUCTIVE, Row, Rows, dats, text

EMPTY_MATERIAL = "EMPTY-1"
BLANK_MATERIAL = "EMPTY-2"
LONG_MATERIAL = "FILLER/60-V"
EMPTY_NOTIFICATION = "000099000001"
LONG_NOTIFICATION = "000099000002"

_MARA: Row = ("HIBE", "MISC", "ST", "1.000", "0.950", "KG", "9.90", "EUR", "20240229", INITIAL_DATE, "MEIERA", "")
_UNPRICED: Row = ("HIBE", "MISC", "ST", None, None, None, None, None, INITIAL_DATE, INITIAL_DATE, None, "X")
_YEN: Row = ("HIBE", "MISC", "ST", "0.300", "0.285", "KG", "12.50", "JPY", "20231101", "20240105", "NOWAKP", "")


def add(rows: Rows) -> None:
    _materials(rows)
    _notifications(rows)
    rows.add("KNA1", (PRODUCTIVE, "0000999999", "", None, "", "", "", "", "", "", INITIAL_DATE))


def _materials(rows: Rows) -> None:
    same = ("Cable gland with strain relief", "Polyamide gland that holds a lead where it enters a cabinet.")
    _material(rows, 'PMP/40-"A"', "Repair set for dosing head", "Membrane, two valve balls and a gasket in one bag.")
    _material(rows, "O'RING-12/5", "Seal box, assorted", "Four hundred rings in thirty sizes, in a case with dividers.")
    _material(rows, 'ROHR 3/4" ', "Threaded tube   ", "Galvanised, three quarters of an inch, with socket.   ")
    _material(rows, 'ROHR 3/4"', "Threaded elbow", "Galvanised ninety degree bend for the tube of the same size.")
    _material(rows, "DUP-1", *same)
    _material(rows, "DUP-2", *same)
    _material(
        rows, "EMOJI-📦", "Fragile sticker ⚠️📦", "Red sticker with glass and arrows 🍷⬆️⬆️: this side up, do not drop."
    )
    _material(rows, "YEN-1", "Bamboo tea whisk", "Gift of the Osaka branch for the visitors' corner.", mara=_YEN)
    _material(rows, LONG_MATERIAL, "Rotary filler, 60 valves", text("instructions.txt"))
    _material(rows, EMPTY_MATERIAL, None, None, mara=_UNPRICED)
    _material(rows, BLANK_MATERIAL, "   ", "\t \n", mara=_UNPRICED)
    _material(rows, "NOTEXT-1", "Cotton rags in bales", None)


def _material(rows: Rows, number: str, name: str | None, long_text: str | None, *, mara: Row = _MARA) -> None:
    rows.add("MARA", (PRODUCTIVE, number, *mara))
    rows.add("MAKT", (PRODUCTIVE, number, "E", name))
    rows.add("MATERIAL_TEXT", (PRODUCTIVE, number, "E", long_text))


def _notifications(rows: Rows) -> None:
    blank: Row = (None, None, None, INITIAL_DATE, None, INITIAL_DATE, None)
    known: Row = ("3", "000000000010000105", "PL01-SYRUP-MIXER", "20240229", "060000", INITIAL_DATE, "ROSSIL")
    rows.add(
        "QMEL",
        (PRODUCTIVE, EMPTY_NOTIFICATION, "M2", None, None, *blank),
        (PRODUCTIVE, LONG_NOTIFICATION, "M2", "Log of the vibration measurement", _log(), *known),
        (PRODUCTIVE, "000099000003", "M2", "Only a short text here", None, *known),
        (PRODUCTIVE, "000099000004", "M2", "", "Agitator stalls when the syrup is cold 🥶, thaw first ☕.", *known),
        (
            PRODUCTIVE,
            "000099000005",
            "M2",
            'Sign "Ausgang" hangs loose',
            "50 % of the screws {2 of 4} missing.",
            *known,
        ),
    )


def _log() -> str:
    """Return about 5,000 characters; each line differs."""
    lines = []
    for step in range(64):
        day = dats(date(2024, 1, 8) + timedelta(days=step))
        speed, heat = 2.1 + 0.07 * step, 41 + step // 3
        state = (
            "normal" if speed < 4.5 else "above the limit, watch it" if speed < 6 else "far too high, plan the exchange"
        )
        lines.append(f"{day}: agitator bearing {speed:.2f} mm/s at {heat} degrees, {state}.")
    return "\n".join(lines)
