"""Read the tensors of the architectures that the packed path supports: BERT, RoBERTa and DistilBERT.

Before `encoders.load_encoder` uses these tensors, it compares their vectors with those of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..folder import Folder
from .linears import Affine

# Architecture -> optional prefix of tensor names.
ARCHITECTURES = {
    "bert": "bert.",
    "roberta": "roberta.",
    "xlm-roberta": "roberta.",
    "camembert": "roberta.",
    "distilbert": "distilbert.",
}
WORDS = "embeddings.word_embeddings.weight"
# Names within a layer: queries, keys, values, attention's output and norm, wide and narrow layer, last norm.
_BERT_NAMES = (
    *(f"attention.self.{part}" for part in ("query", "key", "value")),
    *("attention.output.dense", "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm"),
)
_DISTILBERT_NAMES = (
    *(f"attention.{part}_lin" for part in ("q", "k", "v", "out")),
    *("sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm"),
)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; its norms follow attention and feed-forward."""

    query_key_value: Affine
    attention_out: Affine
    attention_norm: Affine
    wide: Affine
    narrow: Affine
    out_norm: Affine


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """A whole encoder. `padding_id`: see `packed.positions_of`; None: positions count from 0."""

    words: torch.Tensor
    positions: torch.Tensor
    embedding_norm: Affine
    layers: Sequence[LayerWeights]
    heads: int
    epsilon: float
    padding_id: int | None


def refusal(folder: Folder) -> str | None:
    """Return why the packed path cannot compute this model, or None."""
    config = folder.config
    kind = str(config.get("model_type"))
    if not folder.pooling:
        return "its modules are not just an encoder with mean or CLS pooling"
    if kind not in ARCHITECTURES:
        return f"its architecture {kind} is not one of {', '.join(ARCHITECTURES)}"
    activation = config.get("activation" if kind == "distilbert" else "hidden_act", "gelu")
    if activation not in ("gelu", "gelu_python"):
        return f"its activation is {activation}, not gelu"
    positions = config.get("position_embedding_type", "absolute")
    if positions != "absolute":
        return f"its positions are {positions}, not absolute"
    return "it is a decoder" if config.get("is_decoder", False) else None


def read(folder: Folder, tensors: Mapping[str, torch.Tensor]) -> EncoderWeights:
    """Read a model that `refusal` accepts. Raises KeyError for a missing tensor."""
    config, kind = folder.config, str(folder.config["model_type"])
    named: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        plain = name.removeprefix(ARCHITECTURES[kind])  # models with a head have this prefix
        if "LayerNorm" in plain:  # norms have old names in some models
            plain = plain.replace(".gamma", ".weight").replace(".beta", ".bias")
        named[plain] = value

    def affine(name: str) -> Affine:
        return Affine(named[f"{name}.weight"], named[f"{name}.bias"])

    def layer(under: str, names: Sequence[str]) -> LayerWeights:
        *parts, out, norm, wide, narrow, out_norm = (affine(f"{under}.{name}") for name in names)
        biases = [part.bias for part in parts if part.bias is not None]
        joint = Affine(torch.cat([part.weight for part in parts]), torch.cat(biases))
        return LayerWeights(joint, out, norm, wide, narrow, out_norm)

    positions, padding = named["embeddings.position_embeddings.weight"], config.get("pad_token_id")
    epsilon = 1e-12
    if kind == "distilbert":
        heads, count = int(config.get("n_heads", 12)), int(config.get("n_layers", 6))
        layers = [layer(f"transformer.layer.{number}", _DISTILBERT_NAMES) for number in range(count)]
    else:
        heads, count = int(config["num_attention_heads"]), int(config["num_hidden_layers"])
        layers = [layer(f"encoder.layer.{number}", _BERT_NAMES) for number in range(count)]
        positions = positions + named["embeddings.token_type_embeddings.weight"][0]
        epsilon = float(config.get("layer_norm_eps", epsilon))
    return EncoderWeights(
        words=named[WORDS],
        positions=positions,
        embedding_norm=affine("embeddings.LayerNorm"),
        layers=layers,
        heads=heads,
        epsilon=epsilon,
        # RoBERTa's positions start after the padding token's id.
        padding_id=(1 if padding is None else int(padding)) if ARCHITECTURES[kind] == "roberta." else None,
    )
