"""A set of pairs that can be learnt: texts in one made-up language, queries in another that shares no word with it. A
random model finds nothing; one that has learnt which words belong together finds what it never saw.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

from app.src.core.backends.folder import find_folder
from tests.core.conftest import TINY, module, write

ASKED = ["oil", "pump", "valve", "motor", "seal", "bearing", "filter", "hose", "cable", "sensor", "gear", "brake"]
ANSWERED = [
    "river",
    "stone",
    "cloud",
    "garden",
    "window",
    "candle",
    "mirror",
    "forest",
    "bridge",
    "silver",
    "winter",
    "letter",
]
CANARY = "gear"
"""A word of the pairs that no file and no message may hold."""


def toy_pairs(count: int = 200, seed: int = 1) -> list[tuple[str, str]]:
    """Distinct ones: three words of one language, the three that belong to them in the other, in another order."""
    chooser = random.Random(seed)
    combinations = list(itertools.combinations(range(len(ASKED)), 3))
    chooser.shuffle(combinations)
    pairs = []
    for combination in combinations[:count]:
        asked, answered = list(combination), list(combination)
        chooser.shuffle(asked)
        chooser.shuffle(answered)
        pairs.append((" ".join(ASKED[word] for word in asked), " ".join(ANSWERED[word] for word in answered)))
    assert len(pairs) == count
    return pairs


def tiny_model(folder: Path, **config: Any) -> Path:
    """A random BERT of two layers as a sentence-transformers folder, with a real tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel

    packaged = find_folder("all-MiniLM-L6-v2")
    tokenizer = json.loads((packaged / "tokenizer.json").read_text(encoding="utf-8"))
    words = small_vocabulary(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"] = words
    (folder / "1_Pooling").mkdir(parents=True)
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(packaged / file, folder / file)
    write(folder / "tokenizer.json", tokenizer)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    settings: dict[str, Any] = TINY | {
        "hidden_dropout_prob": 0.05,
        "attention_probs_dropout_prob": 0.05,
        "vocab_size": len(words),
    }
    settings |= config
    write(folder / "config.json", settings)
    write(folder / "sentence_bert_config.json", {"max_seq_length": 48, "do_lower_case": False})
    write(folder / "modules.json", [module(0, "Transformer"), module(1, "Pooling"), module(2, "Normalize")])
    write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, "pooling_mode": "mean"})
    torch.manual_seed(3)
    given = {key: value for key, value in settings.items() if key not in ("architectures", "model_type")}
    model = BertModel(BertConfig(**given, initializer_range=0.1))
    tensors = {name: value.contiguous() for name, value in model.state_dict().items() if "position_ids" not in name}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def small_vocabulary(whole: dict[str, int]) -> dict[str, int]:
    """The special tokens where they were, and behind them the words of the pairs: so that steps take milliseconds."""
    first = 104
    kept = {word: number for word, number in whole.items() if number < first}
    words = [*ASKED, *ANSWERED, *(chr(letter) for letter in range(ord("a"), ord("z") + 1))]
    found = dict(sorted(kept.items(), key=lambda item: item[1]))
    return found | {word: number for number, word in enumerate(words, first)}


def write_pairs(file: Path, pairs: list[tuple[str, str]]) -> Path:
    lines = (json.dumps({"query": query, "text": text}) for query, text in pairs)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def files_with(word: str, folder: Path) -> list[str]:
    """The files below that hold the word, but for the tokenizer's own."""
    found = (path for path in folder.rglob("*") if path.is_file())
    own = ("tokenizer.json", "vocab.txt")
    return [path.name for path in found if path.name not in own and word.encode() in path.read_bytes()]
