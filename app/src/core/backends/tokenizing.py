"""Turn texts into token ids with the Rust `tokenizers` library: cut to the model's maximum, or whole to count and
split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..device import DeviceProfile
from . import Backend, ModelInfo, ModelUnsupported, Pause, TokenBatch, Vectors
from .folder import Folder, sha256_of
from .packaged import PACKAGED
from .tokenizer_workers import TokenizerWorkers, default_workers, encodable, ids_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class RustTokenizer:
    """Two tokenizers, one of which cuts texts. Thread-safe: neither changes after the constructor."""

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._whole = tokenizer
        self._cut = _twin(tokenizer)
        self._cut.enable_truncation(max_length)
        self.special_tokens = tokenizer.num_special_tokens_to_add(False)

    @classmethod
    def load(cls, folder: Folder) -> RustTokenizer:
        """Load a folder's tokenizer. Raises ModelUnsupported unless it is a fast one that pads on the right."""
        if folder.name in PACKAGED or folder.universal:  # tests show that tokenizer.json suffices; transformers is slow
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(folder.encoder / "tokenizer.json"))
        else:  # as sentence-transformers does: transformers may patch tokenizer.json
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(folder.encoder, local_files_only=True, trust_remote_code=False)
            if not loaded.is_fast:
                raise ModelUnsupported(f"model {folder.name!r} has no fast tokenizer (tokenizer.json)")
            if loaded.padding_side != "right":
                raise ModelUnsupported(f"model {folder.name!r} pads on the left, which this engine does not")
            tokenizer = loaded.backend_tokenizer
        if folder.lower_case:  # within the tokenizer, so that offsets refer to the original text
            from tokenizers import normalizers

            steps = [normalizers.Lowercase(), tokenizer.normalizer]
            tokenizer.normalizer = normalizers.Sequence([step for step in steps if step is not None])
        return cls(tokenizer, folder.max_length)

    def check_ids(self, folder: Folder) -> None:
        """Raise ModelUnsupported if a text may have an id without an embedding: on a card it ends the process, on a CPU
        only the request."""
        largest = max(self._whole.get_vocab().values())
        words = int(folder.config.get("vocab_size") or largest + 1)
        if largest >= words:
            raise ModelUnsupported(
                f"model {folder.name!r}: the tokenizer has ids up to {largest}, but the model has only {words} "
                "embeddings. On a GPU a text with such an id would end the process; correct the model or use device cpu"
            )

    def ids(self, texts: Sequence[str]) -> TokenBatch:
        """Return ids with special tokens, cut to the model's maximum."""
        return ids_of(self._cut, texts)

    def start_workers(self, count: int, engines: int = 1) -> TokenizerWorkers:
        """Start processes that tokenise as `ids` does, for one of so many engines."""
        return TokenizerWorkers(self._cut.to_str(), count, self.ids, engines=engines)

    def count(self, texts: Sequence[str]) -> list[int]:
        found = self._whole.encode_batch_fast(encodable(texts), add_special_tokens=False)
        return [len(encoding.ids) for encoding in found]

    def offsets(self, text: str) -> list[tuple[int, int]]:
        return list(self._whole.encode(encodable([text])[0], add_special_tokens=False).offsets)


class TokenizingBackend(Backend):
    """A backend with the model's own tokenizer, on a CPU or a card."""

    _tokenizer: RustTokenizer
    _workers: TokenizerWorkers | None = None

    def start_tokenizers(self, count: int | None, engines: int = 1) -> None:
        """Start processes that tokenise large calls; None: as many as the device needs. `engines` share the
        processors."""
        count = default_workers(self.profile.kind, engines) if count is None else count
        if count:
            self._workers = self._tokenizer.start_workers(count, engines)

    def tokenize(self, texts: Sequence[str]) -> TokenBatch:
        return (self._workers or self._tokenizer).ids(texts)

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()

    def count(self, texts: Sequence[str]) -> list[int]:
        return self._tokenizer.count(texts)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        return self._tokenizer.offsets(text)

    def free_bytes(self) -> int:
        if self.profile.kind == "cpu":
            return 0
        import torch

        torch.cuda.empty_cache()  # else the driver counts torch's cached memory as used
        free, _total = torch.cuda.mem_get_info(self.profile.index)
        return int(free)


class TokenizerBackend(TokenizingBackend):
    """Tokenises and describes a model without loading its weights; computes nothing."""

    def __init__(self, folder: Folder, weights_sha256: str, dimension: int) -> None:
        self.profile = DeviceProfile.cpu()
        self._tokenizer = RustTokenizer.load(folder)
        self.info = model_info(folder, self._tokenizer, weights_sha256, dimension)

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        raise RuntimeError(f"the weights of {self.info.name} are not loaded")


def model_info(folder: Folder, tokenizer: RustTokenizer, weights_sha256: str, dimension: int) -> ModelInfo:
    """Return the description of a folder's model before it is loaded onto a device."""
    special, (languages, licence) = tokenizer.special_tokens, folder.card
    return ModelInfo(
        name=folder.name,
        dimension=dimension,
        max_tokens=folder.max_length - special,
        special_tokens=special,
        pooling=folder.pooling or "own",
        weights_sha256=weights_sha256,
        tokenizer_sha256=sha256_of([folder.encoder / "tokenizer.json"]),
        precision="fp32",
        precision_reason="no weights are loaded",
        shape=folder.shape,
        path="tokenizer",
        path_reason="no weights are loaded",
        matryoshka=folder.matryoshka,
        languages=languages,
        licence=licence,
        query_prompt=folder.query_prompt,
        document_prompt=folder.document_prompt,
    )


def _twin(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer that shares the vocabulary: reading 250,000 pieces again takes a second."""
    twin = type(tokenizer)(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        if (step := getattr(tokenizer, part)) is not None:
            setattr(twin, part, step)
    added = tokenizer.get_added_tokens_decoder()
    twin.add_tokens([added[id_] for id_ in sorted(added)])
    return twin if twin.get_added_tokens_decoder() == added else type(tokenizer).from_str(tokenizer.to_str())
