"""Folders of models and texts for `benchmarks/card.py`, made without a network: MiniLM with its own weights, where the
package is installed, and BERT's shapes with random ones. How fast a model is depends on its shape, not on its weights.

    python benchmarks/card_models.py FOLDER minilm|bert-base|bert-large      makes one
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from app.src.core.backends import ModelNotFound  # noqa: E402
from app.src.core.backends.folder import find_folder  # noqa: E402

PACKAGED = "all-MiniLM-L6-v2"
VOCABULARY, POSITIONS = 30_522, 512
SPECIAL = 2  # tokens that are put around every text: [CLS] and [SEP]
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MADE_WORDS = 8000


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a BERT."""

    layers: int
    hidden: int
    heads: int
    wide: int

    def operations(self, lengths: Sequence[int]) -> int:
        """Floating-point operations for texts of so many tokens, special ones included: linear layers, and the two
        products of attention. Norms, activations and look-ups are not counted."""
        linear = 2 * (4 * self.hidden**2 + 2 * self.hidden * self.wide) * sum(lengths)
        attention = 4 * self.hidden * sum(length * length for length in lengths)
        return self.layers * (linear + attention)


SHAPES = {
    "minilm": Shape(6, 384, 12, 1536),
    "bert-base": Shape(12, 768, 12, 3072),
    "bert-large": Shape(24, 1024, 16, 4096),
}
# For --quick.
TINY = {
    "minilm": Shape(1, 64, 4, 256),
    "bert-base": Shape(2, 64, 4, 256),
    "bert-large": Shape(2, 128, 4, 512),
}


@dataclass(frozen=True, slots=True)
class Model:
    """`weights`: "random", or whose they are."""

    name: str
    shape: Shape
    folder: Path
    weights: str


def make(folder: Path, name: str, shapes: Mapping[str, Shape] = SHAPES) -> Model:
    """A sentence-transformers folder below `folder`: mean pooling, unit vectors, 512 tokens at most. Random weights are
    the same each time."""
    shape, place = shapes[name], folder / name
    place.mkdir(parents=True)
    packaged = _packaged()
    own = packaged if name == "minilm" and shape == SHAPES[name] else None
    if packaged is None:
        _make_tokenizer(place)
    else:
        for file in _TOKENIZER:
            shutil.copy(packaged / file, place / file)
    if own is None:
        _random_weights(place, shape)
    else:
        (place / "config.json").write_bytes((own / "config.json").read_bytes())
        (place / "model.safetensors").symlink_to(own / "model.safetensors")
    _write_modules(place, shape.hidden)
    return Model(name, shape, place, "random" if own is None else PACKAGED)


def _packaged() -> Path | None:
    try:
        return find_folder(PACKAGED)
    except ModelNotFound:
        return None


def _random_weights(place: Path, shape: Shape) -> None:
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.wide,
        max_position_embeddings=POSITIONS,
    )
    BertModel(config).save_pretrained(place)


def _write_modules(place: Path, hidden: int) -> None:
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds)
    ]
    _write(place / "modules.json", modules)
    _write(place / "sentence_bert_config.json", {"max_seq_length": POSITIONS, "do_lower_case": False})
    _write(place / "1_Pooling/config.json", {"word_embedding_dimension": hidden, "pooling_mode_mean_tokens": True})
    (place / "2_Normalize").mkdir()


def _make_tokenizer(place: Path) -> None:
    """Write a WordPiece tokenizer over made-up words, where the packaged one is not installed."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing

    words = ["".join(parts) for parts in islice(product("bdfgklmnprst", "aeiou", "lmnrs", "aeiou", "knt"), _MADE_WORDS)]
    vocabulary = {word: at for at, word in enumerate([*_MARKS, *words])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    marks = [(mark, vocabulary[mark]) for mark in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    tokenizer.add_special_tokens(list(_MARKS))
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    named = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), _MARKS, strict=True))
    _write(place / "special_tokens_map.json", named)
    settings = {"do_lower_case": True, "tokenizer_class": "BertTokenizer", "model_max_length": POSITIONS}
    _write(place / "tokenizer_config.json", named | settings)


def _write(file: Path, document: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(document, indent=2), encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------- texts


@dataclass(frozen=True, slots=True)
class Words:
    """Words of one token each, in the model's own vocabulary."""

    words: Sequence[str]

    @classmethod
    def of(cls, model: Model) -> Words:
        lines = (model.folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
        return cls([word for word in lines if re.fullmatch("[a-z]{3,}", word)])

    def texts(self, lengths: Sequence[int], seed: int = 3) -> list[str]:
        """Of so many tokens each, special ones included."""
        rng = random.Random(seed)
        return [" ".join(rng.choices(self.words, k=length - SPECIAL)) for length in lengths]


LOADS = ("mixed", "fixed 128", "fixed 512")


def lengths_of(load: str, count: int) -> list[int]:
    """`mixed`: 16 to 512 tokens, as many from 16 to 32 as from 256 to 512, 143 on average; `fixed N`: N each."""
    kind, _, length = load.partition(" ")
    if kind == "fixed":
        return [int(length)] * count
    rng = random.Random(9)
    return [round(math.exp(rng.uniform(math.log(16), math.log(POSITIONS)))) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("name", choices=list(SHAPES))
    given = parser.parse_args()
    print(make(given.folder, given.name).folder)


if __name__ == "__main__":
    main()
