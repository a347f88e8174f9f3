"""What the packed path must know of each kind of encoder: which tensors are its layers, where its tokens stand, and how
they look at each other. One reader per architecture of transformers; `refusal` says why a model is none of them.

Whether a reader is right for a model is not believed: `pytorch.load_encoder` compares vectors before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..folder import Folder
from .linears import Affine

Tensors = Mapping[str, torch.Tensor]
Config = Mapping[str, Any]
_KEPT_LENGTH = 1024
"""Longest sequence whose bias between pairs of tokens is kept; longer ones are rare and made anew."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. `attention_norm` and `out_norm` stand behind attention and feed-forward in an encoder with norms
    behind, before them in one with norms first (where the first layer may have none)."""

    query_key_value: Affine
    attention_out: Affine
    attention_norm: Affine | None
    wide: Affine
    narrow: Affine
    out_norm: Affine
    attention: int = 0
    """Which of the encoder's ways of attention."""


@dataclass(frozen=True, slots=True)
class Attention:
    """What attention has beside the dot product: a bias between pairs of tokens, a rotation by position."""

    bias: PairBias | None = None
    rotary: Rotary | None = None


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """A whole encoder. `norms_first`: norms before attention and feed-forward, one at the end, and the feed-forward
    gated: half of the wide layer multiplies the other. `padding_id`: positions are counted from behind it on, passing
    over tokens that are it; None counts from 0."""

    words: torch.Tensor
    positions: torch.Tensor | None
    embedding_norm: Affine
    layers: Sequence[LayerWeights]
    heads: int
    epsilon: float
    attentions: Sequence[Attention] = (Attention(),)
    final_norm: Affine | None = None
    norms_first: bool = False
    padding_id: int | None = None


# ------------------------------------------------------------------------------------------------- attention's extras


class PairBias:
    """What is added to the score of each pair of tokens. Made for one length, which serves every shorter one."""

    def __init__(self, make: Callable[[int], torch.Tensor], without: int = 0) -> None:
        """`make(length)` gives (heads or 1, length, length); up to `without` tokens there is nothing to add."""
        self._make = make
        self._without = without
        self._kept: torch.Tensor | None = None

    def __call__(self, length: int) -> torch.Tensor | None:
        if length <= self._without:
            return None
        if length > _KEPT_LENGTH:
            return self._make(length)
        if self._kept is None or self._kept.shape[-1] < length:
            self._kept = self._make(min(_KEPT_LENGTH, max(128, 1 << (length - 1).bit_length())))
        return self._kept[:, :length, :length]


def _relative_bias(table: torch.Tensor) -> PairBias:
    """MPNet's: by the distance of two tokens, in buckets that widen. `table` (buckets, heads)."""

    def make(length: int) -> torch.Tensor:
        places = torch.arange(length)
        buckets = relative_buckets(places[None, :] - places[:, None])
        return table[buckets.to(table.device)].permute(2, 0, 1).contiguous()

    return PairBias(make)


def relative_buckets(distance: torch.Tensor, buckets: int = 32, farthest: int = 128) -> torch.Tensor:
    """As MPNetEncoder.relative_position_bucket in transformers has it, rounding included: half of the buckets for each
    direction, half of those for one distance each, the others logarithmic."""
    half = buckets // 2
    exact = half // 2
    near = distance.abs()
    far = torch.log(near.float() / exact) / math.log(farthest / exact) * (half - exact)
    wide = (exact + far.clamp(min=0).long()).clamp(max=half - 1)
    return torch.where(near < exact, near, wide) + (distance > 0).long() * half


