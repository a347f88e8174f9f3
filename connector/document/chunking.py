"""Cut long texts into pieces that fit the model."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from connector.errors import ConfigurationError
from connector.model import ChunkSpec
from connector.protocols import Embedder

_DIGEST = 16


class Chunker:
    """Cut texts. Thread-safe. Raises ConfigurationError for a size that the model does not support."""

    def __init__(self, spec: ChunkSpec, embedder: Embedder) -> None:
        self.max_tokens, self.overlap = _sizes(spec, embedder)
        self._embedder = embedder
        self._hash = blake2b(digest_size=_DIGEST)
        for part in (
            f"{self.max_tokens} {self.overlap}".encode(),
            embedder.fingerprint.encode("utf-8", "surrogatepass"),
        ):
            self._hash.update(struct.pack("<Q", len(part)) + part)
        self.digest = self._hash.digest()  # 16 bytes of sizes and model

    def text_digest(self, text: str) -> bytes:
        """Return 16 bytes of the text, the sizes and the model."""
        digest = self._hash.copy()
        digest.update(text.encode())
        return digest.digest()

    def pieces_of(self, texts: Sequence[str]) -> list[list[str]]:
        """Return the pieces of each text, [] for an empty one. Counts tokens only of texts that may be too long."""
        long = [position for position, text in enumerate(texts) if self._may_be_long(text)]
        counts = self._embedder.count_tokens([texts[position] for position in long]) if long else []
        too_long = {position for position, count in zip(long, counts, strict=True) if count > self.max_tokens}
        return [self._pieces(text, position in too_long) for position, text in enumerate(texts)]

    def _pieces(self, text: str, too_long: bool) -> list[str]:
        if not text:
            return []
        return self._embedder.split(text, self.max_tokens, self.overlap) if too_long else [text]

    def _may_be_long(self, text: str) -> bool:
        """Return False only if no tokeniser can give more than `max_tokens`: at most one token per ASCII character and
        one at the start. Other characters may become several tokens."""
        if len(text) >= self.max_tokens:
            return True
        return not text.isascii() and len(text) + 9 * (len(text.encode()) - len(text)) >= self.max_tokens


def _sizes(spec: ChunkSpec, embedder: Embedder) -> tuple[int, int]:
    most = embedder.max_tokens
    wanted = spec.max_tokens or most
    if wanted > most:
        raise ConfigurationError(
            f"`chunk.max_tokens` is {wanted}, but {embedder.model} takes at most {most}: texts would be cut off"
        )
    if spec.overlap < 0:
        raise ConfigurationError(f"`chunk.overlap` is {spec.overlap}; it must be at least 0")
    # With few tokens the default overlap would repeat more than half of each piece.
    return wanted, min(spec.overlap, wanted // 2)
