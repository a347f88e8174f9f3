"""Workers that embed texts, one per engine: load a model, find its best setting, embed. Run in the peer's environment
as `embedding.py NAME`. A custom worker imports `Loaded`, `Wish` and `serve`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from answering import answer, read_json, timed

Encode = Callable[[list[str], Any], Any]
"""Texts and a setting -> unit vectors (n, dimension), in order."""
BATCH_SIZES = (8, 16, 32, 64)
BUDGETS = (512, 1024, 4096)  # tokens per batch, for batches sorted by length in tokens


@dataclass(frozen=True)
class Loaded:
    """`settings`: candidates; the fastest on the measured texts is used. `about`: facts for the report."""

    encode: Encode
    settings: Sequence[Any]
    about: dict[str, Any]


@dataclass(frozen=True)
class Wish:
    """`model`: a sentence-transformers folder. `cache`: a folder for graphs and copies of the model."""

    model: str
    device: str
    threads: int
    cache: Path


class Worker:
    def __init__(self, load: Callable[[Wish], Loaded]) -> None:
        self._load = load
        self._texts: dict[str, list[str]] = {}
        self._best: dict[str, Any] = {}

    def load(self, model: str, device: str, threads: int, cache: str) -> dict[str, Any]:
        wish = Wish(model, device, threads, Path(cache))
        self._loaded, took = timed(lambda: self._load(wish))
        return {"load_seconds": took["seconds"], "about": self._loaded.about}

    def tune(self, texts: str) -> dict[str, Any]:
        """Warm up, run every setting once on all the texts, and keep the fastest."""
        given = self._read(texts)
        settings = self._loaded.settings
        self._loaded.encode(given[: max(8, len(given) // 4)], settings[0])
        took = [timed(lambda: self._loaded.encode(given, each))[1]["seconds"] for each in settings]  # noqa: B023
        self._best[texts] = settings[took.index(min(took))]
        return {"setting": self._best[texts], "tried": dict(zip(map(str, settings), took, strict=True))}

    def embed(self, texts: str, out: str | None = None) -> dict[str, Any]:
        setting = self._best.get(texts, self._loaded.settings[0])
        vectors, took = timed(lambda: self._loaded.encode(self._read(texts), setting))
        if out is not None:
            np.save(out, np.asarray(vectors, dtype=np.float32))
        return dict(took)

    def _read(self, file: str) -> list[str]:
        if file not in self._texts:
            self._texts[file] = read_json(file)
        return self._texts[file]


def serve(packages: Sequence[str], load: Callable[[Wish], Loaded]) -> None:
    worker = Worker(load)
    answer(packages, load=worker.load, tune=worker.tune, embed=worker.embed)


def in_batches(lengths: Sequence[int], budget: int, run: Callable[[list[int]], Any]) -> Any:
    """Run positions in batches of similar lengths, longest first, and return all vectors in order. A batch costs its
    longest text times its size."""
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


def sentence_transformers(wish: Wish) -> Loaded:
    """Load `encode` on torch in fp32; on a GPU in fp16 with larger batches, its best setting there."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(wish.threads)
    model = SentenceTransformer(wish.model, device=wish.device, local_files_only=True)
    on_gpu = wish.device != "cpu"
    if on_gpu:
        model = model.half()

    def encode(texts: list[str], size: int) -> Any:
        return model.encode(texts, batch_size=size, normalize_embeddings=True, show_progress_bar=False)

    sizes = (64, 128, 256, 512, 1024) if on_gpu else BATCH_SIZES
    return Loaded(encode, sizes, {"precision": "fp16" if on_gpu else "fp32"})


def infinity(wish: Wish) -> Loaded:
    """Load infinity's engine for torch in this process, without its HTTP layer."""
    import torch
    from infinity_emb import EngineArgs, SyncEngineArray

    torch.set_num_threads(wish.threads)
    on_gpu = wish.device != "cpu"
    engines: dict[int, Any] = {}

    def engine(size: int) -> Any:
        if size not in engines:
            arguments = EngineArgs(
                model_name_or_path=wish.model,
                engine="torch",
                device=wish.device,
                batch_size=size,
                dtype="float16" if on_gpu else "float32",
                bettertransformer=False,
                model_warmup=False,
            )
            engines[size] = SyncEngineArray.from_args([arguments])
        return engines[size]

    def encode(texts: list[str], size: int) -> Any:
        vectors, _ = engine(size).embed(model=wish.model, sentences=texts).result()
        return vectors

    return Loaded(encode, BATCH_SIZES, {"precision": "fp16" if on_gpu else "fp32"})


