"""Readers of the architectures that the packed path supports: tensors of the layers, positions, kind of attention.

`encoders.load_encoder` compares vectors with those of transformers before it uses a reader.
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
_KEPT_LENGTH = 1024  # longest sequence whose pair bias is cached


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. The norms follow attention and feed-forward; with `norms_first` they precede them, and the first layer
    may have no `attention_norm`. `attention`: index in `EncoderWeights.attentions`."""

    query_key_value: Affine
    attention_out: Affine
    attention_norm: Affine | None
    wide: Affine
    narrow: Affine
    out_norm: Affine
    attention: int = 0


@dataclass(frozen=True, slots=True)
class Extras:
    """Additions to dot-product attention: a bias for each pair of tokens, a rotation by position."""

    bias: PairBias | None = None
    rotary: Rotary | None = None


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    """A whole encoder. `norms_first`: norms precede attention and feed-forward, one is at the end, and half of the wide
    layer's output gates the other. `padding_id`: see `packed.counted_positions`; None: positions count from 0."""

    words: torch.Tensor
    positions: torch.Tensor | None
    embedding_norm: Affine
    layers: Sequence[LayerWeights]
    heads: int
    epsilon: float
    attentions: Sequence[Extras] = (Extras(),)
    final_norm: Affine | None = None
    norms_first: bool = False
    padding_id: int | None = None


# ------------------------------------------------------------------------------------------------- attention's extras


class PairBias:
    """A bias added to the score of each pair of tokens, cached at the longest length needed so far."""

    def __init__(self, make: Callable[[int], torch.Tensor], without: int = 0) -> None:
        """`make(length)` returns (heads or 1, length, length). Sequences of up to `without` tokens get no bias."""
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


def relative_buckets(distance: torch.Tensor, buckets: int = 32, farthest: int = 128) -> torch.Tensor:
    """Return MPNetEncoder.relative_position_bucket of transformers, same rounding: half of the buckets for each
    direction; half of those stand for one distance each, the others are logarithmic."""
    half = buckets // 2
    exact = half // 2
    near = distance.abs()
    far = torch.log(near.float() / exact) / math.log(farthest / exact) * (half - exact)
    wide = (exact + far.clamp(min=0).long()).clamp(max=half - 1)
    return torch.where(near < exact, near, wide) + (distance > 0).long() * half


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary positions as in ModernBERT: halves of a head are rotated, not pairs. `width`: of a head."""

    theta: float
    width: int

    def turns(self, places: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, each (tokens, 1, 1, width), computed in fp32 and cast as in transformers."""
        steps = torch.arange(0, self.width, 2, dtype=torch.float32, device=places.device) / self.width
        angles = places[:, None].float() * (1.0 / self.theta**steps)
        whole = torch.cat((angles, angles), dim=-1)[:, None, None, :]
        return whole.cos().to(dtype), whole.sin().to(dtype)


