"""`owl-sap calibrate`: INT8 for the model, by a collection's own texts."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from app.src.cli import output
from app.src.cli.application import JsonFlag, Name, app, loaded_for, opened, verb
from app.src.cli.exits import FAILED, OK

_FIGURES = ("mean_cosine", "worst_cosine", "overlap", "int8_share")
_COLUMNS = ("accepted", "algorithm", "calibrated_on", "judged_on", *_FIGURES)


class Algorithm(StrEnum):
    MINMAX = "minmax"
    ENTROPY = "entropy"
    PERCENTILE = "percentile"


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 4)


@verb(app, "calibrate")
def calibrate(
    ctx: typer.Context,
    name: Name,
    texts: Annotated[
        int, typer.Option(min=128, max=20_000, help="Texts to calibrate on; a quarter as many more judge the outcome.")
    ] = 1000,
    algorithm: Annotated[
        Algorithm | None, typer.Option(help="How ranges are found; default: [tensorrt] algorithm.")
    ] = None,
    stored: Annotated[
        bool, typer.Option("--stored", help="Take the texts from the store instead of the source.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """Calibrate the model for INT8 on texts of a collection. Checks its accuracy; exit 1 when it is too low."""
    from app.src.service.calibration import CalibrationRequest

    request = CalibrationRequest(texts, None if algorithm is None else algorithm.value, stored)
    with opened(loaded_for(ctx)) as service:
        output.say(f"{name}: calibrating on about {texts} texts, which takes a minute or two on two cores")
        found = service.calibration.calibrate(service.collections.spec_of_table(name), request)
    if json:
        output.write_json(found)
    else:
        verdict = found["verdict"]
        shown = {**found, "judged_on": verdict["texts"], **{key: _rounded(verdict[key]) for key in _FIGURES}}
        outcome = "accepted" if found["accepted"] else "REFUSED"
        output.counts(f"{name}: INT8 {outcome}", [shown], _COLUMNS, records=[found])
        output.say(f"{name}: {found['reason']}")
        if not found["accepted"]:
            output.say(f"{name}: the engine stays on its float precision")
    for note in found["notes"]:
        output.say(f"{name}: {note}")
    return OK if found["accepted"] else FAILED
