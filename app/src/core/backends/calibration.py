"""Texts of the kind that SAP tables hold, made the same way everywhere: what INT8 is calibrated on, and others of their
kind to judge it by. Knows words, not models.
"""

from __future__ import annotations

import random

_WORDS = (  # noqa: SIM905 - words, as one reads them
    "pump valve seal bearing motor filter sensor bolt gasket belt housing cable compressor coupling gear oil pressure"
    " flow steel order delivery invoice customer vendor plant material notification maintenance inspection leak noise"
    " vibration temperature damaged replaced checked cleaned released blocked quantity price contract account cost"
    " center Pumpe Ventil Dichtung Lager Motor Filter Auftrag Lieferung Rechnung Kunde Werk Material Meldung Wartung"
    " undicht beschädigt ersetzt geprüft Schraube verzinkt Edelstahl the and of is was not for with ohne nach über"
).split()
_SENTENCES = (
    "",  # nothing but begin and end: values of their own
    "The hydraulic pump leaks at the flange and was replaced by maintenance.",
    "Delivery 80012345 was late; the customer complained twice about missing items.",
    "Bitte prüfen Sie die Dichtung am Ventil, es tropft unter Last.",
    "Purchase order 4500017892 for stainless steel bolts M8x20 DIN 933, galvanised.",
    "Invoice blocked for payment because the quantity received differs from the order.",
    "Vibration above the permitted limit at the conveyor drive, next inspection in May.",
    "Employee training on occupational safety, plant 1000, storage location 0001.",
    "This module calculates the remaining useful life of rotating equipment.",
    "A lightweight office chair with adjustable height, armrests and a breathable mesh back.",
    "Annual service contract for air conditioning units including spare parts and labour.",
    "How do I reset the password of my account?",
    "What is the status of the shipment to Hamburg?",
    "Software library for reading and writing configuration files in several formats.",
    "Temperature sensor PT100 class A, 4-wire, cable length 5 m, IP67.",
    "Rohrleitung DN50 aus Edelstahl, geschweißt, mit Flansch nach DIN EN 1092-1.",
    "Le moteur électrique chauffe et s'arrête après dix minutes; remplacer le roulement.",
)


def texts(count: int, seed: int) -> list[str]:
    """Sentences, and between them words with numbers and signs, of 2 to 120 words, most of them short."""
    chance = random.Random(seed)
    made = [*_SENTENCES[:count]]
    while len(made) < count:
        length = min(120, max(2, int(chance.lognormvariate(2.8, 0.8))))
        words = [chance.choice(_WORDS) for _ in range(length)]
        for _ in range(max(1, length // 8)):
            words.insert(chance.randrange(len(words) + 1), _mark(chance))
        made.append(" ".join([*words, chance.choice(_SENTENCES)] if chance.random() < 0.5 else words))
    return made


def _mark(chance: random.Random) -> str:
    number = str(chance.randrange(10 ** chance.randrange(2, 9)))
    code = f"{chance.choice('ABMXDN')}{chance.randrange(999)}-{chance.randrange(99)}"
    return chance.choice([number, code, "/", ",", ".", "(", ")"])