def turned(qkv: torch.Tensor, heads: int, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return (tokens, 3 x hidden) with rotated queries and keys; computes in fp32, as transformers does."""
    parts = qkv.view(len(qkv), 3, heads, -1)
    cosines, sines = turns
    both = parts[:, :2].float()
    first, second = both.chunk(2, dim=-1)
    both = both * cosines + torch.cat((-second, first), dim=-1) * sines
    return torch.cat((both.to(qkv.dtype), parts[:, 2:]), dim=1).view(len(qkv), -1)


# --------------------------------------------------------------------------------------------------- the architectures


@dataclass(frozen=True, slots=True)
class Architecture:
    """`prefix`: optional prefix of tensor names; `activation`: key of the activation in config.json; `why_not` returns
    why `read` does not support a configuration."""

    prefix: str
    activation: str
    read: Callable[[Config, Tensors], EncoderWeights]
    why_not: Callable[[Config], str | None] = lambda _config: None


def refusal(folder: Folder) -> str | None:
    """Return why the packed path cannot compute this model, or None."""
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
    """Read a model that `refusal` accepts. Raises KeyError for a missing tensor."""
    known = ARCHITECTURES[str(folder.config["model_type"])]
    named: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        plain = name.removeprefix(known.prefix)  # models with a head have one
        if "LayerNorm" in plain:  # old names of norms
            plain = plain.replace(".gamma", ".weight").replace(".beta", ".bias")
        named[plain] = value
    return known.read(folder.config, named)


def _affine(tensors: Tensors, name: str) -> Affine:
    return Affine(tensors[f"{name}.weight"], tensors[f"{name}.bias"])


def _maybe_biased(tensors: Tensors, name: str) -> Affine:
    return Affine(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


# Names within a layer: queries, keys, values, attention's output and norm, wide and narrow layer, last norm.
_BERT_NAMES = (
    *(f"attention.self.{part}" for part in ("query", "key", "value")),
    *("attention.output.dense", "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm"),
)
_MPNET_NAMES = (
    *(f"attention.attn.{part}" for part in "qkvo"),
    *("attention.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm"),
)
_DISTILBERT_NAMES = (
    *(f"attention.{part}_lin" for part in ("q", "k", "v", "out")),
    *("sa_layer_norm", "ffn.lin1", "ffn.lin2", "output_layer_norm"),
)


def _norms_behind(tensors: Tensors, layers: Sequence[str], names: Sequence[str], heads: int) -> EncoderWeights:
    """Read a BERT-like model: a norm follows each sum."""

    def layer(under: str) -> LayerWeights:
        *parts, out, norm, wide, narrow, out_norm = (f"{under}.{name}" for name in names)
        return LayerWeights(
            query_key_value=Affine(
                torch.cat([tensors[f"{part}.weight"] for part in parts]),
                torch.cat([tensors[f"{part}.bias"] for part in parts]),
            ),
            attention_out=_affine(tensors, out),
            attention_norm=_affine(tensors, norm),
            wide=_affine(tensors, wide),
            narrow=_affine(tensors, narrow),
            out_norm=_affine(tensors, out_norm),
        )

    return EncoderWeights(
        words=tensors["embeddings.word_embeddings.weight"],
        positions=tensors["embeddings.position_embeddings.weight"],
        embedding_norm=_affine(tensors, "embeddings.LayerNorm"),
        layers=[layer(name) for name in layers],
        heads=heads,
        epsilon=1e-12,
    )


def _bert(config: Config, tensors: Tensors) -> EncoderWeights:
    layers = [f"encoder.layer.{number}" for number in range(int(config["num_hidden_layers"]))]
    plain = _norms_behind(tensors, layers, _BERT_NAMES, int(config["num_attention_heads"]))
    types = tensors["embeddings.token_type_embeddings.weight"]
    positions = tensors["embeddings.position_embeddings.weight"] + types[0]
    return replace(plain, positions=positions, epsilon=float(config.get("layer_norm_eps", 1e-12)))


def _roberta(config: Config, tensors: Tensors) -> EncoderWeights:
    """Read BERT with positions that start after the padding token's id."""
    padding = config.get("pad_token_id")
    return replace(_bert(config, tensors), padding_id=1 if padding is None else int(padding))


def _mpnet(config: Config, tensors: Tensors) -> EncoderWeights:
    layers = [f"encoder.layer.{number}" for number in range(int(config.get("num_hidden_layers", 12)))]
    table = tensors["encoder.relative_attention_bias.weight"]  # (buckets, heads)

    def by_distance(length: int) -> torch.Tensor:
        places = torch.arange(length)
        buckets = relative_buckets(places[None, :] - places[:, None])
        return table[buckets.to(table.device)].permute(2, 0, 1).contiguous()

    return replace(
        _norms_behind(tensors, layers, _MPNET_NAMES, int(config.get("num_attention_heads", 12))),
        epsilon=float(config.get("layer_norm_eps", 1e-12)),
        attentions=[Extras(bias=PairBias(by_distance))],
        padding_id=1,  # fixed in MPNetEmbeddings, independent of config.json
    )


def _distilbert(config: Config, tensors: Tensors) -> EncoderWeights:
    layers = [f"transformer.layer.{number}" for number in range(int(config.get("n_layers", 6)))]
    return _norms_behind(tensors, layers, _DISTILBERT_NAMES, int(config.get("n_heads", 12)))


def _modernbert(config: Config, tensors: Tensors) -> EncoderWeights:
    kinds = _modernbert_layers(config)
    names = sorted(set(kinds))
    words = tensors["embeddings.tok_embeddings.weight"]
    heads = int(config.get("num_attention_heads", 12))
    window = int(config.get("local_attention", 128)) // 2

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

    def near(length: int) -> torch.Tensor:
        """Hide tokens farther apart than `window` from each other."""
        places = torch.arange(length)
        far = (places[None, :] - places[:, None]).abs() > window
        return torch.zeros(1, length, length).masked_fill_(far, -math.inf).to(words)

    def extras(kind: str) -> Extras:
        bias = PairBias(near, without=window + 1) if kind == _SLIDING else None
        return Extras(bias, Rotary(float(_rope(config, kind)["rope_theta"]), words.shape[1] // heads))

    return EncoderWeights(
        words=words,
        positions=None,
        embedding_norm=_maybe_biased(tensors, "embeddings.norm"),
        layers=[layer(f"layers.{number}", kind) for number, kind in enumerate(kinds)],
        heads=heads,
        epsilon=float(config.get("norm_eps", 1e-5)),
        attentions=[extras(kind) for kind in names],
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
    """Return `rope_parameters` of transformers 5, or the same from the keys of older versions."""
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


_ROBERTA = Architecture("roberta.", "hidden_act", _roberta, _bert_why_not)
ARCHITECTURES: Mapping[str, Architecture] = {
    "bert": Architecture("bert.", "hidden_act", _bert, _bert_why_not),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "mpnet": Architecture("mpnet.", "hidden_act", _mpnet),
    "distilbert": Architecture("distilbert.", "activation", _distilbert),
    "modernbert": Architecture("model.", "hidden_activation", _modernbert, _modernbert_why_not),
}
