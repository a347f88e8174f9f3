"""Decide what to do with one document: compare it with its stored hashes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from connector.document.document import content_hash
from connector.model import Chunk, Document

_TEXT, _META, _ROW, _VECTOR = slice(0, 8), slice(8, 16), slice(16, 24), slice(24, 32)  # parts of a stored hash


class Action(Enum):
    ADD = "add"  # embed it; it is not stored
    REPLACE = "replace"  # embed it again: text, chunking or model changed, or chunks are damaged
    METADATA = "metadata"  # write metadata and hash; the vectors stay
    REHASH = "rehash"  # same rendering, but another row digest: write the hash
    KEEP = "keep"
    REMOVE = "remove"  # an empty row that is stored
    IGNORE = "ignore"  # an empty row that is not stored

    @property
    def embeds(self) -> bool:
        return self in (Action.ADD, Action.REPLACE)


def decide(stored: Sequence[bytes | None], document: Document) -> Action:
    """Return the action. `stored`: hashes of the document's stored chunks 0, 1, 2 ..., None for a missing or duplicate
    chunk; empty if nothing is stored."""
    if document.empty:
        return Action.REMOVE if stored else Action.IGNORE
    if not stored:
        return Action.ADD
    action = Action.KEEP
    for number, found in enumerate(stored):
        expected = content_hash(document, number, len(stored))
        if found is None or found[_TEXT] != expected[_TEXT]:
            return Action.REPLACE
        if found[_META] != expected[_META]:
            action = Action.METADATA
        elif found[_ROW] != expected[_ROW] and action is Action.KEEP:
            action = Action.REHASH
    return action


def decide_again(written: bytes | None, document: Document) -> Action:
    """Return the action for a document that this run already changed. `written`: `content_digest` of what the run
    wrote; None if it removed the document."""
    if document.empty:
        return Action.IGNORE if written is None else Action.REMOVE
    return Action.KEEP if written == content_digest(document) else Action.REPLACE


def content_digest(document: Document) -> bytes:
    return document.text_digest + document.meta_digest + document.row_digest


def rehashed(stored: Sequence[bytes | None], document: Document) -> list[Chunk]:
    """Return the chunks to write for METADATA and REHASH: new metadata and hash, no text. Keep the vector's digest."""
    vectors = ((found or b"")[_VECTOR] for found in stored)
    hashes = (content_hash(document, number, len(stored)) + vector for number, vector in enumerate(vectors))
    return [Chunk(document.id, number, "", document.metadata, hashed) for number, hashed in enumerate(hashes)]