def onnx(wish: Wish, *, int8: bool = False) -> Loaded:
    """Load ONNX Runtime on the CPU: encoder and pooling, exported from torch and fused, in batches sorted by length in
    tokens. `int8`: ONNX Runtime's dynamic quantisation, one scale per channel."""
    import onnxruntime
    from tokenizers import Tokenizer

    file, fused = exported(Path(wish.model), wish.cache)
    if int8:
        file = quantized(file)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = wish.threads, 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(Path(wish.model) / "tokenizer.json"))
    limits = read_json(str(Path(wish.model) / "sentence_bert_config.json"))
    tokenizer.enable_truncation(int(limits["max_seq_length"]))
    tokenizer.no_padding()

    def encode(texts: list[str], budget: int) -> Any:
        tokens = [each.ids for each in tokenizer.encode_batch(texts)]

        def run(batch: list[int]) -> Any:
            longest = len(tokens[batch[0]])
            ids = np.zeros((len(batch), longest), dtype=np.int64)
            mask = np.zeros_like(ids)
            for row, position in enumerate(batch):
                ids[row, : len(tokens[position])] = tokens[position]
                mask[row, : len(tokens[position])] = 1
            return session.run(["vectors"], {"input_ids": ids, "attention_mask": mask})[0]

        return in_batches([len(ids) for ids in tokens], budget, run)

    return Loaded(encode, BUDGETS, {"precision": "int8" if int8 else "fp32", "fused": fused})


def exported(model: Path, cache: Path) -> tuple[Path, bool]:
    """Return the fused graph, or the plain one if ONNX Runtime's optimiser finds no attention to fuse."""
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
        """Encoder, pooling and normalisation."""

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

    config = read_json(str(model / "1_Pooling" / "config.json"))
    first = config.get("pooling_mode_cls_token") or config.get("pooling_mode") == "cls"
    # ONNX Runtime's optimiser recognises only eager attention.
    encoder = AutoModel.from_pretrained(model, attn_implementation="eager", local_files_only=True).eval()
    ids = torch.ones(2, 16, dtype=torch.int64)
    free = {0: "texts", 1: "tokens"}
    draft = file.with_suffix(".draft.onnx")
    torch.onnx.export(
        Whole(encoder, "cls" if first else "mean").eval(),
        (ids, torch.ones_like(ids)),
        str(draft),
        input_names=["input_ids", "attention_mask"],
        output_names=["vectors"],
        dynamic_axes={"input_ids": free, "attention_mask": free, "vectors": {0: "texts"}},
        opset_version=18,
        dynamo=False,
    )
    draft.rename(file)


def quantized(file: Path) -> Path:
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic

    made = file.with_name(f"{file.stem}-int8.onnx")
    if not made.exists():
        draft = made.with_suffix(".draft.onnx")
        # ONNX's shape inference does not know the types of fused operators.
        known = {"DefaultTensorType": TensorProto.FLOAT}
        quantize_dynamic(file, draft, per_channel=True, weight_type=QuantType.QInt8, extra_options=known)
        draft.rename(made)
    return made


def openvino(wish: Wish) -> Loaded:
    """Load sentence-transformers' OpenVINO backend, in bf16 if the CPU supports it, in batches sorted by length in
    tokens, because `encode` sorts by characters."""
    from openvino import Core
    from sentence_transformers import SentenceTransformer

    copy = wish.cache / "model"
    if not copy.exists():
        draft = wish.cache / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(Path(wish.model), draft)
        draft.rename(copy)
    config = {"INFERENCE_NUM_THREADS": str(wish.threads), "NUM_STREAMS": "1", "PERFORMANCE_HINT": "LATENCY"}
    arguments = {"device": "CPU", "ov_config": config}
    exists = any(copy.rglob("openvino_model.xml"))
    model = SentenceTransformer(
        str(copy),
        backend="openvino",
        device="cpu",
        local_files_only=True,
        model_kwargs=arguments | {"export": not exists},
    )
    if not exists:
        model.save_pretrained(str(copy))
    tokenizer = model.tokenizer

    def encode(texts: list[str], budget: int) -> Any:
        lengths = [len(ids) for ids in tokenizer(texts, truncation=True, max_length=model.max_seq_length)["input_ids"]]

        def run(batch: list[int]) -> Any:
            some = [texts[position] for position in batch]
            return model.encode(some, batch_size=len(some), normalize_embeddings=True, show_progress_bar=False)

        return in_batches(lengths, budget, run)

    kept = Core().get_property("CPU", "INFERENCE_PRECISION_HINT")
    return Loaded(encode, BUDGETS, {"precision": str(kept)})


TORCH = ("sentence-transformers", "transformers", "torch")
ENGINES: dict[str, tuple[Sequence[str], Callable[[Wish], Loaded]]] = {
    "sentence-transformers": (TORCH, sentence_transformers),
    "infinity": (("infinity-emb", *TORCH), infinity),
    "onnx": (("onnxruntime", "onnx", "transformers", "torch", "tokenizers"), onnx),
    "onnx-int8": (("onnxruntime", "onnx", "transformers", "torch", "tokenizers"), partial(onnx, int8=True)),
    "openvino": (("openvino", "optimum-intel", "optimum", *TORCH), openvino),
}

if __name__ == "__main__":
    serve(*ENGINES[sys.argv[-1]])
