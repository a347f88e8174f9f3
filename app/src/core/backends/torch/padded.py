"""Encoders that pad the texts of a batch to one length: transformers' own model with mean or CLS pooling, and
sentence-transformers' modules for every other stack.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...ranges import ranged
from ...tokens import rectangle, width_of
from .. import ModelUnsupported, Pause, TokenBatch
from ..folder import Folder
from .target import Encoder, Target

if TYPE_CHECKING:
    import torch

    from .staging import Uploads


def load_padded(folder: Folder, target: Target) -> Encoder:
    return PaddedEncoder(folder, target) if folder.pooling else StackEncoder(folder, target)


def _uploads(target: Target) -> Uploads | None:
    if target.profile.kind == "cpu":
        return None
    from .staging import uploads_for

    return uploads_for(target.place.device, pinned=target.pinned)


class _Padding:
    """What both encoders do before they compute."""

    pauses = 0

    def __init__(self, folder: Folder, target: Target) -> None:
        self._multiple = target.profile.padding_multiple(target.precision)
        self._longest = folder.max_length
        self._pad_id = int(folder.config.get("pad_token_id") or 0)
        self._uploads = _uploads(target)

    @ranged("copy")
    def _inputs(self, batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        width = width_of(batch, self._multiple, self._longest)
        ids, mask = map(torch.from_numpy, rectangle(batch, width=width, pad_id=self._pad_id))
        return (ids, mask) if self._uploads is None else self._sent(self._uploads, ids, mask)

    def _sent(self, uploads: Uploads, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy int32 to the card at once, and widen it there."""
        room = uploads.room(2 * ids.numel()).reshape(2, *ids.shape)
        room[0], room[1] = ids.numpy(), mask.numpy()
        there = uploads.send().view(2, *ids.shape).long()
        return there[0], there[1]


class PaddedEncoder(_Padding):
    """transformers' own model; pooling in fp32."""

    path = "padded"

    def __init__(self, folder: Folder, target: Target) -> None:
        super().__init__(folder, target)
        self._mean = folder.pooling == "mean"
        self._model = _load_transformer(folder, target)

    def __call__(self, batch: TokenBatch, pause: Pause | None = None) -> torch.Tensor:
        return self._computed(*self._inputs(batch))

    @ranged("forward")
    def _computed(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
        return self._pooled(hidden.float(), mask)

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


class StackEncoder(_Padding):
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

    def __call__(self, batch: TokenBatch, pause: Pause | None = None) -> torch.Tensor:
        return self._computed(*self._inputs(batch))

    @ranged("forward")
    def _computed(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        vectors: torch.Tensor = self._model({"input_ids": ids, "attention_mask": mask})["sentence_embedding"]
        return vectors.float()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch off transformers' progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
