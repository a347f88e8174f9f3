"""How texts of rows are bounded, made visible and fenced."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as some

from app.src.mcp.untrusted import bounded, cut, fenced, visible

ANYTHING = some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(max_size=80)
NESTED = ANYTHING | some.lists(ANYTHING, max_size=4) | some.dictionaries(some.text(max_size=9), ANYTHING, max_size=3)


@settings(max_examples=50, deadline=None)
@given(some.dictionaries(some.text(max_size=20), NESTED, max_size=8), some.integers(0, 600))
def test_metadata_keep_within_their_bound(metadata: dict[str, Any], most: int) -> None:
    kept, size, missing = bounded(metadata, most)
    assert len(json.dumps(kept, ensure_ascii=False)) <= most + 32
    assert size <= most + 32
    assert missing or len(kept) == len({visible(name) for name in metadata})
    assert all(isinstance(value, str | int | float | bool | None) for value in kept.values())


def test_half_a_character_can_be_sent() -> None:
    metadata, _, _ = bounded({"a": "\ud83d", "\udc00": "b", "c": {"d": ["\udfff"]}}, 500)
    json.dumps(metadata, ensure_ascii=False).encode()
    assert visible("x\ud83dy") == "x\ufffdy"
    assert visible("\U0001f600") == "\U0001f600"


@given(some.text(), some.integers(0, 50))
def test_a_text_is_cut_and_says_so(text: str, most: int) -> None:
    shown, missing = cut(text, most)
    assert missing == (len(text) > most)
    assert len(shown) <= most + 1


@given(some.text())
def test_nothing_unseen_is_left_and_what_can_be_read_stays(text: str) -> None:
    shown = visible(text)
    assert len(shown) == len(text)
    assert not {chr(point) for point in (0, 0x1B, 0x200B, 0x202E, 0x2066, 0xE0041, 0xE0101)} & set(shown)
    assert visible(shown) == shown
    kept = "Größe 12 mm,\n\tनमस्ते \u200d می‌خواهم 轴承 🙂"
    assert visible(kept) == kept


@given(some.dictionaries(some.text(max_size=20), some.text(max_size=200)))
def test_the_fence_holds_and_nothing_is_lost(document: dict[str, str]) -> None:
    text = fenced(json.dumps(document, ensure_ascii=False), "A thing")
    first, begin, *inside, end = text.split("\n")
    boundary = begin.removeprefix("----- begin untrusted data ").removesuffix(" -----")
    assert len(boundary) == 32
    assert boundary in first
    assert end == f"----- end untrusted data {boundary} -----"
    assert json.loads("\n".join(inside)) == document
    assert visible("\n".join(inside)) == "\n".join(inside)
