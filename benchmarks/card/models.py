"""Model folders of real shapes, made on the spot, and texts of exact lengths in tokens.

Weights are random, because speed depends on the shape only; a MiniLM that is installed or given has its own.
"""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

from app.src.core.backends import ModelNotFound
from app.src.core.backends.folder import find_folder

PACKAGED = "all-MiniLM-L6-v2"
POSITIONS = 512
SPECIAL = 2  # special tokens around every text
LOADS = ("mixed", "fixed 128", "fixed 512")
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
_MARKS = {"cls": "[CLS]", "pad": "[PAD]", "sep": "[SEP]", "unk": "[UNK]", "mask": "[MASK]"}
_PAD = 1  # as MPNet requires
_SYNTHETIC_WORDS = 8000


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of an encoder. `kind`: bert, mpnet, modernbert, or e5, a BERT with a Unigram tokenizer."""

    layers: int
    hidden: int
    heads: int
    wide: int
    kind: str = "bert"
    words: int = 30_522

    def operations(self, lengths: Sequence[int]) -> int:
        """Count floating-point operations for texts of these lengths in tokens, special ones included: linear layers
        and the two products of attention, without norms, activations and look-ups."""
        linear = 2 * (4 * self.hidden**2 + 2 * self.hidden * self.wide) * sum(lengths)
        attention = 4 * self.hidden * sum(length * length for length in lengths)
        return self.layers * (linear + attention)


SHAPES = {
    "minilm": Shape(6, 384, 12, 1536),
    "bert-base": Shape(12, 768, 12, 3072),
    "bert-large": Shape(24, 1024, 16, 4096),
    "e5-small": Shape(12, 384, 12, 1536, "e5", 250_037),
    "mpnet": Shape(12, 768, 12, 3072, "mpnet", 8192),
    "modernbert": Shape(22, 768, 12, 1152, "modernbert", 8192),
}
TINY = {
    "minilm": Shape(1, 64, 4, 256),
    "bert-base": Shape(2, 64, 4, 256),
    "bert-large": Shape(2, 128, 4, 512),
    "e5-small": Shape(1, 64, 4, 256, "e5", 9000),
    "mpnet": Shape(1, 64, 4, 256, "mpnet", 8192),
    "modernbert": Shape(2, 64, 4, 96, "modernbert", 8192),
}  # without a card


def minilm(given: Path | None) -> Path | None:
    """Return the folder of a trained MiniLM: `given`, or the installed package's; None without one."""
    try:
        return given or find_folder(PACKAGED)
    except ModelNotFound:
        return None


def make(place: Path, shape: Shape, trained: Path | None = None) -> str:
    """Create a sentence-transformers folder: mean pooling, unit vectors, 512 tokens at most. Return whether
    its weights are "own" or "random". `trained`: a BERT's folder whose tokenizer is taken, and whose weights are if it
    has this shape. Random weights are reproducible."""
    partial = place.with_name(f"{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was ended
    partial.mkdir(parents=True)
    taken = trained if shape.kind == "bert" else None
    if taken is None:
        _make_tokenizer(partial, shape)
    else:
        for file in _TOKENIZER:
            shutil.copy(taken / file, partial / file)
        words = (taken / "vocab.txt").read_text(encoding="utf-8").splitlines()
        (partial / "words.txt").write_text("\n".join(words), encoding="utf-8")
    own = taken is not None and _shape_of(taken) == shape
    if taken is not None and own:
        shutil.copy(taken / "config.json", partial)
        (partial / "model.safetensors").symlink_to((taken / "model.safetensors").resolve())
    else:
        import torch

        torch.manual_seed(5)
        _random_model(shape).save_pretrained(partial)
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds)
    ]
    pooling = {"word_embedding_dimension": shape.hidden, "pooling_mode_mean_tokens": True}
    _write(partial / "modules.json", modules)
    _write(partial / "sentence_bert_config.json", {"max_seq_length": POSITIONS, "do_lower_case": False})
    _write(partial / "1_Pooling/config.json", pooling)
    (partial / "2_Normalize").mkdir()
    partial.rename(place)
    return "own" if own else "random"


