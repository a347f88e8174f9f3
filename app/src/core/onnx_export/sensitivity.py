"""Which layers stay in float: each is measured alone, then those that spoil most are left out one after the other until
the vectors are near enough. Knows vectors and names of layers; nothing of graphs or 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ..backends import Vectors
from .agreement import Agreement, agreement

Compute = Callable[[Collection[str]], Vectors]
"""The vectors of the held-out texts with these layers in 8 bits and no other."""


@dataclass(frozen=True, slots=True)
class Target:
    mean_cosine: float = 0.99
    overlap: float = 0.90

    def met(self, found: Agreement) -> bool:
        return found.mean_cosine >= self.mean_cosine and found.overlap >= self.overlap


@dataclass(frozen=True, slots=True)
class Choice:
    """`excluded`: layers that stay in float, worst first. `losses`: of each layer alone, 1 - mean cosine; empty where
    nothing had to be measured. `share`: of the linear layers' operations, in 8 bits."""

    excluded: tuple[str, ...]
    found: Agreement
    met: bool
    share: float
    losses: Mapping[str, float] = field(default_factory=dict)


def losses(layers: Collection[str], compute: Compute, exact: Vectors) -> dict[str, float]:
    """Of each layer what its 8 bits alone cost: 1 - mean cosine."""
    return {name: 1.0 - agreement(compute([name]), exact).mean_cosine for name in layers}


@dataclass(frozen=True, slots=True)
class Search:
    """What exclusion goes by. `costs`: operations of each layer that would be in 8 bits; `whole`: of all linear
    layers, all of each. `least_share`: less in 8 bits is not tried."""

    costs: Mapping[str, float]
    whole: float
    target: Target = Target()
    least_share: float = 0.5
    always_measure: bool = False
    """Each layer alone, although all together meet the target."""

    def share(self, layers: Collection[str]) -> float:
        return sum(self.costs[name] for name in layers) / self.whole

    def __call__(self, compute: Compute, exact: Vectors) -> Choice:
        """One computation where all layers together meet the target; else one more for each layer and each that is left
        out. The order is by loss for each operation: it is operations that 8 bits are there for."""
        layers = list(self.costs)
        found = agreement(compute(layers), exact)
        if self.target.met(found) and not self.always_measure:
            return Choice((), found, True, self.share(layers))
        alone = losses(layers, compute, exact)
        worst_first = sorted(layers, key=lambda name: -alone[name] / self.costs[name])
        excluded: list[str] = []
        for name in worst_first:
            rest = [each for each in layers if each not in (*excluded, name)]
            if self.target.met(found) or self.share(rest) < self.least_share:
                break
            excluded.append(name)
            found = agreement(compute(rest), exact)
        kept = [each for each in layers if each not in excluded]
        return Choice(tuple(excluded), found, self.target.met(found), self.share(kept), alone)
