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
_README = """---
library_name: sentence-transformers
pipeline_tag: sentence-similarity
---

# {name}

`{base[model]}`, adapted by `owl-sap finetune` to {what}. {verdict}

| on {before[queries]} held-out queries among {before[texts]} texts | before | after |
|---|---|---|
| recall@10 | {before[recall_at_10]:.4f} | {after[recall_at_10]:.4f} |
| mean reciprocal rank | {before[mrr]:.4f} | {after[mrr]:.4f} |

The training contained no text of a held-out pair. Figures on other queries will differ.

## Where it comes from

| | |
|---|---|
| base model | `{base[model]}`, SHA-256 of its weights `{base[weights_sha256]}` |
| SHA-256 of these weights | `{weights_sha256}` |
| pairs | {training[pairs]} to learn from, {training[held_out]} held out, of {pairs[read]} {unit} |
| training | {training[steps]} steps of {training[batch_size]} pairs, {training[epochs]} epoch(s), \
learning rate {training[learning_rate]}, seed {training[seed]}, {training[precision]} |
| loss | MultipleNegativesRankingLoss (sentence-transformers), no pair twice in a batch |
| made | {made}, owl-sap-connector {version} |

## Licence

{licence}

The base model's licence applies to this model too: see where the base model came from.

A model remembers some of what it was trained on: treat this folder as you treat the texts.
"""


def write(folder: Path, name: str, facts: Mapping[str, Any]) -> None:
    """Write both files. `name`: the model's. `facts`: the content of provenance.json."""
    rows = facts["pairs"]["origin"] == "rows"
    text = _README.format(
        name=name,
        what=f"rows of the collection `{facts['collection']}`" if rows else "pairs of texts from a file",
        verdict="It finds less than the base model does: do not use it." if facts["worse"] else "",
        unit="rows" if rows else "lines",
        licence=LICENCE_NOTICE if rows else FILE_NOTICE,
        **facts,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    (folder / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
