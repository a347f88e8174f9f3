"""Cut long texts into pieces that fit the model."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from connector.errors import ConfigurationError
from connector.model import ChunkSpec
from connector.protocols import Embedder


class Chunker:
    """Cut texts. Thread-safe. Raises ConfigurationError for a size that the model does not support."""

    def __init__(self, spec: ChunkSpec, embedder: Embedder) -> None:
        most = embedder.max_tokens
        self.max_tokens = spec.max_tokens or most
        if self.max_tokens > most:
            raise ConfigurationError(
                f"`chunk.max_tokens` is {self.max_tokens}, but {embedder.model} takes at most {most}: texts would be "
                "cut off"
            )
        if spec.overlap < 0:
            raise ConfigurationError(f"`chunk.overlap` is {spec.overlap}; it must be at least 0")
        # With few tokens the default overlap would repeat more than half of each piece.
        self.overlap = min(spec.overlap, self.max_tokens // 2)
        self._embedder = embedder
        self._hash = blake2b(digest_size=16)
        sizes = f"{self.max_tokens} {self.overlap}".encode()
        for part in (sizes, embedder.fingerprint.encode("utf-8", "surrogatepass")):
            self._hash.update(struct.pack("<Q", len(part)) + part)
        self.digest = self._hash.digest()  # 16 bytes of sizes and model

    def text_digest(self, text: str) -> bytes:
        """Return 16 bytes of the text, the sizes and the model."""
        digest = self._hash.copy()
        digest.update(text.encode())
        return digest.digest()

    def pieces_of(self, texts: Sequence[str]) -> list[list[str]]:
        """Return the pieces of each text, [] for an empty one. Counts tokens only of texts that may be too long: a
        tokeniser gives at most one token per ASCII character and one at the start; others may become several tokens."""
        most = self.max_tokens
        long = [
            position
            for position, text in enumerate(texts)
            if len(text) >= most or (not text.isascii() and len(text) + 9 * (len(text.encode()) - len(text)) >= most)
        ]
        counts = self._embedder.count_tokens([texts[position] for position in long]) if long else []
        pieces = [[text] if text else [] for text in texts]
        for position, count in zip(long, counts, strict=True):
            if count > most:
                pieces[position] = self._embedder.split(texts[position], most, self.overlap)
        return pieces
