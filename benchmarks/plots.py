"""Draws the figures of benchmarks/results/*.json, one SVG beside each, with the digest of what was drawn in it.

    python benchmarks/plots.py [NAME ...]        needs matplotlib: pip install -e '.[benchmark]'

One bar a figure, its rounds as points, its target as a line; what was disturbed is grey, what missed its target red.
tests/docs/test_benchmarks.py
compares the digests, so that no drawing outlives its figures.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
_BAR, _MISSED, _DISTURBED, _TARGET = "#3b6ea5", "#b5573b", "#b0b0b0", "#222222"
_INCHES_A_BAR = 0.36


def digest(document: Mapping[str, Any]) -> str:
    """Of all that a drawing shows."""
    drawn = [
        [figure.get(name) for name in ("name", "median", "unit", "rounds", "disturbed", "target", "verdict")]
        for figure in document["figures"]
    ]
    return hashlib.sha256(json.dumps([document["benchmark"], drawn]).encode()).hexdigest()


def results() -> dict[str, dict[str, Any]]:
    """Name -> document, of every result with figures."""
    found = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))}
    return {name: document for name, document in found.items() if "figures" in document}


def measured_on(machine: Mapping[str, Any]) -> str:
    """The card, where one was measured, the processor and its cores: what of them is known."""
    cores = machine.get("cores")
    return ", ".join(filter(None, (machine.get("card"), machine.get("cpu"), cores and f"{cores} cores")))


def draw(name: str, document: Mapping[str, Any], target: Path) -> None:
    """Figures of one unit share an axis."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # Without these two the file would be another one at every drawing. Texts stay texts.
    matplotlib.rcParams |= {"svg.hashsalt": name, "svg.fonttype": "none"}
    metadata = {"Date": None, "Creator": "benchmarks/plots.py", "Description": f"figures sha256:{digest(document)}"}
    figures: Sequence[Mapping[str, Any]] = document["figures"]
    units = list(dict.fromkeys(figure["unit"] for figure in figures))
    counts = [sum(figure["unit"] == unit for figure in figures) for unit in units]
    height = sum(counts) * _INCHES_A_BAR + 0.7 * len(units) + 0.4
    drawing, axes = plt.subplots(
        len(units), 1, figsize=(9, height), squeeze=False, height_ratios=[count + 0.6 for count in counts]
    )
    for axis, unit in zip(axes[:, 0], units, strict=True):
        _bars(axis, [figure for figure in figures if figure["unit"] == unit], unit)
    axes[0, 0].set_title(f"{document['benchmark']}: {measured_on(document['machine'])}", loc="left", size=10)
    drawing.tight_layout()
    drawing.savefig(target, format="svg", metadata=metadata)
    plt.close(drawing)


def _bars(axis: Any, figures: Sequence[Mapping[str, Any]], unit: str) -> None:
    for place, figure in enumerate(figures):
        colour = _DISTURBED if figure["disturbed"] else _BAR if figure["verdict"] in (None, "met") else _MISSED
        axis.barh(place, figure["median"] or 0.0, color=colour, height=0.62)
        axis.plot(figure["rounds"], [place] * len(figure["rounds"]), ".", color=_TARGET, markersize=3)
        if figure["target"] is not None:
            goal = float(figure["target"].split()[-1])
            axis.plot([goal, goal], [place - 0.42, place + 0.42], color=_TARGET, linewidth=1.6)
        said = "failed" if figure["median"] is None else f"{figure['median']:g}"
        axis.annotate(f" {said}", (figure["median"] or 0.0, place), va="center", size=8)
    axis.set_yticks(range(len(figures)), [figure["name"] for figure in figures], size=8)
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_xlim(left=0)
    axis.set_xlabel(unit, size=8)
    axis.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a result; default: all")
    given = parser.parse_args()
    found = results()
    for name in given.names or found:
        if name not in found:
            parser.error(f"no figures in {RESULTS / name}.json")
        draw(name, found[name], RESULTS / f"{name}.svg")
        print(RESULTS / f"{name}.svg")


if __name__ == "__main__":
    main()
