"""The Universal Sentence Encoder, multilingual v3 (Yang et al., 2019, arXiv:1907.04307), in its convolutional form.

Two convolutions over windows of 2, 3 and 5 tokens, their sum over each text, and a small network of residuals.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from ...device import DeviceProfile
from .. import ModelUnsupported, Pause, TokenBatch
from ..conversion import USE_CHUNKS
from ..folder import Folder
from .linears import Affine, linear
from .packed import load_tensors
from .staging import uploads_for

# Tokens of a window, and those of them before its own token.
WINDOWS = ((2, 0), (3, 1), (5, 2))
_BEFORE, _AFTER = 2, 2  # of the widest window


class UniversalEncoder:
    """An `Encoder` over packed tokens that pauses between windows. Vectors equal the package's to 1e-6 in fp32.

    A convolution is one product of all tokens with the matrices of all places in a window, and then a sum for each
    window. The first one depends on the token alone, so it multiplies each token of a batch once.
    """

    path = "packed"
    pauses = len(WINDOWS)

    def __init__(self, folder: Folder, profile: DeviceProfile, dtype: torch.dtype) -> None:
        """Raises ModelUnsupported for missing or damaged weights."""
        device = torch.device(profile.torch_name)
        prepack = profile.kind == "cpu"
        exact = load_tensors(folder, device, torch.float32)
        tensors = {name: each.to(dtype) if each.is_floating_point() else each for name, each in exact.items()}
        try:
            self._table, self._dtype = tensors["table"], dtype
            # In fp32: rounding these two to bf16 alone costs 0.008 of a cosine.
            self._scale, self._least = exact["scale"], exact["lo"]
            joint = [torch.cat([tensors[f"{name}{size}"] for size, _ in WINDOWS], -1) for name in _JOINT]
            self._project = linear(Affine(joint[0].T.contiguous(), joint[1]), prepack=prepack)
            self._token_norm, self._norm = Affine(*joint[2:]), Affine(tensors["ln_g"], tensors["ln_b"])
            self._first, self._second = (
                [linear(_places(tensors, step, size, before), prepack=prepack) for size, before in WINDOWS]
                for step in (1, 2)
            )
            # Sums over texts, and what follows, in fp32: it takes as long as two tokens of the text.
            self._out = Affine(exact["cnn_W"].T.contiguous(), exact["cnn_b"])
            self._dense = [exact[name].T.contiguous() for name in ("d0", "d1", "p1", "d2", "p3", "d3")]
        except KeyError as error:
            raise ModelUnsupported(f"model {folder.name!r} lacks the tensor {error}") from error
        self._epsilon = float(folder.config["layer_norm_eps"])
        self._uploads = uploads_for(device)

    def __call__(self, batch: TokenBatch, pause: Pause | None = None) -> torch.Tensor:
        """Copy all inputs of the batch to the device in one transfer, then compute."""
        parts = [part.ravel() for part in staged(batch)]
        sizes = list(map(len, parts))
        np.concatenate(parts, out=self._uploads.room(sum(sizes)))
        distinct, places, windows, cumulative = torch.split(self._uploads.send(), sizes)
        return self._compute(distinct, places, windows.view(len(places), -1), cumulative, pause)

    def _compute(
        self,
        distinct: torch.Tensor,
        places: torch.Tensor,
        windows: torch.Tensor,
        cumulative: torch.Tensor,
        pause: Pause | None,
    ) -> torch.Tensor:
        """Return vectors, float32 (texts, dimension), of int32 inputs as `staged` makes them."""
        chunk = (distinct % USE_CHUNKS).long()
        words = F.embedding(distinct, self._table).float()
        words = words.mul_(self._scale[chunk, None]).add_(self._least[chunk, None]).to(self._dtype)
        tokens = self._normed(self._project(words), self._token_norm)
        tokens[-1] = 0  # beyond a text's borders
        found = [F.embedding(places, words)]
        for part, (size, before), first, second in zip(
            tokens.chunk(len(WINDOWS), -1), WINDOWS, self._first, self._second, strict=True
        ):
            at = windows[:, _BEFORE - before :][:, :size]
            inside = torch.arange(size, dtype=at.dtype, device=at.device)
            y = _sums(first(part), F.embedding(at, places[:, None]).squeeze(-1) * size + inside)
            y = y.relu_().add_(F.embedding(places, part))
            y[-1] = 0
            found.append(_sums(second(y), at * size + inside).relu_().add_(y))
            if pause is not None:
                pause()
        whole = self._normed(torch.cat(found, -1), self._norm).float()
        every = torch.arange(len(whole), dtype=cumulative.dtype, device=whole.device)
        sums = F.embedding_bag(every, whole, cumulative, mode="sum", include_last_offset=True)[:-1]
        lengths = cumulative.diff()[:-1, None].float()
        x = F.linear(sums / lengths, self._out.weight, self._out.bias) * lengths.sqrt()
        d0, d1, p1, d2, p3, d3 = self._dense
        y = (F.linear(x, p1) + F.linear(F.linear(x, d0).relu_(), d1)).relu_()
        return (F.linear(y, p3) + F.linear(F.linear(y, d2).relu_(), d3)).tanh_()

    def _normed(self, x: torch.Tensor, norm: Affine) -> torch.Tensor:
        return F.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, self._epsilon)


_JOINT = ("proj", "proj_b", "ln_g", "ln_b")  # one product and norm for all windows


def _places(tensors: Mapping[str, torch.Tensor], step: int, size: int, before: int) -> Affine:
    """Return the layer from one token to its part in each place of a window, (size x out, in), of a convolution's
    weight (size x in, out). The bias is in the place of the window's own token, which every window has."""
    weight, bias = tensors[f"w{step}_{size}"], tensors[f"b{step}_{size}"]
    inner, out = len(weight) // size, weight.shape[1]
    biases = torch.zeros(size, out, dtype=bias.dtype, device=bias.device)
    biases[before] = bias
    return Affine(weight.view(size, inner, out).transpose(1, 2).reshape(size * out, inner).contiguous(), biases.ravel())


def _sums(parts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the sum of each window, (windows, out), of `parts` (tokens, size x out) at `places` (windows, size)."""
    return F.embedding_bag(places, parts.view(-1, parts.shape[1] // places.shape[1]), mode="sum")


def staged(batch: TokenBatch) -> tuple[NDArray[np.int32], ...]:
    """Return the distinct ids of a batch; for each token the place of its id among them, and the tokens in the widest
    window around it; and the first token of each text. The last id and the last tokens, in a text of their own,
    represent what is outside a text. They fill up the numbers to multiples of 16: see `packed.filled`."""
    distinct, places = np.unique(batch.ids, return_inverse=True)
    tokens, kinds = len(batch.ids), len(distinct)
    rows, ids = tokens + 16 - tokens % 16, kinds + 16 - kinds % 16
    every = np.arange(rows)[:, None]
    windows = every + np.arange(-_BEFORE, _AFTER + 1)
    starts, ends = (np.append(borders, 0) for borders in (batch.offsets[:-1], batch.offsets[1:]))
    starts[-1], ends[-1] = tokens, rows
    text = np.repeat(np.arange(len(starts)), np.append(batch.lengths, rows - tokens))
    outside = (windows < starts[text, None]) | (windows >= ends[text, None])
    windows[outside] = rows - 1
    arrays = (
        np.append(distinct, np.zeros(ids - kinds, np.int32)),
        np.append(places, np.full(rows - tokens, ids - 1)),
        windows,
        np.append(batch.offsets, rows),
    )
    return tuple(array.astype(np.int32) for array in arrays)
