"""Checks of torch, NVIDIA's driver and the cards: which device computes, and why it is the CPU although a GPU is
required."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from app.src.core.device import BUILDS, Capability, builds_for, kernels_exist, torch_build, what_to_install
from app.src.core.nvml import GpuSnapshot, GpuState, driver_too_old, snapshot_within, summary
from app.src.observe import Fault
from app.src.settings import EmbeddingSettings
from connector.extras import install_command

if TYPE_CHECKING:
    from app.src.core.engine import Engine

# Reading torch from a cold disk and creating a context take 3 to 20 s, on a slow disk minutes: api and
# worker may do it in parallel. The start periods of Dockerfile.t4, the compose file and the probes include it.
FIRST_LOOK_SECONDS = 180.0
_DRIVER_SECONDS = 2.0  # the driver may hang
_PYTORCH = "https://download.pytorch.org/whl"
_NO_CARD = "install the NVIDIA driver (in a container: start it with --gpus all), or USE_GPU=false"
_NO_CUDA = "check CUDA_VISIBLE_DEVICES, nvidia-smi, and that the container was started with --gpus all"


def torch(embedding: EmbeddingSettings, found: GpuSnapshot | None = None) -> str:
    """Check that torch is installed and the driver supports its CUDA build. Does not import torch."""
    build = torch_build()
    if build is None:
        if embedding.hashing or embedding.in_hana:
            return f"not installed; {embedding.model} needs none"
        raise Fault("torch is not installed", install_command("engine"))
    version, cuda = build
    if cuda is None:
        return f"torch {version}, a build for the CPU"
    found = found or snapshot_within(_DRIVER_SECONDS)
    driver = found.driver_version
    floor = driver_too_old(driver, cuda) if driver and not embedding.on_cpu else None
    if floor is not None:
        raise Fault(
            f"driver {driver} is too old for this torch {version} (built for CUDA {cuda}, which needs "
            f"driver {floor} or newer): the GPU would not be used",
            f"install NVIDIA driver {floor} or newer; or {what_to_install(_first_capability(found), _branch(found))}; "
            'or [embedding] device = "cpu"',
        )
    return f"torch {version}, built for CUDA {cuda}"


def gpu(embedding: EmbeddingSettings, found: GpuSnapshot | None = None) -> str:
    """Describe the cards and their load. Raises Fault where a GPU is required and torch cannot use one."""
    found = found or snapshot_within(_DRIVER_SECONDS)
    wanted = embedding.expect_gpu or embedding.on_named_card
    if not found.devices:
        if wanted:
            raise Fault(f"a GPU is required, but {found.reason}", _NO_CARD)
        return f"the CPU is used: {found.reason}"
    cards = []
    for device in found.devices:
        if device.reason is not None:
            cards.append(f"GPU {device.index} reports nothing: {device.reason}")
            continue
        memory, capability_ = device.memory_total_bytes, device.compute_capability
        size = f"{memory / (1 << 30):.0f} GiB" if memory else ""
        known = (size, f"compute capability {capability_}" if capability_ else "", summary(device))
        told = ", ".join(filter(None, known))
        warning = "; THROTTLED: heat or the power supply slows it down" if device.throttled_abnormally else ""
        cards.append(device.name + (f" ({told})" if told else "") + warning)
    described, build = f"{'; '.join(cards)}; driver {found.driver_version}", torch_build()
    if build is None or build[1] is not None or embedding.hashing or embedding.in_hana:
        return described
    if not wanted:
        return f"{described}; not used, torch is a build for the CPU"
    wants = _first_capability(found), _branch(found)
    fix = what_to_install(*wants)
    if builds := builds_for(*wants):
        # Forced, because pip would keep a CPU build whose version matches. The index has no CPU builds.
        index = builds[0].index or f"{_PYTORCH}/cu{builds[0].cuda.replace('.', '')}"
        fix = f"pip install --force-reinstall 'torch=={builds[0].torch}.*' --index-url {index}"
    raise Fault(f"torch {build[0]} is a build for the CPU and cannot use {described}", fix)


def kernels(embedding: EmbeddingSettings, found: GpuSnapshot | None = None) -> str:
    """Check in the list of published wheels that the installed torch has kernels for the card; asking torch would take
    seconds."""
    if embedding.on_cpu:
        return f"{embedding.model} needs no GPU" if embedding.hashing or embedding.in_hana else "the CPU computes"
    found, build = found or snapshot_within(_DRIVER_SECONDS), torch_build()
    if not found.devices or build is None:
        return "no GPU found" if not found.devices else "torch is not installed"
    if embedding.device == "all":  # a card without kernels is left out
        answers, fault = [], None
        for card in found.devices:
            try:
                answers.append(_kernels(card, found, build))
            except Fault as without:
                fault = without
        if fault is not None and not answers:
            raise fault
    else:
        numbers = [int(name.partition(":")[2] or 0) for name in embedding.device.split(",")]
        named = [each for each in found.devices if each.index in numbers] or found.devices[:1]
        answers = [_kernels(card, found, build) for card in named]
    return "; ".join(dict.fromkeys(answers))


def _kernels(card: GpuState, found: GpuSnapshot, build: tuple[str, str | None]) -> str:
    capability = _capability(card)
    if capability is None:
        return f"{card.name} does not report its compute capability; loading the model will show"
    to_do = what_to_install(capability, _branch(found))
    version, cuda = build
    if cuda is None:
        return f"torch is a build for the CPU; for {card.name} (compute capability {card.compute_capability}): {to_do}"
    release = ".".join(cuda.split(".")[:2])
    built_for = next((each.architectures for each in BUILDS if each.cuda == release), ())
    if not built_for:
        return f"unknown for torch {version} (CUDA {cuda}); loading the model will show"
    if not kernels_exist(built_for, capability):
        raise Fault(
            f"{card.name} has compute capability {card.compute_capability}, and torch {version} (CUDA "
            f"{cuda}) has kernels for {', '.join(built_for)} only",
            to_do,
        )
    return f"torch {version} (CUDA {cuda}) supports {card.name} ({card.compute_capability})"


def why_no_gpu(embedding: EmbeddingSettings) -> Fault | None:
    """Return why settings, driver or packages force the CPU, or None."""
    if embedding.hashing:
        return Fault(f"the model {embedding.model} runs on CPUs only", "choose another model, or USE_GPU=false")
    if embedding.in_hana:
        return Fault(f"the model {embedding.model} runs in HANA", "choose another model, or USE_GPU=false")
    if embedding.on_cpu:
        return Fault('[embedding] device is "cpu"', 'device = "auto", or USE_GPU=false')
    found = snapshot_within(_DRIVER_SECONDS)
    if not found.devices:
        return Fault(str(found.reason), _NO_CARD)
    for check in (torch, gpu, kernels):
        try:
            check(embedding, found)
        except Fault as fault:
            return fault
    return None


def gpu_missing(embedding: EmbeddingSettings, engine: Engine | None) -> Fault | None:
    """Return why the CPU computes although a GPU is required (USE_GPU=true), with the fix, or None. Without an engine
    it checks what is installed."""
    if not embedding.expect_gpu or (engine is not None and engine.profile.kind == "cuda"):
        return None
    fault = why_no_gpu(embedding)
    if fault is None and engine is not None:
        fault = Fault(f"torch sees no CUDA device ({engine.precision_reason})", _NO_CUDA)
    return fault


def gpu_message(missing: Fault) -> str:
    """Return one line for logs."""
    return f"a GPU is required (USE_GPU=true), but the CPU is used: {missing}. Fix: {missing.fix}"


def first_look(embedding: EmbeddingSettings, seconds: float = FIRST_LOOK_SECONDS) -> str:
    """Return a line for `start`: which device will compute, in which precision, and why. Raises Fault if a GPU is
    required (USE_GPU, [embedding] expect_gpu, or a device by name) but would not compute."""
    missing = why_no_gpu(embedding)
    try:
        if missing is None:
            answer = ask_torch(embedding, seconds)
            if answer["kind"] == "cuda":
                card = f"{answer['name']} (compute capability {answer['capability']})"
                return f"{card} computes in {answer['precision']}: {answer['reason']}"
            missing = Fault("torch sees no CUDA device", _NO_CUDA)
    except Fault as fault:
        missing = fault
    if embedding.expect_gpu or embedding.on_named_card:
        raise missing
    return f"the CPU computes: {missing}"


def ask_torch(embedding: EmbeddingSettings, seconds: float) -> dict[str, Any]:
    """Return the answer of `core.first_look`, run in a child process because the driver may hang. Raises Fault."""
    command = [sys.executable, "-m", "app.src.core.first_look", embedding.device, embedding.precision]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # a process waiting inside the driver cannot be killed
            child.communicate(timeout=2.0)
        raise Fault(f"torch and the driver gave no answer in {seconds:g} s", _NO_CUDA) from None
    if child.returncode:
        said = errors.strip().splitlines()
        raise Fault(said[-1] if said else f"torch ended with {child.returncode}", _NO_CUDA)
    return dict(json.loads(out))


def _capability(device: GpuState) -> Capability | None:
    major, _, minor = (device.compute_capability or "").partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def _first_capability(found: GpuSnapshot) -> Capability:
    return next((each for each in map(_capability, found.devices) if each is not None), (7, 5))


def _branch(found: GpuSnapshot) -> int | None:
    branch = (found.driver_version or "").partition(".")[0]
    return int(branch) if branch.isdecimal() else None
