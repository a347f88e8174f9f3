"""How long texts are cut into pieces that the model takes whole. Knows the embedder's limits; no row, no store."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from connector.errors import ConfigurationError
from connector.model import ChunkSpec
from connector.protocols import Embedder

_DIGEST = 16


class Chunker:
    """Thread-safe. Raises ConfigurationError for a size that the model does not take."""

    def __init__(self, spec: ChunkSpec, embedder: Embedder) -> None:
        self.max_tokens, self.overlap = _sizes(spec, embedder)
        self._embedder = embedder
        self._hash = blake2b(digest_size=_DIGEST)
        for part in (
            f"{self.max_tokens} {self.overlap}".encode(),
            embedder.fingerprint.encode("utf-8", "surrogatepass"),
        ):
            self._hash.update(struct.pack("<Q", len(part)) + part)
        self.digest = self._hash.digest()
        """16 bytes of sizes and model."""

    def text_digest(self, text: str) -> bytes:
        """16 bytes of the text, of how it is cut and of the model."""
        digest = self._hash.copy()
        digest.update(text.encode())
        return digest.digest()

    def pieces_of(self, texts: Sequence[str]) -> list[list[str]]:
        """The pieces of each text, none of an empty one. Tokens are counted in one call, and only for texts that might
        be too long."""
        long = [position for position, text in enumerate(texts) if self._may_be_long(text)]
        counts = self._embedder.count_tokens([texts[position] for position in long]) if long else []
        too_long = {position for position, count in zip(long, counts, strict=True) if count > self.max_tokens}
        return [self._pieces(text, position in too_long) for position, text in enumerate(texts)]

    def _pieces(self, text: str, too_long: bool) -> list[str]:
        if not text:
            return []
        return self._embedder.split(text, self.max_tokens, self.overlap) if too_long else [text]

    def _may_be_long(self, text: str) -> bool:
        """False only when no tokeniser could make more than `max_tokens` of it: at most one token per ASCII character
        and one mark at the start; other characters may fall apart into bytes or, normalised, into several letters."""
        if len(text) >= self.max_tokens:
            return True
        return not text.isascii() and len(text) + 9 * (len(text.encode()) - len(text)) >= self.max_tokens


def _sizes(spec: ChunkSpec, embedder: Embedder) -> tuple[int, int]:
    most = embedder.max_tokens
    wanted = spec.max_tokens or most
    if wanted > most:
        raise ConfigurationError(
            f"`chunk.max_tokens` is {wanted}, but {embedder.model} takes {most}: the rest would be cut off unseen"
        )
    if spec.overlap < 0:
        raise ConfigurationError(f"`chunk.overlap` is {spec.overlap}; it must not be negative")
    # The default overlap is meant for the usual models; with few tokens more than half would go in circles.
    return wanted, min(spec.overlap, wanted // 2)
