"""The checkpoints of a training: which is the newest whole one. Knows transformers' file names, imports none of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"checkpoint-(\d+)")
_LAST_WRITTEN = "trainer_state.json"
"""transformers writes it when all the rest is there."""


def last_checkpoint(folder: Path) -> Path | None:
    """The newest that was written to its end. Those that a kill cut short are deleted: they would be taken up, or
    counted among the ones to keep, by transformers."""
    whole: dict[int, Path] = {}
    for path in folder.glob("checkpoint-*"):
        named = _NAME.fullmatch(path.name)
        if named is None:
            continue
        if step_of(path) == int(named[1]):
            whole[int(named[1])] = path
        else:
            shutil.rmtree(path)
    return whole[max(whole)] if whole else None


def step_of(checkpoint: Path) -> int | None:
    """None for one that is not whole."""
    try:
        state = json.loads((checkpoint / _LAST_WRITTEN).read_text(encoding="utf-8"))
        step = state["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
