"""Measure matrix products, squares and those of the model's layers, in every precision of the device, in turns.

Each row has the rate, its spread and share of the card's peak, the error against fp64, and the kernel. A product that
cannot be measured is a row of nulls, and a setting with the reason.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends.folder import Folder, display_name, find_folder, read_folder
from ..backends.hashing import PREFIX as HASHING
from ..device import PRECISIONS, DeviceProfile, Precision, Setting
from ..memory import CPU_TOKENS
from .clocks import LEAST_SAMPLE, Work, clock_of, figure, in_turns, spread

if TYPE_CHECKING:
    import torch


# Rows of a model's products on a card: a batch that fills it. A CPU uses those of its batches.
CARD_TOKENS = 16_384
SQUARES_CPU, SQUARES_CARD = (512, 1024), (1024, 4096, 8192)
# Numbers in 16 bytes, to whose multiples edges are aligned: NVIDIA, Matrix Multiplication Background guide.
MULTIPLES: Mapping[Precision, int] = {"fp32": 4, "tf32": 4, "fp16": 8, "bf16": 8, "int8": 16}
SQUARE = "square"
WIDEST = "feed-forward in"


@dataclass(frozen=True, slots=True)
class Shape:
    """A product (m, k) x (k, n). `role`: `square`, or the name of a model's layer."""

    m: int
    n: int
    k: int
    role: str = SQUARE

    @property
    def operations(self) -> int:
        return 2 * self.m * self.n * self.k

    def aligned(self, precision: Precision) -> bool:
        """Return whether every edge is a multiple of 16 bytes, which tensor cores need for full speed."""
        return all(edge % MULTIPLES[precision] == 0 for edge in (self.m, self.n, self.k))


@dataclass(frozen=True, slots=True)
class ModelProducts:
    """The products with weights of one layer, as (role, n, k); all layers are equal."""

    model: str
    layers: int
    products: tuple[tuple[str, int, int], ...]

    def shapes(self, tokens: int) -> list[Shape]:
        return [Shape(tokens, n, k, role) for role, n, k in self.products]

    @property
    def operations_per_token(self) -> int:
        """Return the operations of all products with weights, without attention."""
        return self.layers * sum(2 * n * k for _, n, k in self.products)


def products_of(folder: Folder) -> ModelProducts:
    """Return a model's products. As in the packed path, queries, keys and values are one product."""
    hidden, inner = folder.shape.hidden, folder.shape.intermediate
    get = folder.config.get
    wide = 2 * inner if get("model_type") == "modernbert" else inner  # GELU's input and its factor
    return ModelProducts(
        folder.name,
        int(get("num_hidden_layers") or get("n_layers") or 1),
        (
            ("queries, keys, values", 3 * hidden, hidden),
            ("attention out", hidden, hidden),
            (WIDEST, wide, hidden),
            ("feed-forward out", hidden, inner),
        ),
    )


def products_of_model(model: str) -> ModelProducts:
    """Return the products of a model by name. Raises EngineError for an unknown model."""
    path = find_folder(model)
    return products_of(read_folder(path, display_name(model, path)))


def check_readable(model: str) -> None:
    """Raise EngineError, with what to do, for an unknown model. Hashing models have no layers to check."""
    if not model.startswith(HASHING):
        products_of_model(model)


Group = tuple[Shape, ...]  # shapes measured in turns, so that they are comparable


def groups_of(profile: DeviceProfile, sizes: Sequence[int] | None, model: ModelProducts | None) -> list[Group]:
    """Return squares, the largest together with one of edges one shorter; then the model's products over a full batch,
    the widest together with the same for one token less."""
    on_card = profile.kind == "cuda"
    edges = sorted(set(sizes or (SQUARES_CARD if on_card else SQUARES_CPU)))
    *smaller, largest = [Shape(edge, edge, edge) for edge in edges]
    groups: list[Group] = [(shape,) for shape in smaller]
    groups.append((largest, Shape(largest.m - 1, largest.n - 1, largest.k - 1)))
    for shape in model.shapes(CARD_TOKENS if on_card else CPU_TOKENS) if model else ():
        one_less = Shape(shape.m - 1, shape.n, shape.k, shape.role)
        groups.append((shape, one_less) if shape.role == WIDEST else (shape,))
    return groups


