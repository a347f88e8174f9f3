"""BERT encoders without padding, for CPUs: linear layers over all tokens of a batch at once, attention over runs of
sequences of equal length. The gain is measured by benchmarks/embed.py; the vectors are transformers' own to 1e-6.

Knows the tensors of transformers' BertModel; nothing of texts or tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from . import ModelUnsupported, TokenIds
from .folder import Folder

if TYPE_CHECKING:
    from collections.abc import Callable

    Linear = Callable[[torch.Tensor], torch.Tensor]

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Run:
    """`count` sequences of `length` tokens, standing one after the other from token `start` on."""

    start: int
    count: int
    length: int


def runs_of(lengths: Sequence[int]) -> list[Run]:
    """Neighbours of equal length, as runs."""
    runs: list[Run] = []
    start = 0
    for length, group in groupby(lengths):
        count = sum(1 for _ in group)
        runs.append(Run(start, count, length))
        start += count * length
    return runs


@dataclass(frozen=True, slots=True)
class Norm:
    weight: torch.Tensor
    bias: torch.Tensor
    epsilon: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True)
class Layer:
    query_key_value: Linear
    attention_out: Linear
    attention_norm: Norm
    wide: Linear
    """With its GELU."""
    narrow: Linear
    out_norm: Norm


class PackedEncoder:
    """Token ids in, pooled float32 vectors out; sequences of equal length should be neighbours."""

    path = "packed"

    def __init__(self, folder: Folder, tensors: Tensors) -> None:
        self._mean = folder.pooling == "mean"
        self._heads = int(folder.config["num_attention_heads"])
        epsilon = float(folder.config.get("layer_norm_eps", 1e-12))
        self._words = tensors["embeddings.word_embeddings.weight"]
        types = tensors["embeddings.token_type_embeddings.weight"]
        self._positions = tensors["embeddings.position_embeddings.weight"] + types[0]
        self._norm = _norm(tensors, "embeddings.LayerNorm", epsilon)
        count = int(folder.config["num_hidden_layers"])
        self._layers = [_layer(tensors, f"encoder.layer.{number}", epsilon) for number in range(count)]

    @staticmethod
    def supports(folder: Folder) -> bool:
        """Whether the folder is a plain BERT with mean or CLS pooling."""
        config = folder.config
        return (
            bool(folder.pooling)
            and config.get("model_type") == "bert"
            and config.get("hidden_act") == "gelu"
            and config.get("position_embedding_type", "absolute") == "absolute"
            and not config.get("is_decoder", False)
        )

    @classmethod
    def load(cls, folder: Folder, dtype: torch.dtype) -> PackedEncoder:
        """Raises ModelUnsupported when the weights are not those of a BertModel, or are damaged."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        tensors: dict[str, torch.Tensor] = {}
        try:
            for file in folder.weights:
                tensors.update({name.removeprefix("bert."): value.to(dtype) for name, value in load_file(file).items()})
            return cls(folder, tensors)
        except SafetensorError as error:
            raise ModelUnsupported(f"model {folder.name!r}: model.safetensors cannot be read: {error}") from error
        except KeyError as error:
            raise ModelUnsupported(f"model {folder.name!r} lacks the tensor {error}") from error

    def __call__(self, batch: Sequence[TokenIds]) -> torch.Tensor:
        lengths = [len(tokens) for tokens in batch]
        runs = runs_of(lengths)
        ids = torch.from_numpy(np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in batch]))
        places = torch.cat([torch.arange(run.length).repeat(run.count) for run in runs])
        x = self._norm(self._words[ids] + self._positions[places])
        for layer in self._layers:
            x = self._apply(layer, x, runs)
        return self._pool(x.float(), runs)

    def _apply(self, layer: Layer, x: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
        attended = self._attend(layer.query_key_value(x), runs)
        x = layer.attention_norm(layer.attention_out(attended) + x)
        return layer.out_norm(layer.narrow(layer.wide(x)) + x)

    def _attend(self, qkv: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
        parts = []
        for run in runs:
            rows = qkv[run.start : run.start + run.count * run.length]
            heads = rows.view(run.count, run.length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(heads[0], heads[1], heads[2])
            parts.append(out.transpose(1, 2).reshape(run.count * run.length, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pool(self, x: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
        parts = []
        for run in runs:
            rows = x[run.start : run.start + run.count * run.length].view(run.count, run.length, -1)
            parts.append(rows.mean(1) if self._mean else rows[:, 0])
        return torch.cat(parts)


def _norm(tensors: Tensors, name: str, epsilon: float) -> Norm:
    return Norm(tensors[f"{name}.weight"], tensors[f"{name}.bias"], epsilon)


def _layer(tensors: Tensors, name: str, epsilon: float) -> Layer:
    projections = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
    weight = torch.cat([tensors[f"{part}.weight"] for part in projections])
    bias = torch.cat([tensors[f"{part}.bias"] for part in projections])
    return Layer(
        query_key_value=_linear(weight, bias),
        attention_out=_named_linear(tensors, f"{name}.attention.output.dense"),
        attention_norm=_norm(tensors, f"{name}.attention.output.LayerNorm", epsilon),
        wide=_named_linear(tensors, f"{name}.intermediate.dense", gelu=True),
        narrow=_named_linear(tensors, f"{name}.output.dense"),
        out_norm=_norm(tensors, f"{name}.output.LayerNorm", epsilon),
    )


def _named_linear(tensors: Tensors, name: str, *, gelu: bool = False) -> Linear:
    return _linear(tensors[f"{name}.weight"], tensors[f"{name}.bias"], gelu=gelu)


def _linear(weight: torch.Tensor, bias: torch.Tensor, *, gelu: bool = False) -> Linear:
    """A linear layer, with exact GELU behind it when asked: oneDNN's prepacked and fused one where it proves right."""
    fused = _onednn_linear(weight, bias, gelu=gelu)

    def plain(x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, weight, bias)
        return F.gelu(y) if gelu else y

    return fused if fused is not None and _same(fused, plain, weight) else plain


def _operators() -> Any:
    return torch.ops.mkldnn


def _onednn_linear(weight: torch.Tensor, bias: torch.Tensor, *, gelu: bool) -> Linear | None:
    """torch's operators behind its compiler; private, hence tried and compared before they are trusted."""
    try:
        operators = _operators()
        packed = operators._reorder_linear_weight(weight, None)
        apply = operators._linear_pointwise
        activation, algorithm = ("gelu", "none") if gelu else ("none", "")

        def linear(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = apply(x, packed, bias, activation, [], algorithm)
            return y

        linear(torch.zeros(8, weight.shape[1], dtype=weight.dtype))
    except (RuntimeError, AttributeError, TypeError, NotImplementedError):
        return None
    return linear


def _same(one: Linear, other: Linear, weight: torch.Tensor) -> bool:
    probe = torch.linspace(-1, 1, 5 * weight.shape[1]).view(5, -1).to(weight.dtype)
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    with torch.inference_mode():
        return torch.allclose(one(probe), other(probe), rtol=tolerance, atol=tolerance)
