"""Whether a quantised model may serve: its vectors beside those of fp32 on texts that calibration never saw. Knows
vectors and bars; neither texts nor models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from ..backends import Vectors
from .agreement import NEIGHBOURS, agreement, directed

LEAST_TEXTS = 32
"""With fewer texts a share of neighbours says nothing."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What a candidate must reach. `int8_share`: of the multiplications in linear layers, how many must be in 8 bits,
    for a model that hardly uses them is not worth its own index."""

    mean_cosine: float = 0.99
    overlap: float = 0.90
    int8_share: float = 0.5
    neighbours: int = NEIGHBOURS


@dataclass(frozen=True, slots=True)
class Verdict:
    """`worst_cosine` is the least of all texts; `overlap` the mean share of the first `neighbours` texts of fp32 that
    the candidate finds too, each text asking for the others; `reason` is for people and names every bar missed."""

    accepted: bool
    reason: str
    texts: int
    mean_cosine: float | None
    worst_cosine: float | None
    overlap: float | None
    int8_share: float | None
    neighbours: int
    bar: Bar

    def as_dict(self) -> dict[str, object]:
        return asdict(self)

    def by(self, bar: Bar) -> Verdict:
        """The same figures by another bar. What had none stays refused."""
        if self.mean_cosine is None or self.worst_cosine is None or self.overlap is None:
            return self
        missed = list(_missed(self.mean_cosine, self.overlap, self.int8_share, bar))
        figures = (
            f"cosine to fp32 {self.mean_cosine:.4f} on average, {self.worst_cosine:.4f} at the least,"
            f" {self.overlap:.3f} of the first {self.neighbours}"
        )
        reason = f"accepted: {figures}" if not missed else f"refused: {'; '.join(missed)} ({figures})"
        return replace(self, accepted=not missed, reason=reason, bar=bar)

    @classmethod
    def from_dict(cls, given: dict[str, object]) -> Verdict:
        """Raises TypeError for what `as_dict` cannot have made."""
        values = dict(given)
        bar = values.pop("bar")
        if not isinstance(bar, dict):
            raise TypeError("a verdict has a bar")
        verdict = cls(**values, bar=Bar(**bar))  # type: ignore[arg-type]
        if not isinstance(verdict.accepted, bool) or not isinstance(verdict.reason, str):
            raise TypeError("a verdict is accepted or not, with a reason")
        return verdict


def judge(exact: Vectors, candidate: Vectors, int8_share: float | None = None, bar: Bar | None = None) -> Verdict:
    """Both (n, d), row i for text i, of any length but 0; the texts are different ones. `int8_share` None: not asked.

    A candidate with a row that is not finite, or zero where fp32 is not, is refused whatever its mean.
    """
    bar = bar or Bar()
    if exact.shape != candidate.shape or exact.ndim != 2:
        raise ValueError(f"vectors of one shape are wanted, not {exact.shape} and {candidate.shape}")
    neighbours = min(bar.neighbours, len(exact) - 1)
    if len(exact) < max(LEAST_TEXTS, bar.neighbours + 1):
        reason = f"refused: {len(exact)} different texts to judge by, at least {LEAST_TEXTS} are needed"
        return Verdict(False, reason, len(exact), None, None, None, int8_share, max(neighbours, 0), bar)
    spoilt = int(np.count_nonzero(~directed(candidate) | ~directed(exact)))
    if spoilt:
        reason = f"refused: {spoilt} of {len(exact)} texts have no finite vector"
        return Verdict(False, reason, len(exact), None, None, None, int8_share, neighbours, bar)
    near = agreement(candidate, exact, neighbours)
    figures = (near.mean_cosine, near.least_cosine, near.overlap)
    return Verdict(False, "", len(exact), *figures, int8_share, neighbours, bar).by(bar)


def _missed(mean: float, found: float, share: float | None, bar: Bar) -> Iterator[str]:
    if mean < bar.mean_cosine:
        yield f"mean cosine {mean:.4f} is below {bar.mean_cosine:g}"
    if found < bar.overlap:
        yield f"overlap of neighbours {found:.3f} is below {bar.overlap:g}"
    if share is not None and share < bar.int8_share:
        yield f"only {share:.0%} of the linear layers' products are in 8 bits, {bar.int8_share:.0%} are wanted"