# Kernel names of cuBLAS and CUTLASS, most of which contain the instruction's shape: s884 and h884 for Volta, 1688
# Turing, 16816 Ampere, 8816 and 16832 8-bit numbers. Kineto (tb_plugin, tensor_core.py) does the same. nvjet is cuBLAS'
# family from Hopper on; xmma kernels without tensor cores contain "ffma".
_OFF = re.compile(r"simt|ffma|dp4a|gemv|gemmk1|_[sdhi]gemm_", re.IGNORECASE)
_ON = re.compile(
    r"[hsi](884|8816|1688|16816|16832)(?!\d)|hmma|imma|gmma|tensorop|tensor\d+x\d+x\d+|nvjet|xmma_|wmma|utcmma",
    re.IGNORECASE,
)


def on_tensor_cores(kernel: str) -> bool | None:
    """Return whether a kernel uses tensor cores, by its name; None if unknown."""
    if _OFF.search(kernel):
        return False
    return True if _ON.search(kernel) else None


def kernel_of(profile: DeviceProfile, run: Callable[[], object]) -> str | None:
    """Return the longest-running kernel of one call, from torch's profiler; None without card or profiler."""
    if profile.kind != "cuda":
        return None
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    with torch.cuda.device(profile.index):
        try:
            with recording(activities=[ProfilerActivity.CUDA]) as recorded:
                run()
                torch.cuda.synchronize()
        except RuntimeError:  # CUPTI is missing, or another profiler uses it
            return None
    kernels = [
        (float(event.time_range.elapsed_us()), str(event.name))
        for event in recorded.events() or ()
        if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset"))
    ]
    return max(kernels)[1] if kernels else None


# A precision slower than this share of fp32 on a small probe is not measured further: it is emulated (fp16 on most
# CPUs), or has few units (fp16 on a P4).
SLOWEST = 0.5
PROBE = Shape(256, 1536, 384)
ERROR_ROWS = 64  # the relative error covers only the first rows, which saves fp64 work
# All copies of a product's matrices together exceed the last cache by this factor, so that each run is uncached.
CACHES = 3
CPU_CACHE = 32 << 20  # bytes, if the system gives no size
MOST_COPIES = 64
MOST_BYTES = 512 << 20  # of all copies of one product


@dataclass(frozen=True, slots=True)
class Matmul:
    """One measured product (m, k) x (k, n).

    `spread`: (p90 - p10) / median of the times; `relative_error`: against fp64, including the rounding of inputs
    (Frobenius norm); `tensor_cores`: the device has some for this precision; `kernel_on_tensor_cores`: the kernel uses
    them by its name, null if unknown."""

    dtype: Precision
    m: int
    n: int
    k: int
    aligned: bool
    tensor_cores: bool
    tflops: float | None = None
    spread: float | None = None
    share_of_peak: float | None = None
    relative_error: float | None = None
    role: str = "square"
    milliseconds: float | None = None
    kernel: str | None = None
    kernel_on_tensor_cores: bool | None = None

    @property
    def shape(self) -> Shape:
        return Shape(self.m, self.n, self.k, self.role)


class Operands:
    """Random matrices of a shape, in fp32 on the device, for all precisions.

    The right one is laid out (n, k) like a layer's weight: cuBLAS has no fast 8-bit product for the other layout.
    Zeros would need less power, and power limits the clocks.
    """

    def __init__(self, shape: Shape, device: str) -> None:
        import torch

        generator = torch.Generator(device).manual_seed(7)
        self.shape = shape
        self.left = torch.randn(shape.m, shape.k, generator=generator, device=device)
        self.weight = torch.randn(shape.n, shape.k, generator=generator, device=device)

    @cached_property
    def reference(self) -> torch.Tensor:
        """Return the first rows of the product, in fp64."""
        return self.left[:ERROR_ROWS].double() @ self.weight.double().t()


