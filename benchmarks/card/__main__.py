"""Prove a CUDA card in less than ten minutes: tests, speed against sentence-transformers and against the card itself,
every switch, and recovery from errors.

    scripts/gpu-proof [--model FOLDER] [--minutes 9] [--part NAME ...] --out benchmarks/results/card-NAME.json
    scripts/gpu-proof --device cpu                  a rehearsal of all of it with tiny models; nothing is judged

Needs torch for the card, transformers, sentence-transformers, NumPy, rich and pytest, no network and no installation.
Each part runs in a process of its own and gets a share of the time. Each figure is printed and written to --out as soon
as it is measured.

{parts}

`encode` runs at its best: half precision, scaled dot-product attention, the fastest batch size from 32 to 512 on the
same texts. MiniLM has its own weights if --model names its folder or its package is installed; all other models are
made here with random weights, because speed depends on the shape only.

Exit code: 0 if every part ran, 1 if one failed, gave wrong vectors, lost texts or got no time, 2 without the device.
A missed bar is reported in the table at the end and changes no exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from app.src.benchmark.harness import Figure, Report
from benchmarks.program import line, write

from . import details, failures, speed
from .models import minilm
from .run import Part, PartFailed, Run, apart, described
from .tests import tests

LEAST_SECONDS = 3.0  # a part is not begun with less


@dataclass(frozen=True, slots=True)
class Planned:
    """A part, and the seconds it gets of each nine minutes if the parts before it take theirs."""

    part: Part
    seconds: float

    @property
    def about(self) -> str:
        function = self.part.func if isinstance(self.part, partial) else self.part
        return (function.__doc__ or "").partition("\n")[0].rstrip(".")


PARTS: Mapping[str, Planned] = {
    "tests": Planned(tests, 100),
    "products": Planned(speed.products, 15),
    "minilm": Planned(partial(speed.of_model, "minilm"), 55),
    "bert-base": Planned(partial(speed.of_model, "bert-base"), 55),
    "bert-large": Planned(partial(speed.of_model, "bert-large"), 65),
    "short": Planned(speed.short, 35),
    "tokenizers": Planned(speed.tokenising, 15),
    "queue": Planned(speed.queue, 20),
    "latency": Planned(speed.latency, 40),
    "rungs": Planned(details.rungs, 20),
    "attention": Planned(details.attention, 15),
    "switches": Planned(details.switches, 45),
    "padded": Planned(details.padded, 45),
    "pool": Planned(speed.pool, 20),
    "recovery": Planned(failures.recovery, 15),
    "sticky": Planned(failures.sticky, 20),
    "processes": Planned(failures.processes, 20),
    "sanitizer": Planned(failures.sanitizer, 40),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    lines = "\n".join(f"    {name:<12}{planned.about}" for name, planned in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="gpu-proof",
        description=(__doc__ or "").format(parts=lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a folder of all-MiniLM-L6-v2")
    parser.add_argument("--minutes", type=float, default=9.0, help="end after this time; default 9")
    parser.add_argument(
        "--part", action="append", choices=PARTS, metavar="NAME", help="only this part; may be repeated"
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu; default cuda")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--rounds", type=int, help="of each comparison; default 3, without a card 1")
    parser.add_argument("--precision", default="auto", help="of our engine")
    parser.add_argument("--quick", action="store_true", help="tiny models also on a card; nothing is judged")
    return parser.parse_args(arguments)


def imported() -> None:
    """Import what parts need once, before they are forked."""
    # Else torch would count cards in a way that makes CUDA unusable after a fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import sentence_transformers
    import transformers

    _ = sentence_transformers.SentenceTransformer
    for name in ("AutoModel", "AutoTokenizer", "BertModel", "MPNetModel", "ModernBertModel"):
        getattr(transformers, name)


class Proof:
    """A report that is printed and written while the parts run."""

    def __init__(self, given: argparse.Namespace, report: Report) -> None:
        self.report = report
        self._out: Path | None = given.out

    def keep(self, found: Figure | str) -> None:
        if isinstance(found, str):
            self.report.notes += [found] if found not in self.report.notes else []
        else:
            self.report.figures.append(found)
        sys.stdout.write((found if isinstance(found, str) else line(found)) + "\n")
        sys.stdout.flush()
        self.write()

    def write(self) -> None:
        if self._out is not None:
            write(self.report, self._out)

    def run_part(self, name: str, run: Run, share: float, ends: float) -> None:
        """Run one part in `share` seconds; end it where it takes half as long again, at the latest at `ends`."""
        begun = time.monotonic()
        run = replace(run, ends=begun + share)
        try:
            for found in apart(run.start, partial(PARTS[name].part, run), min(ends, begun + 1.5 * share + 10)):
                self.keep(found)
        except PartFailed as error:
            self.keep(Figure(name, (), error=str(error)))
        self.report.details.setdefault("seconds", {})[name] = round(time.monotonic() - begun, 1)

    def table(self) -> str:
        """Return the bars with their figures, the failures, and a line that sums up."""
        rows = [figure for figure in self.report.figures if figure.verdict is not None]
        width = max((len(figure.name) for figure in rows), default=0)
        lines = []
        for figure in rows:
            sign, bar = figure.target or ("", 0)
            said = figure.error or f"{figure.median:.4g} {figure.unit} ({sign} {bar:g})"
            lines.append(f"{figure.verdict or '':<7} {figure.name:<{width}} {said}\n")
        counts = ", ".join(
            f"{sum(figure.verdict == verdict for figure in rows)} {verdict}" for verdict in ("met", "missed", "failed")
        )
        return f"\n{''.join(lines)}bars: {counts}; {len(self.report.figures)} figures\n"


def run_all(given: argparse.Namespace) -> int:
    begun = time.monotonic()
    ends = begun + 60 * given.minutes
    on_cpu = given.device == "cpu"
    chosen = [name for name in PARTS if name in (given.part or PARTS)]
    options = {"minutes": given.minutes, "parts": chosen, "precision": given.precision}
    proof = Proof(given, Report("card", options=options))
    imported()
    with tempfile.TemporaryDirectory(prefix="owl-sap-card-") as folder:
        run = Run(
            device=given.device,
            folder=Path(folder),
            ends=ends,
            quick=given.quick or on_cpu,
            rounds=given.rounds or (1 if on_cpu else 3),
            precision=given.precision,
            model=given.model.resolve() if given.model else None,
        )
        refusal: PartFailed | None = None
        for start in ("fork", "spawn"):  # if CUDA fails after a fork, spawn a process for each part
            run = replace(run, start=start)
            try:
                (about,) = apart(start, partial(described, run), ends)
                break
            except PartFailed as error:
                refusal = error
        else:
            print(f"{refusal}; to rehearse without a card: --device cpu", file=sys.stderr)
            return 2
        proof.report.machine |= about
        proof.report.options |= {"device": about["device"], "start": run.start}
        trained = minilm(run.model)
        proof.keep(f"MiniLM has {'its own' if trained and not run.quick else 'random'} weights")
        if run.quick:
            proof.keep("tiny models and few texts: nothing is judged")
        for at, name in enumerate(chosen):
            left, rest = ends - time.monotonic(), sum(PARTS[each].seconds for each in chosen[at:])
            if left < LEAST_SECONDS:
                proof.keep(Figure(name, (), error="not run: out of time"))
                continue
            proof.run_part(name, run, left * PARTS[name].seconds / rest, ends)
    proof.report.details.setdefault("seconds", {})["all"] = round(time.monotonic() - begun, 1)
    proof.write()
    sys.stdout.write(f"machine: {proof.report.machine}\n{proof.table()}")
    return 1 if any(figure.error is not None for figure in proof.report.figures) else 0


if __name__ == "__main__":
    sys.exit(run_all(parse(None)))
