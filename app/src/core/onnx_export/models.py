"""Models as graphs: the folder with its sums, its float graphs from the cache, and vectors of texts by any backend.
Knows models and the cache; not what vectors are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..backends import Backend, ModelUnsupported, Vectors
from ..backends.folder import Folder, check_files, display_name, find_folder, read_folder, sha256_of
from ..backends.hashing import PREFIX as HASHING
from ..memory import CPU_TOKENS
from ..tokens import plan_batches
from .cache import ArtifactCache, Building, Dependencies, Entry
from .graph import GraphPrecision, build_graph
from .retention import FLOAT as FLOAT

GRAPH = "model.onnx"
"""The file of every graph in the cache."""


@dataclass(frozen=True, slots=True)
class Model:
    """A folder whose files are the pinned ones."""

    folder: Folder
    weights: str
    tokenizer: str

    @classmethod
    def find(cls, name: str, revision: str | None = None, weights_sha256: str | None = None) -> Model:
        """Raises ModelNotFound, ModelUnsupported, WeightsMismatch."""
        if name.startswith(HASHING):
            raise ModelUnsupported(f"model {name!r} hashes words: it has no layers to put into a graph")
        path = find_folder(name, revision)
        return cls.read(read_folder(path, display_name(name, path)), weights_sha256)

    @classmethod
    def read(cls, folder: Folder, weights_sha256: str | None = None) -> Model:
        weights = check_files(folder, weights_sha256)
        return cls(folder, weights, sha256_of([folder.encoder / "tokenizer.json"]))

    def dependencies(self) -> Dependencies:
        folder = self.folder
        return {
            "model": self.weights,
            "tokenizer": self.tokenizer,
            "pooling": folder.pooling,
            "max_tokens": folder.max_length,
        }


def float_graph(cache: ArtifactCache, model: Model, precision: GraphPrecision, onnx_version: str | None) -> Entry:
    """The graph in fp32 or fp16. Raises ModelUnsupported where the architecture is none that can be put into one."""
    wanted = {**model.dependencies(), "precision": precision, "onnx": onnx_version}

    def make(building: Building) -> None:
        import onnx

        graph = build_graph(model.folder, precision=precision)
        onnx.save(graph, str(building.path / GRAPH))

    return cache.obtain(FLOAT, wanted, make)[0]


def embedded(backend: Backend, texts: Sequence[str]) -> Vectors:
    """Float32 (n, dimension), row i for text i, not normalised."""
    tokens = backend.tokenize(texts)
    vectors = np.empty((len(texts), backend.info.dimension), dtype=np.float32)
    multiple = backend.profile.padding_multiple(backend.info.precision)
    for batch in plan_batches([len(ids) for ids in tokens], CPU_TOKENS, multiple, packed=False):
        vectors[batch] = backend.forward(tokens.select(batch))
    return vectors
