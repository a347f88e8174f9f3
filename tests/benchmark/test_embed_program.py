"""benchmarks/embed.py: which goals judge which figure, and what a part with masked instructions runs and reports."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.src.benchmark.harness import Figure, Report
from benchmarks import embed

GIVEN = argparse.Namespace(rounds=3, scale=0.5, precisions=("fp32", "int8"), against=(embed.ANCHOR, "onnx"))


def report() -> Report:
    return Report("peers", {}, {})


def test_engines_are_judged_by_their_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"least_cosine": 0.5, "top_10_overlap": 0.97}

    def measured(model: str, precisions: Sequence[str], peers: Sequence[str], *_: object) -> list[tuple[str, Figure]]:
        names = [
            (own, f"{own}, {load}: {peer} / ours") for own in precisions for load in ("short", "long") for peer in peers
        ]
        return [(own, Figure(name, [3.0], "x", more=more)) for own, name in names]

    monkeypatch.setattr(embed, "measured", measured)
    monkeypatch.setattr(embed, "calibrate", lambda *_: {"accepted": True})
    found = {each.name: each.verdict for each in embed.engines(GIVEN, report())}
    assert found["fp32, short: sentence-transformers / ours"] == found["fp32, long: onnx / ours"] == "met"
    assert found["int8, short: sentence-transformers / ours"] == found["fp32, short: cosine"] == "missed"
    assert (found["int8, long: overlap"], found["int8, long: cosine"]) == ("met", None)


@pytest.mark.parametrize("part", embed.MASKS)
def test_masked_instructions_are_those_of_another_process(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: Sequence[str], env: Mapping[str, str], **_: Any) -> None:
        assert env["ONEDNN_MAX_CPU_ISA"] == embed.MASKS[part]
        assert command[command.index("--precisions") + 1] == "auto"
        figures = [
            Figure("int8, short: sentence-transformers / ours", [3.0], "x"),
            Figure("int8, short: overlap", [0.9]),
        ]
        document = replace(report(), figures=figures, details={"calibration": {}}).as_dict()
        Path(command[command.index("--out") + 1]).write_text(json.dumps(document), encoding="utf-8")

    monkeypatch.setattr(subprocess, "run", run)
    ratio, overlap = embed.masked(part, GIVEN, report())
    assert (ratio.name, ratio.verdict) == (f"{part}, short: sentence-transformers / ours", "missed")
    assert (overlap.name, overlap.verdict, overlap.more["precision"]) == (f"{part}, short: overlap", "missed", "int8")
