"""ONNX Runtime on the CPU: the encoder with its pooling, exported once from torch and fused for ONNX Runtime, fed with
batches sorted by length in tokens. `how` {"int8": true}: its dynamic quantisation, a scale a channel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from embedding import BUDGETS, Loaded, Wish, by_length, max_length_of, pooling_of, serve

OPSET = 18


def load(wish: Wish) -> Loaded:
    import onnxruntime
    from tokenizers import Tokenizer

    int8 = bool(wish.how.get("int8"))
    file, fused = exported(Path(wish.model), wish.cache)
    if int8:
        file = quantized(file)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = wish.threads, 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(Path(wish.model) / "tokenizer.json"))
    tokenizer.enable_truncation(max_length_of(wish.model))
    tokenizer.no_padding()

    def encode(texts: list[str], budget: int) -> Any:
        tokens = [each.ids for each in tokenizer.encode_batch(texts)]
        vectors: Any = None
        for batch in by_length([len(ids) for ids in tokens], budget):
            longest = len(tokens[batch[0]])
            ids = np.zeros((len(batch), longest), dtype=np.int64)
            mask = np.zeros_like(ids)
            for row, position in enumerate(batch):
                ids[row, : len(tokens[position])] = tokens[position]
                mask[row, : len(tokens[position])] = 1
            found = session.run(["vectors"], {"input_ids": ids, "attention_mask": mask})[0]
            if vectors is None:
                vectors = np.empty((len(texts), found.shape[1]), dtype=np.float32)
            vectors[batch] = found
        return vectors

    return Loaded(encode, BUDGETS, {"precision": "int8" if int8 else "fp32", "fused": fused})


def exported(model: Path, cache: Path) -> tuple[Path, bool]:
    """The fused graph, or the plain one where ONNX Runtime's optimiser finds no attention to fuse."""
    cache.mkdir(parents=True, exist_ok=True)
    plain, fused = cache / "plain.onnx", cache / "fused.onnx"
    if not plain.exists():
        _export(model, plain)
    if not fused.exists() and not (cache / "not-fused").exists():
        from onnxruntime.transformers.optimizer import optimize_model
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model)
        graph = optimize_model(
            str(plain), model_type="bert", num_heads=config.num_attention_heads, hidden_size=config.hidden_size
        )
        if graph.get_fused_operator_statistics().get("Attention"):
            graph.save_model_to_file(str(fused))
        else:
            (cache / "not-fused").touch()
    return (fused, True) if fused.exists() else (plain, False)


def _export(model: Path, file: Path) -> None:
    import torch
    from transformers import AutoModel

    class Whole(torch.nn.Module):
        """Encoder, pooling and length 1."""

        def __init__(self, encoder: Any, pooling: str) -> None:
            super().__init__()
            self.encoder = encoder
            self.pooling = pooling

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            if self.pooling == "cls":
                pooled = hidden[:, 0]
            else:
                weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
                pooled = (hidden * weights).sum(1) / weights.sum(1)
            return torch.nn.functional.normalize(pooled, dim=-1)

    # Eager attention is the form that ONNX Runtime's optimiser knows.
    encoder = AutoModel.from_pretrained(model, attn_implementation="eager", local_files_only=True).eval()
    ids = torch.ones(2, 16, dtype=torch.int64)
    free = {0: "texts", 1: "tokens"}
    draft = file.with_suffix(".draft.onnx")
    torch.onnx.export(
        Whole(encoder, pooling_of(str(model))).eval(),
        (ids, torch.ones_like(ids)),
        str(draft),
        input_names=["input_ids", "attention_mask"],
        output_names=["vectors"],
        dynamic_axes={"input_ids": free, "attention_mask": free, "vectors": {0: "texts"}},
        opset_version=OPSET,
        dynamo=False,
    )
    draft.rename(file)


def quantized(file: Path) -> Path:
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic

    made = file.with_name(f"{file.stem}-int8.onnx")
    if not made.exists():
        draft = made.with_suffix(".draft.onnx")
        # Outputs of fused operators have no type that ONNX's own inference knows.
        known = {"DefaultTensorType": TensorProto.FLOAT}
        quantize_dynamic(file, draft, per_channel=True, weight_type=QuantType.QInt8, extra_options=known)
        draft.rename(made)
    return made


if __name__ == "__main__":
    serve(("onnxruntime", "onnx", "transformers", "torch", "tokenizers"), load)
