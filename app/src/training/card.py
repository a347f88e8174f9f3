"""The description in a trained model's folder: README.md for people, provenance.json for programs. Neither contains
texts of rows or paths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LICENCE_NOTICE = (
    "The rows were read through SAP's driver hdbcli. It comes under SAP's Developer License Agreement 3.2, whose "
    "section 3 forbids using it, and applications built on it, for AI training including refinement; its metadata "
    "says that existing SAP customers are also covered by their own agreement. Whether yours allows a model trained on "
    "these rows is for you to decide before you use it. This text does not replace legal advice."
)
FILE_NOTICE = (
    "The pairs came from a file of the person who ran the training, who is responsible for the rights to its texts."
)
BASE_LICENCE = "The base model's licence applies to this model too: see where the base model came from."
_TRAINING = ("steps", "batch_size", "epochs", "learning_rate", "seed", "precision")
_README = """---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
---

# {name}

`{base}`, adapted by `owl-sap finetune` to {what}. {verdict}

| on {queries} held-out queries among {texts} texts | before | after |
|---|---|---|
| recall@10 | {before[recall_at_10]:.4f} | {after[recall_at_10]:.4f} |
| mean reciprocal rank | {before[mrr]:.4f} | {after[mrr]:.4f} |

The training contained no text of a held-out pair. Figures on other queries will differ.

## Where it comes from

| | |
|---|---|
| base model | `{base}`, SHA-256 of its weights `{base_sha256}` |
| SHA-256 of these weights | `{weights_sha256}` |
| pairs | {training} to learn from, {held_out} held out, of {read} {unit} |
| training | {steps} steps of {batch_size} pairs, {epochs} epoch(s), learning rate {learning_rate}, \
seed {seed}, {precision} |
| loss | MultipleNegativesRankingLoss (sentence-transformers), no pair twice in a batch |
| made | {made}, owl-sap-connector {version} |

## Licence

{licence}

{base_licence}

A model remembers some of what it was trained on: treat this folder as you treat the texts.
"""


def write(folder: Path, name: str, facts: Mapping[str, Any]) -> None:
    """Write both files. `name`: of the model. `facts`: the content of provenance.json."""
    origin = facts["pairs"]["origin"]
    worse = "It finds less than the base model does: do not use it." if facts["worse"] else ""
    text = _README.format(
        name=name,
        base=facts["base"]["model"],
        base_sha256=facts["base"]["weights_sha256"],
        weights_sha256=facts["weights_sha256"],
        what=f"rows of the collection `{facts['collection']}`" if origin == "rows" else "pairs of texts from a file",
        verdict=worse,
        queries=facts["before"]["queries"],
        texts=facts["before"]["texts"],
        before=facts["before"],
        after=facts["after"],
        training=facts["training"]["pairs"],
        held_out=facts["training"]["held_out"],
        read=facts["pairs"]["read"],
        unit="rows" if origin == "rows" else "lines",
        licence=LICENCE_NOTICE if origin == "rows" else FILE_NOTICE,
        base_licence=BASE_LICENCE,
        made=facts["made"],
        version=facts["version"],
        **{key: facts["training"][key] for key in _TRAINING},
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    (folder / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
