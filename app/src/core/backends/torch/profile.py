"""Time the parts of a packed encoder on a CPU, and its products alone. Costs nothing while no encoder is timed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional as F

from .linears import Affine, prepacked
from .packed import Layer, PackedEncoder
from .process import on_compute_thread

PRODUCTS = {"query_key_value": "QKV", "attention_out": "attention out", "wide": "wide + GELU", "narrow": "narrow"}
Shape = tuple[int, int, int, torch.dtype]  # tokens, width before and after, type before


@dataclass(slots=True)
class Clock:
    """Seconds of each part, and the shape of each product in the order of the calls."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    products: list[tuple[str, Shape]] = field(default_factory=list)

    def timed(self, part: str, work: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*given: Any) -> torch.Tensor:
            started = time.perf_counter()
            found = work(*given)
            self.seconds[part] += time.perf_counter() - started
            if part in PRODUCTS.values():
                self.products.append((part, (*given[0].shape, found.shape[1], given[0].dtype)))
            return found

        return run


@contextmanager
def clocked(encoder: PackedEncoder) -> Iterator[Clock]:
    """Time the parts of an encoder within the context."""
    clock, layers = Clock(), encoder._layers

    def layer(each: Layer) -> Callable[..., torch.Tensor]:
        parts = PRODUCTS | dict.fromkeys(("attention_norm", "out_norm"), "sums and norms")
        return clock.timed("layers", replace(each, **{n: clock.timed(p, getattr(each, n)) for n, p in parts.items()}))

    own = {
        "attention": clock.timed("attention", encoder.attention),
        "_pool": clock.timed("pooling", encoder._pool),
        "compute": clock.timed("encoder", encoder.compute),
        "_layers": [layer(each) for each in layers],
    }
    kept = {name: vars(encoder)[name] for name in own if name in vars(encoder)}
    vars(encoder).update(own)
    try:
        yield clock
    finally:
        for name in own:
            del vars(encoder)[name]
        vars(encoder).update(kept)


class Floors:
    """Times products alone on the engine's thread, by oneDNN where torch has it, without bias and GELU."""

    def __init__(self) -> None:
        self._works: dict[Shape, Callable[[], torch.Tensor]] = {}

    def seconds(self, products: list[tuple[str, Shape]]) -> dict[str, float]:
        """Return the seconds of the products by part."""
        clock = Clock()

        def run() -> None:
            with torch.inference_mode():
                works = [(part, self._work(shape)) for part, shape in products]
                for part, work in works:
                    clock.timed(f"{part} alone", work)()

        on_compute_thread(run)
        return {part: clock.seconds[f"{part} alone"] for part in PRODUCTS.values()}

    def _work(self, shape: Shape) -> Callable[[], torch.Tensor]:
        if shape not in self._works:
            rows, before, after, dtype = shape
            x, weight = torch.randn(rows, before).to(dtype), torch.randn(after, before).to(dtype)
            product = prepacked(Affine(weight)) or (lambda x: F.linear(x, weight))
            self._works[shape] = lambda: product(x)
            self._works[shape]()
        return self._works[shape]