def _window_bias(window: int, words: torch.Tensor) -> PairBias:
    """Tokens farther apart than `window` do not see each other."""

    def make(length: int) -> torch.Tensor:
        places = torch.arange(length)
        far = (places[None, :] - places[:, None]).abs() > window
        return torch.zeros(1, length, length).masked_fill_(far, -math.inf).to(words)

    return PairBias(make, without=window + 1)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Queries and keys turned by an angle that grows with the token's place (ModernBERT; halves, not pairs)."""

    theta: float
    width: int
    """Of a head."""

    def turns(self, places: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, (tokens, 1, 1, width), in the precision that transformers has them in."""
        steps = torch.arange(0, self.width, 2, dtype=torch.float32, device=places.device) / self.width
        angles = places[:, None].float() * (1.0 / self.theta**steps)
        whole = torch.cat((angles, angles), dim=-1)[:, None, None, :]
        return whole.cos().to(dtype), whole.sin().to(dtype)


def turned(qkv: torch.Tensor, heads: int, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """(tokens, 3 x hidden) with queries and keys turned, in fp32 as transformers does it."""
    parts = qkv.view(len(qkv), 3, heads, -1)
    cosines, sines = turns
    both = parts[:, :2].float()
    first, second = both.chunk(2, dim=-1)
    both = both * cosines + torch.cat((-second, first), dim=-1) * sines
    return torch.cat((both.to(qkv.dtype), parts[:, 2:]), dim=1).view(len(qkv), -1)


# --------------------------------------------------------------------------------------------------- the architectures


@dataclass(frozen=True, slots=True)
class Architecture:
    """`prefix`: what names of tensors may begin with; `activation`: what config.json calls the activation;
    `why_not`: what else the configuration may ask for that `read` cannot."""

    prefix: str
    activation: str
    read: Callable[[Config, Tensors], EncoderWeights]
    why_not: Callable[[Config], str | None]


def refusal(folder: Folder) -> str | None:
    """Why the packed path does not know this model; None when it may."""
    config = folder.config
    kind = str(config.get("model_type"))
    known = ARCHITECTURES.get(kind)
    if not folder.pooling:
        return "its modules are more than an encoder with mean or CLS pooling"
    if known is None:
        return f"its architecture {kind} is none of {', '.join(ARCHITECTURES)}"
    activation = config.get(known.activation, "gelu")
    if activation not in ("gelu", "gelu_python"):
        return f"its activation is {activation}, not gelu"
    return known.why_not(config)


def read(folder: Folder, tensors: Tensors) -> EncoderWeights:
    """For a model without `refusal`. Raises KeyError for a tensor that is missing."""
    known = ARCHITECTURES[str(folder.config["model_type"])]
    return known.read(folder.config, {_tensor_name(name, known.prefix): value for name, value in tensors.items()})


def _tensor_name(name: str, prefix: str) -> str:
    """Without the prefix of a model with a head; norms as they are called today."""
    plain = name.removeprefix(prefix)
    return plain.replace(".gamma", ".weight").replace(".beta", ".bias") if "LayerNorm" in plain else plain


def _affine(tensors: Tensors, name: str) -> Affine:
    return Affine(tensors[f"{name}.weight"], tensors[f"{name}.bias"])


def _maybe_biased(tensors: Tensors, name: str) -> Affine:
    return Affine(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def _joined(tensors: Tensors, names: Sequence[str]) -> Affine:
    """Several layers over the same input as one."""
    weight = torch.cat([tensors[f"{name}.weight"] for name in names])
    return Affine(weight, torch.cat([tensors[f"{name}.bias"] for name in names]))


def _bert(config: Config, tensors: Tensors) -> EncoderWeights:
    def layer(name: str) -> LayerWeights:
        return LayerWeights(
            query_key_value=_joined(tensors, [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]),
            attention_out=_affine(tensors, f"{name}.attention.output.dense"),
            attention_norm=_affine(tensors, f"{name}.attention.output.LayerNorm"),
            wide=_affine(tensors, f"{name}.intermediate.dense"),
            narrow=_affine(tensors, f"{name}.output.dense"),
            out_norm=_affine(tensors, f"{name}.output.LayerNorm"),
        )

    types = tensors["embeddings.token_type_embeddings.weight"]
    return EncoderWeights(
        words=tensors["embeddings.word_embeddings.weight"],
        positions=tensors["embeddings.position_embeddings.weight"] + types[0],
        embedding_norm=_affine(tensors, "embeddings.LayerNorm"),
        layers=[layer(f"encoder.layer.{number}") for number in range(int(config["num_hidden_layers"]))],
        heads=int(config["num_attention_heads"]),
        epsilon=float(config.get("layer_norm_eps", 1e-12)),
    )


def _roberta(config: Config, tensors: Tensors) -> EncoderWeights:
    """BERT whose positions count from behind the padding token's id."""
    padding = config.get("pad_token_id")
    return replace(_bert(config, tensors), padding_id=1 if padding is None else int(padding))


def _mpnet(config: Config, tensors: Tensors) -> EncoderWeights:
    def layer(name: str) -> LayerWeights:
        return LayerWeights(
            query_key_value=_joined(tensors, [f"{name}.attention.attn.{part}" for part in "qkv"]),
            attention_out=_affine(tensors, f"{name}.attention.attn.o"),
            attention_norm=_affine(tensors, f"{name}.attention.LayerNorm"),
            wide=_affine(tensors, f"{name}.intermediate.dense"),
            narrow=_affine(tensors, f"{name}.output.dense"),
            out_norm=_affine(tensors, f"{name}.output.LayerNorm"),
        )

    return EncoderWeights(
        words=tensors["embeddings.word_embeddings.weight"],
        positions=tensors["embeddings.position_embeddings.weight"],
        embedding_norm=_affine(tensors, "embeddings.LayerNorm"),
        layers=[layer(f"encoder.layer.{number}") for number in range(int(config.get("num_hidden_layers", 12)))],
        heads=int(config.get("num_attention_heads", 12)),
        epsilon=float(config.get("layer_norm_eps", 1e-12)),
        attentions=[Attention(bias=_relative_bias(tensors["encoder.relative_attention_bias.weight"]))],
        padding_id=1,  # MPNetEmbeddings has it so, whatever config.json says
    )


def _distilbert(config: Config, tensors: Tensors) -> EncoderWeights:
    def layer(name: str) -> LayerWeights:
        return LayerWeights(
            query_key_value=_joined(tensors, [f"{name}.attention.{part}_lin" for part in "qkv"]),
            attention_out=_affine(tensors, f"{name}.attention.out_lin"),
            attention_norm=_affine(tensors, f"{name}.sa_layer_norm"),
            wide=_affine(tensors, f"{name}.ffn.lin1"),
            narrow=_affine(tensors, f"{name}.ffn.lin2"),
            out_norm=_affine(tensors, f"{name}.output_layer_norm"),
        )

    return EncoderWeights(
        words=tensors["embeddings.word_embeddings.weight"],
        positions=tensors["embeddings.position_embeddings.weight"],
        embedding_norm=_affine(tensors, "embeddings.LayerNorm"),
        layers=[layer(f"transformer.layer.{number}") for number in range(int(config.get("n_layers", 6)))],
        heads=int(config.get("n_heads", 12)),
        epsilon=1e-12,
    )


def _modernbert(config: Config, tensors: Tensors) -> EncoderWeights:
    kinds = _modernbert_layers(config)
    names = sorted(set(kinds))

    def layer(name: str, kind: str) -> LayerWeights:
        first = f"{name}.attn_norm.weight" not in tensors and name == "layers.0"
        return LayerWeights(
            query_key_value=_maybe_biased(tensors, f"{name}.attn.Wqkv"),
            attention_out=_maybe_biased(tensors, f"{name}.attn.Wo"),
            attention_norm=None if first else _maybe_biased(tensors, f"{name}.attn_norm"),
            wide=_maybe_biased(tensors, f"{name}.mlp.Wi"),
            narrow=_maybe_biased(tensors, f"{name}.mlp.Wo"),
            out_norm=_maybe_biased(tensors, f"{name}.mlp_norm"),
            attention=names.index(kind),
        )

    words = tensors["embeddings.tok_embeddings.weight"]
    heads = int(config.get("num_attention_heads", 12))
    width = words.shape[1] // heads
    window = int(config.get("local_attention", 128)) // 2
    return EncoderWeights(
        words=words,
        positions=None,
        embedding_norm=_maybe_biased(tensors, "embeddings.norm"),
        layers=[layer(f"layers.{number}", kind) for number, kind in enumerate(kinds)],
        heads=heads,
        epsilon=float(config.get("norm_eps", 1e-5)),
        attentions=[
            Attention(
                bias=_window_bias(window, words) if kind == _SLIDING else None,
                rotary=Rotary(float(_rope(config, kind)["rope_theta"]), width),
            )
            for kind in names
        ],
        final_norm=_maybe_biased(tensors, "final_norm"),
        norms_first=True,
    )


_FULL, _SLIDING = "full_attention", "sliding_attention"
_THETAS = {_FULL: ("global_rope_theta", 160_000.0), _SLIDING: ("local_rope_theta", 10_000.0)}


def _modernbert_layers(config: Config) -> list[str]:
    listed = config.get("layer_types")
    if listed:
        return [str(kind) for kind in listed]
    every = int(config.get("global_attn_every_n_layers", 3))
    return [_SLIDING if number % every else _FULL for number in range(int(config.get("num_hidden_layers", 22)))]


def _rope(config: Config, kind: str) -> dict[str, Any]:
    """As transformers 5 writes it in `rope_parameters`, or as older versions did."""
    older, usual = _THETAS[kind]
    given = (config.get("rope_parameters") or {}).get(kind) or {}
    return {"rope_type": "default", "rope_theta": config.get(older) or usual} | given


def _bert_why_not(config: Config) -> str | None:
    if config.get("position_embedding_type", "absolute") != "absolute":
        return f"its positions are {config['position_embedding_type']}, not absolute"
    return "it is a decoder" if config.get("is_decoder", False) else None


def _modernbert_why_not(config: Config) -> str | None:
    kinds = set(_modernbert_layers(config))
    if not kinds <= set(_THETAS):
        return f"its layers are of the types {', '.join(sorted(kinds))}"
    scaled = [kind for kind in kinds if _rope(config, kind)["rope_type"] != "default" or config.get("rope_scaling")]
    return "its rotary positions are scaled" if scaled else None


def _nothing_else(_config: Config) -> str | None:
    return None


_ROBERTA = Architecture("roberta.", "hidden_act", _roberta, _bert_why_not)
ARCHITECTURES: Mapping[str, Architecture] = {
    "bert": Architecture("bert.", "hidden_act", _bert, _bert_why_not),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": Architecture("mpnet.", "hidden_act", _mpnet, _nothing_else),
    "distilbert": Architecture("distilbert.", "activation", _distilbert, _nothing_else),
    "modernbert": Architecture("model.", "hidden_activation", _modernbert, _modernbert_why_not),
}
