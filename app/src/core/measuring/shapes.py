"""Which matrix products are measured: squares, and the products of the model's own layers as its config.json gives
them. Knows numbers, never torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..backends.folder import Folder, display_name, find_folder, read_folder
from ..backends.hashing import PREFIX as HASHING
from ..device import DeviceProfile, Precision
from ..memory import CPU_TOKENS

# Rows of a model's products on a card: a batch that keeps it full. On a CPU they are those of its batches.
CARD_TOKENS = 16_384
SQUARES_CPU, SQUARES_CARD = (512, 1024), (1024, 4096, 8192)
# Numbers in 16 bytes, whose multiples tensor cores and vector units like. Source: NVIDIA, Matrix Multiplication
# Background guide.
MULTIPLES: Mapping[Precision, int] = {"fp32": 4, "tf32": 4, "fp16": 8, "bf16": 8, "int8": 16}
SQUARE = "square"
WIDEST = "feed-forward in"


@dataclass(frozen=True, slots=True)
class Shape:
    """A product (m, k) x (k, n). `role`: `square`, or the layer of the model that it is."""

    m: int
    n: int
    k: int
    role: str = SQUARE

    @property
    def operations(self) -> int:
        return 2 * self.m * self.n * self.k

    def aligned(self, precision: Precision) -> bool:
        """Whether every edge is a multiple of 16 bytes, as tensor cores like it."""
        return all(edge % MULTIPLES[precision] == 0 for edge in (self.m, self.n, self.k))


@dataclass(frozen=True, slots=True)
class ModelProducts:
    """The products with weights of one layer, as (role, n, k); each layer has the same."""

    model: str
    layers: int
    products: tuple[tuple[str, int, int], ...]

    def shapes(self, tokens: int) -> list[Shape]:
        return [Shape(tokens, n, k, role) for role, n, k in self.products]

    @property
    def operations_per_token(self) -> int:
        """Of all layers; attention and what is not a product not counted."""
        return self.layers * sum(2 * n * k for _, n, k in self.products)


def products_of(folder: Folder) -> ModelProducts:
    """Queries, keys and values are one product here, as the packed path computes them."""
    hidden, inner = folder.shape.hidden, folder.shape.intermediate
    get = folder.config.get
    wide = 2 * inner if get("model_type") == "modernbert" else inner  # what goes through GELU, and what multiplies it
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
    """Reads the model's folder. Raises EngineError where there is none."""
    path = find_folder(model)
    return products_of(read_folder(path, display_name(model, path)))


def check_readable(model: str) -> None:
    """Raises EngineError, which says what to do, for a name that no model has here. The hashing embedder has no
    layers."""
    if not model.startswith(HASHING):
        products_of_model(model)


Group = tuple[Shape, ...]  # shapes that are measured in turns, so that they may be compared


def groups_of(profile: DeviceProfile, sizes: Sequence[int] | None, model: ModelProducts | None) -> list[Group]:
    """Squares, the largest beside one whose every edge is one shorter; then the model's products over a full batch,
    the widest beside the same with one token less: tokens are the only edge that an engine chooses."""
    on_card = profile.kind == "cuda"
    edges = sorted(set(sizes or (SQUARES_CARD if on_card else SQUARES_CPU)))
    *smaller, largest = [Shape(edge, edge, edge) for edge in edges]
    groups: list[Group] = [(shape,) for shape in smaller]
    groups.append((largest, Shape(largest.m - 1, largest.n - 1, largest.k - 1)))
    for shape in model.shapes(CARD_TOKENS if on_card else CPU_TOKENS) if model else ():
        one_less = Shape(shape.m - 1, shape.n, shape.k, shape.role)
        groups.append((shape, one_less) if shape.role == WIDEST else (shape,))
    return groups
