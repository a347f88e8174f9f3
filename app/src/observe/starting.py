"""What a container looks at before it becomes the service: is there the GPU that is asked for, and what will compute?
Bounded in time, whatever the driver does. Asks torch in a child process; knows no terminal and no HTTP.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

from app.src.observe.doctor import Fault, why_no_gpu
from app.src.settings import EmbeddingSettings

LOOK_SECONDS = 60.0
"""For torch to be read from a cold disk and to make a context on the card: 3 to 20 s."""
_AFTER_KILL = 2.0
_DRIVER = "look at nvidia-smi on the host; a container is given its card by nvidia-container-toolkit (--gpus)"
Answer = Mapping[str, object]


def ask_torch(embedding: EmbeddingSettings, seconds: float = LOOK_SECONDS) -> Answer:
    """As `core.first_look` answers. Raises Fault, also when there is no answer in time."""
    command = [sys.executable, "-m", "app.src.core.first_look", embedding.device, embedding.precision]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # one that waits inside the driver cannot even be killed
            child.communicate(timeout=_AFTER_KILL)
        raise Fault(f"torch and the driver gave no answer in {seconds:g} s", _DRIVER) from None
    if child.returncode:
        said = errors.strip().splitlines()
        raise Fault(said[-1] if said else f"torch ended with {child.returncode}", _DRIVER)
    answer: Answer = json.loads(out)
    return answer


def look(embedding: EmbeddingSettings, ask: Callable[[EmbeddingSettings], Answer] = ask_torch) -> str:
    """One line: what will compute, in which precision, and why. Raises Fault where a GPU is asked for (USE_GPU=true,
    [embedding] expect_gpu, or a device by name) and the model would not compute on it."""
    wanted = embedding.expect_gpu or embedding.device.startswith("cuda")
    missing = why_no_gpu(embedding)
    if missing is None:
        try:
            answer = ask(embedding)
        except Fault as fault:
            missing = fault
        else:
            if answer["kind"] == "cuda":
                capability = f"compute capability {answer['capability']}"
                return f"{answer['name']} ({capability}) computes in {answer['precision']}: {answer['reason']}"
            missing = Fault("torch sees no CUDA device", _DRIVER)
    if wanted:
        raise missing
    return f"the CPU computes: {missing}"
