"""Replay a seed with its trace; with --seeds N run that many from SEED on, without traces."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from contextlib import nullcontext

from tests.simulation.planted import FOCUS, PLANTED
from tests.simulation.world import Violation, live

parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
parser.add_argument("seed", type=int)
parser.add_argument("--seeds", type=int, default=1, metavar="N")
parser.add_argument("--planted", choices=PLANTED, metavar="BUG", help=", ".join(PLANTED))
asked = parser.parse_args()

began, failed, steps, outcomes = time.process_time(), 0, 0, Counter[str]()
with PLANTED[asked.planted]() if asked.planted else nullcontext():
    for seed in range(asked.seed, asked.seed + asked.seeds):
        try:
            world = live(seed, tracing=asked.seeds == 1, focus=FOCUS.get(asked.planted))
        except (Violation, RuntimeError) as violation:
            failed += 1
            print(violation)
        else:
            print("\n".join(world.sim.trace or ()), end="")
            outcomes.update(world.outcomes)
            steps += world.sim.steps
print(
    f"{failed} of {asked.seeds} seeds fail; {steps} steps, {time.process_time() - began:.1f} s of CPU; {dict(outcomes)}"
)
