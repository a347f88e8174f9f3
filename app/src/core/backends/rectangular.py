"""Encoders that want every text of a batch at one length: transformers' own model with mean or CLS pooling, and
sentence-transformers' modules for every other stack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..ranges import ranged
from . import ModelUnsupported, TokenIds
from .folder import Folder
from .rectangles import rectangle, width_of
from .target import Encoder, Target

if TYPE_CHECKING:
    import torch

    from .staging import Uploads


def load_rectangular(folder: Folder, target: Target) -> Encoder:
    return PaddedEncoder(folder, target) if folder.pooling else StackEncoder(folder, target)


def _uploads(target: Target) -> Uploads | None:
    if target.profile.kind == "cpu":
        return None
    from .staging import uploads_for

    return uploads_for(target.place.device, pinned=target.pinned)


class _Rectangular:
    """Common to encoders that want every text of a batch at one length."""

    def __init__(self, folder: Folder, target: Target) -> None:
        self._multiple = target.profile.padding_multiple(target.precision)
        self._longest = folder.max_length
        self._pad_id = int(folder.config.get("pad_token_id") or 0)
        self._uploads = _uploads(target)

    @ranged("copy")
    def _inputs(self, batch: Sequence[TokenIds]) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        width = width_of(batch, self._multiple, self._longest)
        ids, mask = map(torch.from_numpy, rectangle(batch, width=width, pad_id=self._pad_id))
        return (ids, mask) if self._uploads is None else self._sent(self._uploads, ids, mask)

    def _sent(self, uploads: Uploads, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """In one copy of half the size; int64 on the card."""
        room = uploads.room(2 * ids.numel()).reshape(2, *ids.shape)
        room[0], room[1] = ids.numpy(), mask.numpy()
        there = uploads.send().view(2, *ids.shape).long()
        return there[0], there[1]


class PaddedEncoder(_Rectangular):
    """transformers' own model; pooling in fp32."""

    path = "padded"

    def __init__(self, folder: Folder, target: Target) -> None:
        super().__init__(folder, target)
        self._mean = folder.pooling == "mean"
        self._model = _load_transformer(folder, target)

    def __call__(self, batch: Sequence[TokenIds]) -> torch.Tensor:
        return self._computed(*self._inputs(batch))

    def tokens(self, batch: Sequence[TokenIds]) -> list[torch.Tensor]:
        hidden = self._hidden(*self._inputs(batch))
        return [row[: len(tokens)] for row, tokens in zip(hidden, batch, strict=True)]

    @ranged("forward")
    def _computed(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self._pooled(self._hidden(ids, mask), mask)

    def _hidden(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """(texts, width, hidden), float32."""
        hidden: torch.Tensor = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        return hidden.float()

    @ranged("pool")
    def _pooled(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not self._mean:
            return hidden[:, 0]
        weights = mask.unsqueeze(-1).float()
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def _load_transformer(folder: Folder, target: Target) -> Any:
    from safetensors import SafetensorError
    from transformers import AutoModel

    with quiet_transformers():
        try:
            model, found = AutoModel.from_pretrained(
                folder.encoder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=target.dtype,
                output_loading_info=True,
            )
        except (ValueError, KeyError, OSError, SafetensorError) as error:
            raise ModelUnsupported(f"model {folder.name!r}: transformers cannot load it: {error}") from error
    missing = sorted(name for name in found["missing_keys"] if not name.startswith("pooler."))
    if missing:  # transformers would compute with random numbers in their place
        raise ModelUnsupported(f"model {folder.name!r} lacks the tensor {missing[0]!r}")
    return model.to(target.profile.torch_name).eval()


class StackEncoder(_Rectangular):
    """sentence-transformers' modules, one after the other, for stacks with more than mean or CLS pooling."""

    path = "sentence-transformers"

    def __init__(self, folder: Folder, target: Target) -> None:
        super().__init__(folder, target)
        from sentence_transformers import SentenceTransformer

        with quiet_transformers():
            self._model = SentenceTransformer(
                str(folder.path),
                device=target.profile.torch_name,
                trust_remote_code=False,
                local_files_only=True,
                model_kwargs={"use_safetensors": True, "dtype": target.dtype},
            ).eval()

    def __call__(self, batch: Sequence[TokenIds]) -> torch.Tensor:
        return self._computed(*self._inputs(batch))

    @ranged("forward")
    def _computed(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self._model({"input_ids": ids, "attention_mask": mask})["sentence_embedding"]
        return vectors.float()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bar of theirs in the middle of ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
