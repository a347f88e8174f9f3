"""What must work where torch, transformers and tokenizers cannot be imported: the hashing model and every decision."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = """
import sys
for name in ("torch", "transformers", "tokenizers", "sentence_transformers", "safetensors", "huggingface_hub"):
    sys.modules[name] = None
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK + script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "script",
    [
        "from app.src.core.loading import *\n"
        "with load_engine(EngineOptions('hash:384')) as engine:\n"
        "    assert engine.embed(['oil leak', '']).shape == (2, 384)\n"
        "    assert engine.split('oil leak at the pump', 2, 0) and engine.count_tokens(['oil leak']) == [2]",
        "from app.src.core.device import *\n"
        "assert choose_precision(DeviceProfile.of_card('Tesla T4'))[0] == 'fp16'\n"
        "assert detect('cpu').kind == 'cpu'",
        "from app.src.core.memory import *; from app.src.core.device import DeviceProfile\n"
        "T4MemoryManager(DeviceProfile.of_card('Tesla T4')).calculate_optimal_batch_size(1, 1)",
        "from app.src.core.backends.folder import *; check_files(read_folder(find_folder('all-MiniLM-L6-v2'), 'x'))",
        "import app.src.core.t4_gpu_optimizer, app.src.core.backends.torch.backend, app.src.core.backends.tokenizing",
    ],
    ids=["hashing", "device", "memory", "folder", "imports"],
)
def test_runs_without_torch(script: str) -> None:
    done = run(script)
    assert done.returncode == 0, done.stderr


def test_the_block_works() -> None:
    assert "ModuleNotFoundError" in run("import torch").stderr