def _shape_of(folder: Path) -> Shape:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    layers, hidden, heads, wide = (int(config[name]) for name in names)
    return Shape(layers, hidden, heads, wide, words=int(config["vocab_size"]))


def _random_model(shape: Shape) -> Any:
    import transformers

    config: Any
    sizes: dict[str, Any] = {
        "vocab_size": shape.words,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.wide,
        "pad_token_id": _PAD,
    }
    if shape.kind == "mpnet":  # its positions begin after the padding token's
        config = transformers.MPNetConfig(**sizes, max_position_embeddings=POSITIONS + 2)
        return transformers.MPNetModel(config)
    if shape.kind == "modernbert":
        marks: dict[str, Any] = {"cls_token_id": 0, "bos_token_id": 0, "sep_token_id": 2, "eos_token_id": 2}
        config = transformers.ModernBertConfig(**sizes, **marks, max_position_embeddings=8192)
        return transformers.ModernBertModel(config)
    return transformers.BertModel(transformers.BertConfig(**sizes, max_position_embeddings=POSITIONS))


def _synthetic(count: int) -> Iterator[str]:
    parts = ("bdfgklmnprst", "aeiou", "lmnrs", "aeiou", "knt", "aeiou", "bdgkt")
    for used in (5, 6, 7):
        words = islice(("".join(word) for word in product(*parts[:used])), count)
        for word in words:
            count -= 1
            yield word


def _make_tokenizer(place: Path, shape: Shape) -> None:
    """Write a fast tokenizer: WordPiece as BERT's, or Unigram with as many pieces as the model has words."""
    from tokenizers import Tokenizer, normalizers, pre_tokenizers
    from tokenizers.models import Unigram, WordPiece
    from tokenizers.processors import TemplateProcessing

    unigram = shape.kind == "e5"
    words = list(_synthetic(shape.words - len(_MARKS) if unigram else _SYNTHETIC_WORDS))
    places = {mark: at for at, mark in enumerate(_MARKS.values())}
    if unigram:
        pieces = [(mark, 0.0) for mark in _MARKS.values()]
        pieces += [(f"\u2581{word}", -math.log(at + 2)) for at, word in enumerate(words)]
        tokenizer = Tokenizer(Unigram(pieces, unk_id=places["[UNK]"]))
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        vocabulary = places | {word: at for at, word in enumerate(words, len(places))}
        tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    around = [(mark, places[mark]) for mark in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    tokenizer.add_special_tokens(list(_MARKS.values()))
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "words.txt").write_text("\n".join(words), encoding="utf-8")
    named = {f"{kind}_token": mark for kind, mark in _MARKS.items()}
    _write(place / "special_tokens_map.json", named)
    _write(
        place / "tokenizer_config.json",
        named | {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": POSITIONS},
    )


def _write(file: Path, document: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(document, indent=2), encoding="utf-8")


def texts_of(folder: Path, lengths: Sequence[int], seed: int = 3) -> list[str]:
    """Return texts of these lengths in tokens, special ones included, made of words of one token each."""
    lines = (folder / "words.txt").read_text(encoding="utf-8").splitlines()
    words = [word for word in lines if re.fullmatch("[a-z]{3,}", word)]
    rng = random.Random(seed)
    return [" ".join(rng.choices(words, k=length - SPECIAL)) for length in lengths]


def lengths_of(load: str, count: int) -> list[int]:
    """`mixed`: 16 to 512 tokens, as many from 16 to 32 as from 256 to 512, mean 143; `short`: 5 to 40, mean 17, as
    likely as each other in logarithms; `fixed N`: always N."""
    kind, _, length = load.partition(" ")
    if kind == "fixed":
        return [int(length)] * count
    least, most = (16, POSITIONS) if kind == "mixed" else (5, 40)
    rng = random.Random(9)
    return [round(math.exp(rng.uniform(math.log(least), math.log(most)))) for _ in range(count)]
