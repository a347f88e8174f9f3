"""What each variable of the guides does on each kind of card, worked out by the code that decides: the variable's own
`assign`, `choose_precision` and the device profiles. Makes a table of docs/gpu.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from app.src.core.device import DeviceProfile, choose_precision
from app.src.settings.variables import GUIDE_VARIABLES, VARIABLES, Variable

NOTHING = "–"
COLUMNS: Mapping[str, DeviceProfile] = {
    "P4": DeviceProfile.of_card("Tesla P4"),
    "P100": DeviceProfile.of_card("Tesla P100"),
    "V100": DeviceProfile.of_card("Tesla V100"),
    "T4": DeviceProfile.of_card("Tesla T4"),
    "Ampere": DeviceProfile.of_card("NVIDIA A10"),
    "Ada": DeviceProfile.of_card("NVIDIA L4"),
    "Hopper": DeviceProfile.of_card("NVIDIA H100"),
    "Blackwell": DeviceProfile.of_card("NVIDIA B200"),
    "CPU": DeviceProfile.cpu(),
}
TENSORRT_FROM = (7, 5)
"""TensorRT 10.5 and newer have no Volta: NVIDIA, TensorRT release notes."""
Cell = Callable[[DeviceProfile], str]


def guides_variables() -> dict[str, Variable]:
    return {each.name: each for each in (*VARIABLES, *GUIDE_VARIABLES) if not each.name.startswith("HANA_")}


def _precision(name: str, text: str) -> Cell:
    """What is computed in when the variable says so."""
    assign = guides_variables()[name].assign
    assert assign is not None
    asked = assign(text).get(("embedding", "precision"))

    def cell(profile: DeviceProfile) -> str:
        chosen, _ = choose_precision(profile, asked or "auto")
        if asked is None:
            return "as measured" if profile.kind == "cpu" else chosen
        if profile.kind == "cpu":
            return f"{chosen}, unmeasured"
        return f"{chosen} anyway" if choose_precision(profile)[0] == chosen else f"{chosen}, slower"

    return cell


def _tensorrt(words: str) -> Cell:
    return lambda profile: words if (profile.capability or (0, 0)) >= TENSORRT_FROM else NOTHING


def _on_cards(words: str) -> Cell:
    return lambda profile: words if profile.kind == "cuda" else NOTHING


def _tf32(words: str) -> Cell:
    return lambda profile: words if profile.tf32 else NOTHING


def _second_card(profile: DeviceProfile) -> str:
    return "that card" if profile.kind == "cuda" else "refused"


def _everywhere(words: str) -> Cell:
    return lambda _profile: words


_nothing = _everywhere(NOTHING)
_gated = "gated INT8"

ROWS: tuple[tuple[str, str, Cell], ...] = (
    ("T4_GPU_FP16_MODE", "true", _precision("T4_GPU_FP16_MODE", "true")),
    ("T4_GPU_FP16_MODE", "false", _precision("T4_GPU_FP16_MODE", "false")),
    ("T4_GPU_INT8_MODE", "true", lambda profile: _gated if profile.kind == "cpu" else _tensorrt(_gated)(profile)),
    ("T4_GPU_MAX_WORKSPACE_SIZE", "4294967296", _tensorrt("building")),
    ("T4_GPU_OPTIMIZATION_LEVEL", "3", _tensorrt("building")),
    ("T4_GPU_DYNAMIC_BATCH_SIZE", "true", _nothing),
    ("T4_GPU_MAX_BATCH_SIZE", "64", _nothing),
    ("T4_GPU_ENABLE_PROFILING", "true", _nothing),
    ("T4_GPU_ENABLE_TENSOR_CORES", "false", _precision("T4_GPU_ENABLE_TENSOR_CORES", "false")),
    ("T4_GPU_ENABLE_SPARSE", "true", _nothing),
    ("T4_GPU_MEMORY_FRACTION", "0.8", _on_cards("bounds it")),
    ("GPU_DEVICE_ID", "1", _second_card),
    ("USE_GPU", "false", _on_cards("the CPU")),
    ("USE_GPU", "true", lambda profile: NOTHING if profile.kind == "cuda" else "a fault"),
    ("GPU_MEMORY_FRACTION", "0.8", _on_cards("bounds it")),
    ("RESERVE_MEMORY", "1024", _on_cards("bounds it")),
    ("ENABLE_AMP", "true", _nothing),
    ("CUDNN_BENCHMARK", "true", _nothing),
    ("CUDNN_FRONTEND_ENABLE_TENSOR_CORE_MATH_FP32", "1", _nothing),
    ("CUDNN_FRONTEND_ENABLE_BACKWARD_CONVOLUTION_FP16", "1", _nothing),
    ("CUDNN_FRONTEND_ENABLE_BACKWARD_CONVOLUTION_FP32", "1", _nothing),
    ("TF32_OVERRIDE", "1", _nothing),
    ("NVIDIA_TF32_OVERRIDE", "0", _tf32("no TF32")),
    ("NVIDIA_TF32_OVERRIDE", "1", _nothing),
    ("INFERENCE_BATCH_SIZE", "64", _nothing),
    ("DOCUMENT_BATCH_SIZE", "16", _nothing),
    ("NER_BATCH_SIZE", "32", _nothing),
    ("WORKER_CONCURRENCY", "2", _everywhere("jobs")),
    ("WORKER_MAX_TASKS_PER_CHILD", "100", _everywhere("ends, to be started anew")),
    ("CUDA_VISIBLE_DEVICES", "0", _on_cards("CUDA's")),
    ("CUDA_LAUNCH_BLOCKING", "1", _on_cards("slower")),
    ("CUDA_LAUNCH_BLOCKING", "0", _nothing),
    ("CUDA_MODULE_LOADING", "LAZY", _nothing),
    ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128", _on_cards("torch's")),
    ("PYTORCH_JIT", "1", _nothing),
)


def table() -> str:
    lines = [f"| variable | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    for name, text, cell in ROWS:
        cells = " | ".join(cell(profile) for profile in COLUMNS.values())
        lines.append(f"| `{name}={text}` | {cells} |")
    return "\n".join(lines)