class Product:
    """One product in one precision; each run uses the next copy of the matrices."""

    def __init__(self, operands: Operands, precision: Precision, cache_bytes: int = 0) -> None:
        self._operands = operands
        self._precision = precision
        self._scale = 1.0
        left, weight = self._rounded(operands.left), self._rounded(operands.weight)
        sets = [(left, weight.t(), self._empty(left, weight))]
        for _ in range(copies(sum(each.nbytes for each in sets[0]), cache_bytes) - 1):
            again = left.clone(), weight.clone()
            sets.append((again[0], again[1].t(), self._empty(*again)))
        self.copies = len(sets)
        self._next = itertools.cycle(sets)

    def _rounded(self, matrix: torch.Tensor) -> torch.Tensor:
        import torch

        if self._precision == "int8":
            step = float(matrix.abs().max()) / 127
            self._scale *= step
            return (matrix / step).round().to(torch.int8)
        return matrix.to({"fp16": torch.float16, "bf16": torch.bfloat16}.get(self._precision, torch.float32))

    def _empty(self, left: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        import torch

        dtype = torch.int32 if self._precision == "int8" else left.dtype
        return torch.empty(len(left), len(weight), dtype=dtype, device=left.device)

    def run(self) -> torch.Tensor:
        import torch

        left, right, out = next(self._next)
        multiply = torch._int_mm if self._precision == "int8" else torch.mm
        return multiply(left, right, out=out)

    def relative_error(self) -> float:
        rows = self.run()[:ERROR_ROWS].double() * self._scale
        reference = self._operands.reference
        return float((rows - reference).norm() / reference.norm())


def copies(size: int, cache_bytes: int) -> int:
    """Return how many copies of `size` bytes exceed the cache CACHES times, within the limits."""
    wanted = -(-CACHES * cache_bytes // size)
    return max(1, min(MOST_COPIES, wanted, MOST_BYTES // size))


def cache_bytes_of(profile: DeviceProfile) -> int:
    """Return the size of the last-level cache in bytes: a card's L2, a CPU's L3."""
    if profile.kind == "cuda":
        import torch

        return int(getattr(torch.cuda.get_device_properties(profile.index), "L2_cache_size", 0))
    try:
        size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text(encoding="ascii").strip()
        return int(size.removesuffix("K")) << 10
    except (OSError, ValueError):
        return CPU_CACHE


def set_tf32(profile: DeviceProfile, on: bool) -> None:
    """Set torch's process-wide switch. Switch it off before loading an engine, which sets it itself."""
    if profile.tf32:
        import torch

        torch.set_float32_matmul_precision("high" if on else "highest")


@dataclass(frozen=True, slots=True)
class Bench:
    """Measures products on one device, each for `seconds`."""

    profile: DeviceProfile
    seconds: float
    cache_bytes: int = 0

    def work(self, product: Product, precision: Precision) -> Work:
        if precision in ("fp32", "tf32"):  # the same call, distinguished by torch's switch
            return Work(product.run, before=lambda: set_tf32(self.profile, precision == "tf32"))
        return Work(product.run)

    def measure(self, group: Group, precisions: Sequence[Precision]) -> Iterator[Matmul | Setting]:
        """Yield rows by precision, then shape. A rejected product yields a row of nulls and a setting."""
        refusals: dict[tuple[Precision, Shape], str] = {}
        products: dict[tuple[Precision, Shape], Product] = {}
        for shape in group:
            for precision, made in self._made(shape, precisions):
                if isinstance(made, Product):
                    products[precision, shape] = made
                else:
                    refusals[precision, shape] = made
        works = [self.work(product, precision) for (precision, _), product in products.items()]
        least = LEAST_SAMPLE[self.profile.kind]
        samples = in_turns(works, clock_of(self.profile), self.seconds * len(works), least) if works else []
        timed = dict(zip(products, samples, strict=True))
        for precision, shape in itertools.product(precisions, group):
            if (reason := refusals.get((precision, shape))) is not None:
                yield Matmul(**names(self.profile, shape, precision))
                yield Setting(f"matmul {precision} {shape.m}x{shape.n}x{shape.k}", None, reason)
            else:
                yield self._row(shape, precision, products[precision, shape], timed[precision, shape])

    def _made(self, shape: Shape, precisions: Sequence[Precision]) -> Iterator[tuple[Precision, Product | str]]:
        """Yield products that ran once, or the reason why they did not."""
        try:
            operands = Operands(shape, self.profile.torch_name)
        except RuntimeError as error:  # such as out of memory
            yield from ((precision, refused(error)) for precision in precisions)
            return
        for precision in precisions:
            try:
                product = Product(operands, precision, self.cache_bytes)
                product.run()
                yield precision, product
            except RuntimeError as error:
                yield precision, refused(error)

    def _row(self, shape: Shape, precision: Precision, product: Product, samples: Sequence[float]) -> Matmul:
        seconds = statistics.median(samples)
        rate = shape.operations / seconds / 1e12
        peak = self.profile.peak(precision)
        set_tf32(self.profile, precision == "tf32")
        kernel = kernel_of(self.profile, product.run)
        return Matmul(
            **names(self.profile, shape, precision),
            tflops=figure(rate),
            spread=round(spread(samples), 4),
            share_of_peak=figure(rate / peak) if peak else None,
            relative_error=product.relative_error(),
            milliseconds=figure(seconds * 1000),
            kernel=kernel,
            kernel_on_tensor_cores=None if kernel is None else on_tensor_cores(kernel),
        )


def names(profile: DeviceProfile, shape: Shape, precision: Precision) -> dict[str, Any]:
    tensor_cores = precision in profile.tensor_cores
    return {
        "dtype": precision,
        **asdict(shape),
        "aligned": shape.aligned(precision),
        "tensor_cores": tensor_cores,
    }


def refused(error: BaseException) -> str:
    return f"torch refuses: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def unavailable(profile: DeviceProfile, precision: Precision) -> str | None:
    """Return why this precision is not measured here, or None. A small probe excludes slow precisions."""
    if precision == "tf32" and not profile.tf32:
        where = (
            "a CPU" if profile.capability is None else "compute capability " + ".".join(map(str, profile.capability))
        )
        return f"not available: {where}; TF32 starts at compute capability 8.0"
    if precision == "bf16" and profile.kind == "cuda" and precision not in profile.tensor_cores:
        return "emulated below compute capability 8.0"
    if precision == "fp32":
        return None
    try:
        rounds = [[_probe(profile, each) for each in (precision, "fp32")] for _ in range(4)]
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        return refused(error)
    own, fp32 = (min(times) for times in zip(*rounds, strict=True))  # the fastest of interleaved rounds
    if fp32 < own * SLOWEST:
        return f"no gain here: {own / fp32:.1f} times slower than fp32 on a small product"
    return None


def _probe(profile: DeviceProfile, precision: Any) -> float:
    product = Product(Operands(PROBE, profile.torch_name), precision)
    clock = clock_of(profile)
    return min(clock(product.run) for _ in range(2))


def measure_products(profile: DeviceProfile, groups: Sequence[Group], seconds: float) -> Iterator[Matmul | Setting]:
    """Measure every precision and shape in about `seconds`, plus warm-up."""
    reasons: Mapping[Precision, str | None] = {each: unavailable(profile, each) for each in PRECISIONS}
    usable = [precision for precision, reason in reasons.items() if reason is None]
    for precision, reason in reasons.items():
        if reason:
            yield Setting(f"matmul {precision}", None, reason)
            yield from (Matmul(**names(profile, shape, precision)) for group in groups for shape in group)
    cells = sum(map(len, groups)) * len(usable)
    bench = Bench(profile, seconds / cells, cache_bytes_of(profile))
    for group in groups:
        yield from bench.measure(group, usable)
