"""Details of tokenising that the equality tests with sentence-transformers do not reach."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.src.core.backends import ModelUnsupported
from app.src.core.backends.folder import Folder, read_folder
from app.src.core.backends.tokenizing import RustTokenizer

TEXTS = ["Pumpe LECKT", "\u0130STANBUL stra\u00dfe", "oil", ""]


@pytest.fixture
def folder(make_folder: Callable[..., Path]) -> Folder:
    return read_folder(make_folder(), "tiny")


def cased(folder: Folder) -> None:
    """Make the folder's tokenizer keep capitals, as cased models do."""
    file = folder.encoder / "tokenizer.json"
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    content["normalizer"]["lowercase"] = False
    file.write_text(json.dumps(content), encoding="utf-8")
    settings = folder.encoder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"do_lower_case": False}))


def listed(tokenizer: RustTokenizer, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in tokenizer.ids(texts)]


def test_the_file_and_transformers_agree_on_the_packaged_tokenizer(minilm_folder: Path) -> None:
    packaged = read_folder(minilm_folder, "all-MiniLM-L6-v2")
    as_file, made = RustTokenizer.load(packaged), RustTokenizer.load(replace(packaged, name="other"))
    assert listed(as_file, TEXTS) == listed(made, TEXTS)
    assert as_file.special_tokens == made.special_tokens == 2


def test_lower_casing_keeps_the_offsets_of_the_text(folder: Folder) -> None:
    cased(folder)
    plain = RustTokenizer.load(folder)
    lowered = RustTokenizer.load(replace(folder, lower_case=True))
    assert listed(plain, ["OIL"]) != listed(plain, ["oil"])
    assert listed(lowered, ["OIL"]) == listed(plain, ["oil"])
    text = "\u0130X Oil"  # the first letter becomes two when lowered
    assert text[slice(*lowered.offsets(text)[-1])] == "Oil"


def test_ids_are_cut_and_counts_are_not(folder: Folder) -> None:
    tokenizer = RustTokenizer.load(folder)
    assert [len(ids) for ids in tokenizer.ids(["oil " * 100, "oil"])] == [48, 3]
    assert tokenizer.count(["oil " * 100, "oil"]) == [100, 1]
    assert len(tokenizer.offsets("oil " * 100)) == 100


def test_a_lone_surrogate_counts_as_one_character(folder: Folder) -> None:
    tokenizer = RustTokenizer.load(folder)
    text = "oil \udc00 pump"
    assert text[slice(*tokenizer.offsets(text)[-1])] == "pump"


def test_left_padding_is_refused(folder: Folder) -> None:
    settings = folder.encoder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"padding_side": "left"}))
    with pytest.raises(ModelUnsupported, match="left"):
        RustTokenizer.load(folder)
