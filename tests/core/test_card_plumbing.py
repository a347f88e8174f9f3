"""What joins a model to a card, tried with the smallest fakes of torch.cuda that can fail: real models whose
numbers go by way of the buffers, the measured cost of a token, recording that fails, the switches."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from app.src.core.backends import DeviceFailed, OutOfMemory, Pause, TokenBatch, Vectors
from app.src.core.backends.torch import backend as pytorch
from app.src.core.backends.torch import encoders
from app.src.core.backends.torch.backend import EngineOptions, TorchBackend
from app.src.core.backends.torch.encoders import Target, load_encoder, trial_batch
from app.src.core.backends.torch.graphs import GraphedEncoder, cuda_recorder, with_graphs
from app.src.core.backends.torch.packed import Layout, PackedEncoder, runs_of_equal_length
from app.src.core.backends.torch.process import device_clock, device_errors_mapped, never_free, on_compute_thread
from app.src.core.backends.torch.staging import SLOTS, CardUploads, CudaCard, Downloads, HostUploads
from app.src.core.device import DeviceProfile, detect
from app.src.core.engine import EmbeddingEngine
from app.src.core.memory import HEADROOM, DeviceMemory, MemoryLimits, T4MemoryManager, memory_of
from tests.core.conftest import MINILM, ScriptedBackend

TEXTS = [" ".join(["pump seal hydraulic oil leak"] * (1 + number * 7 % 23)) + f" {number}" for number in range(60)]


@pytest.fixture(autouse=True)
def _card_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is none, for what is closed as on a card."""
    if not torch.cuda.is_available():
        stream = SimpleNamespace(synchronize=lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: stream)


class HereAndNow(CudaCard):
    """A card whose queues do everything at once, in the host's memory."""

    class Queue:
        def record_event(self) -> HereAndNow.Queue:
            return self

        def wait_event(self, event: object) -> None: ...

        def synchronize(self) -> None: ...

    def __init__(self) -> None:
        self.copies = 0

    def stream(self) -> HereAndNow.Queue:
        return HereAndNow.Queue()

    computing = stream

    def on(self, stream: object) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def host(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), -1, dtype=dtype)

    def sent(self, numbers: torch.Tensor) -> torch.Tensor:
        self.copies += 1
        return numbers.clone()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copies += 1
        target.copy_(source)

    def keep_for(self, tensor: torch.Tensor, stream: object) -> None: ...


def by_way_of_a_card(packed: bool) -> tuple[TorchBackend, HereAndNow]:
    """The packaged model on the CPU, as if its numbers went to a card and back."""
    backend = TorchBackend.load(EngineOptions(MINILM, precision="fp32", device="cpu", packed=packed))
    card = HereAndNow()
    encoder: Any = backend._encoder_for(False)
    encoder._uploads = CardUploads(card)
    backend._downloads = Downloads(card)
    backend.ahead, backend.pauses = 1, 0
    return backend, card


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_model_whose_numbers_go_by_way_of_a_card_gives_the_same_vectors(
    minilm: EmbeddingEngine, packed: bool
) -> None:
    backend, card = by_way_of_a_card(packed)
    with EmbeddingEngine(backend) as engine:
        engine.memory.shrink(512)  # many batches
        texts = TEXTS[:24]
        wanted = minilm.embed(texts)
        np.testing.assert_allclose(engine.embed(texts), wanted, atol=1e-5)
        batches = engine.stats().batches
        assert batches > 3
        assert card.copies >= 2 * batches
        np.testing.assert_allclose(engine.embed(texts, "bulk"), wanted, atol=1e-5)


def test_on_a_cpu_nothing_is_overlapped(minilm: EmbeddingEngine) -> None:
    backend = minilm._backend
    assert backend.ahead == 0
    assert isinstance(backend, TorchBackend)
    assert backend._downloads is None
    assert isinstance(backend._encoder_for(False)._uploads, HostUploads)
    assert (backend.token_cost(), backend.used_bytes()) == (None, 0)


# ------------------------------------------------------------------------------------------------ running out of memory


def test_a_batch_that_failed_lets_go_of_its_tensors() -> None:
    """The error is kept until its batch is asked for; the traceback must not keep the tensors of the forward pass
    too."""
    seen: list[weakref.ref[torch.Tensor]] = []

    def forward() -> None:
        activations = torch.zeros(10)
        seen.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory")

    kept: BaseException | None = None
    try:
        with device_errors_mapped():
            forward()
    except OutOfMemory as error:
        kept = error
    assert kept is not None
    assert isinstance(kept.__cause__, torch.OutOfMemoryError)
    assert seen[0]() is None


@pytest.mark.parametrize("words", ["", "DefaultCPUAllocator: can't allocate memory"])
def test_what_failed_is_gone_while_it_is_computed_again(words: str) -> None:
    """On a CPU; without waiting for the garbage collector, which may come late."""

    class Activations: ...

    seen: list[weakref.ref[Activations]] = []
    alive: list[int] = []

    class Failing(ScriptedBackend):
        def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
            return on_compute_thread(lambda: self._mapped(batch))

        def _mapped(self, batch: TokenBatch) -> Vectors:
            with device_errors_mapped():
                return self._computed(batch)

        def _computed(self, batch: TokenBatch) -> Vectors:
            alive.append(sum(each() is not None for each in seen))
            activations = Activations()
            seen.append(weakref.ref(activations))
            if len(batch) > 20:
                raise RuntimeError(words) if words else MemoryError
            return super().forward(batch)

    backend = Failing()
    engine = EmbeddingEngine(backend)
    gc.disable()
    try:
        engine.embed(TEXTS)
        engine.embed(TEXTS, "bulk")
    finally:
        gc.enable()
        engine.close()
    assert not any(alive)


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_memory_that_runs_out_beside_torchs_allocator_is_the_engines_error(words: str) -> None:
    """So that the batch is halved: pinned memory, and a thread's first product, are not the allocator's."""
    with pytest.raises(OutOfMemory), device_errors_mapped():
        raise RuntimeError(words)


# -------------------------------------------------------------------------------------------------- a card that failed


@pytest.fixture
def broken_card(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A card whose every call fails with the same error; returns the devices that were asked."""
    asked: list[Any] = []

    class Stream:
        def synchronize(self) -> None:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def current_stream(device: Any) -> Stream:
        asked.append(device)
        return Stream()

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return asked


@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: device-side assert triggered",
        "CUDA error: unspecified launch failure",
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`",
        "CUDA driver error: unknown error",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "Triton Error [CUDA]: misaligned address",
    ],
)
@pytest.mark.proves(20)
def test_an_error_that_the_card_repeats_is_its_end(broken_card: list[Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(DeviceFailed, match="restart the process") as caught, device_errors_mapped(1):
        raise kind(words)
    assert words.partition("\n")[0] in str(caught.value)
    assert "asynchronously" not in str(caught.value)
    assert broken_card == [1], "the card of this engine, not the current one"


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: invalid configuration argument",
        "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`",
        "Triton Error [CUDA]: invalid argument",
    ],
)
@pytest.mark.proves(20)
def test_an_error_after_which_the_card_works_is_one_request_s(monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """Else one text could end the process again and again."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: SimpleNamespace(synchronize=lambda: None))
    with pytest.raises(RuntimeError) as caught, device_errors_mapped(0):
        raise RuntimeError(words)
    assert type(caught.value) is RuntimeError


@pytest.mark.usefixtures("broken_card")
def test_memory_that_runs_out_on_a_broken_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a new thread's cuBLAS handle: smaller batches would fail, too."""

    def empty_cache() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    with pytest.raises(DeviceFailed), device_errors_mapped():
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.mark.usefixtures("broken_card")
@pytest.mark.proves(20)
def test_nothing_of_a_card_that_failed_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would call CUDA once more for pinned memory and for tensors that two streams used, in a destructor, where
    the error aborts the process."""
    kept: list[object] = []  # in place of references for good
    monkeypatch.setattr("app.src.core.backends.torch.process.never_free", lambda *things: kept.extend(things))
    monkeypatch.setattr("app.src.core.backends.torch.backend.never_free", lambda *things: kept.extend(things))
    backend, card = by_way_of_a_card(True)
    downloads, encoder = backend._downloads, backend._encoder
    assert downloads is not None
    assert isinstance(encoder, PackedEncoder)
    assert isinstance(encoder._uploads, CardUploads)
    copied, held = card.copy, list[weakref.ref[torch.Tensor]]()

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        held.append(weakref.ref(source))
        copied(target, source)

    def fail(_queue: HereAndNow.Queue) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(card, "copy", copy)
    with EmbeddingEngine(backend) as engine:
        monkeypatch.setattr(HereAndNow.Queue, "synchronize", fail)
        with pytest.raises(DeviceFailed):
            engine.embed(TEXTS[:2])
        held += [weakref.ref(buffer) for buffer in (*downloads._buffers, *encoder._uploads._buffers)]
        backend.profile = DeviceProfile.of_card("Tesla T4")  # so that it is closed as on a card
        del downloads, encoder
    del backend, engine
    gc.collect()
    assert len(held) == 1 + 2 * SLOTS
    assert all(tensor() is not None for tensor in held)


def test_what_is_never_freed_survives_its_names() -> None:
    class Thing: ...

    things = [Thing(), Thing()]
    alive = [weakref.ref(thing) for thing in things]
    never_free(things[0])
    things.clear()
    gc.collect()
    assert [thing() is not None for thing in alive] == [True, False]


# ----------------------------------------------------------------------------------------------------- a token's cost


class FakeMemory:
    """torch.cuda's counters for a model that takes `fixed` once, `per_batch` for each batch and `per_token` for each
    token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, per_token: int, per_batch: int = 0, fixed: int = 0) -> None:
        self.weights, self.peak = 1 << 30, 1 << 30
        self.per_token, self.per_batch, self.fixed = per_token, per_batch, fixed
        self.calls: list[str] = []
        for name in ("synchronize", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "memory_reserved", self.memory_allocated)

    def synchronize(self, index: int) -> None:
        self.calls.append(f"synchronize {index}")

    def reset_peak_memory_stats(self, index: int) -> None:
        assert self.calls[-1] == f"synchronize {index}", "what still runs would count"
        self.peak = self.weights

    def memory_allocated(self, index: int) -> int:
        return self.weights

    def max_memory_allocated(self, index: int) -> int:
        return self.peak

    def forward(self, batch: TokenBatch, *, exact: bool = False, pause: Pause | None = None) -> Vectors:
        self.weights += self.fixed  # a workspace that stays
        self.fixed = 0
        self.calls.append(f"forward {sum(map(len, batch))}")
        self.peak = max(self.peak, self.weights + self.per_batch + self.per_token * sum(map(len, batch)))
        return np.zeros((len(batch), 384), dtype=np.float32)


@pytest.fixture(scope="module")
def loaded() -> Iterator[TorchBackend]:
    with contextlib.closing(TorchBackend.load(EngineOptions(MINILM, precision="fp32", device="cpu"))) as backend:
        yield backend


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch, loaded: TorchBackend) -> TorchBackend:
    monkeypatch.setattr(loaded, "profile", DeviceProfile.cuda("Tesla T4", (7, 5), 16 << 30, index=1))
    monkeypatch.setattr(loaded, "_folder", loaded._folder)  # one of the tests sets another
    return loaded


def test_a_tokens_cost_is_measured_by_two_batches(monkeypatch: pytest.MonkeyPatch, on_card: TorchBackend) -> None:
    memory = FakeMemory(monkeypatch, per_token=20_000, per_batch=3 << 20, fixed=64 << 20)
    monkeypatch.setattr(on_card, "forward", memory.forward)
    assert on_card.token_cost() == (20_000 * HEADROOM, (3 << 20) * HEADROOM)
    assert [call for call in memory.calls if "forward" in call] == ["forward 8192", "forward 8192", "forward 24576"]
    assert on_card.used_bytes() == (1 << 30) + (64 << 20)


def test_the_trial_batches_are_larger_than_those_in_graphs(
    monkeypatch: pytest.MonkeyPatch, on_card: TorchBackend
) -> None:
    """Replaying allocates nothing: a line through such a peak would be too steep."""
    memory = FakeMemory(monkeypatch, per_token=20_000)
    monkeypatch.setattr(on_card, "forward", memory.forward)
    for largest, tokens in ((6144, 8192), (8192, 24_576), (16_384, 24_576)):
        memory.calls.clear()
        monkeypatch.setattr(on_card, "_encoder", SimpleNamespace(rungs={16: 0, largest: 0}))
        assert on_card.token_cost() == (20_000 * HEADROOM, 0)
        batches = [int(call.split()[1]) for call in memory.calls if "forward" in call]
        assert batches == [tokens, tokens, 3 * tokens]


def test_an_engine_plans_by_the_measured_cost(monkeypatch: pytest.MonkeyPatch, on_card: TorchBackend) -> None:
    memory = FakeMemory(monkeypatch, per_token=100_000, per_batch=10 << 20)
    monkeypatch.setattr(on_card, "forward", memory.forward)
    monkeypatch.setattr(on_card, "free_bytes", lambda: 2 << 30)
    engine = EmbeddingEngine(on_card, MemoryLimits(0.8, 512 << 20))
    assert engine.token_budget == ((1536 << 20) / HEADROOM - (10 << 20)) // 100_000


def test_a_small_vocabulary_is_not_exceeded(monkeypatch: pytest.MonkeyPatch, on_card: TorchBackend) -> None:
    """A card does not raise where a token is not there: it asserts, and the process can use it no more."""
    memory = FakeMemory(monkeypatch, per_token=20_000)
    largest: list[int] = []

    def forward(batch: TokenBatch, *, exact: bool = False) -> Vectors:
        largest.append(int(batch.ids.max()))
        return memory.forward(batch)

    monkeypatch.setattr(on_card, "forward", forward)
    for words in (30_522, 500, 60):
        on_card._folder = dataclasses.replace(on_card._folder, config={**on_card._folder.config, "vocab_size": words})
        assert on_card.token_cost() is not None
        assert 0 < max(largest[-3:]) < words


def test_closing_lets_go_of_the_buffers_and_leaves_what_is_on_its_way() -> None:
    backend, _card = by_way_of_a_card(packed=True)
    batch = backend.tokenize(TEXTS[:3])
    wanted = backend.forward(batch)
    pending = backend.launch(batch)
    assert isinstance(backend._downloads, Downloads)
    buffers = [weakref.ref(buffer) for buffer in backend._downloads._buffers]
    backend.close()
    np.testing.assert_array_equal(pending(), wanted)
    del pending
    assert [buffer() for buffer in buffers] == [None] * len(buffers)


@pytest.mark.parametrize("per_token", [0, 1000])
def test_a_cost_below_one_hidden_state_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, on_card: TorchBackend, per_token: int
) -> None:
    memory = FakeMemory(monkeypatch, per_token=per_token)
    monkeypatch.setattr(on_card, "forward", memory.forward)
    assert on_card.token_cost() is None


def test_a_card_without_room_for_the_trial_falls_back(monkeypatch: pytest.MonkeyPatch, on_card: TorchBackend) -> None:
    FakeMemory(monkeypatch, per_token=1)

    def fail(batch: TokenBatch, *, exact: bool = False) -> Vectors:
        raise OutOfMemory("planted")

    monkeypatch.setattr(on_card, "forward", fail)
    assert on_card.token_cost() is None


# ------------------------------------------------------------------------------------- what this process may have


T4 = DeviceProfile.cuda("Tesla T4", (7, 5), 16 << 30, index=1)


def test_the_fraction_is_set_before_anything_is_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[Any, ...]] = []

    def load(*_given: Any, **_named: Any) -> Any:
        events.append(("loads",))
        raise OutOfMemory("far enough")

    monkeypatch.setattr(pytorch, "detect", lambda _device: T4)
    monkeypatch.setattr(pytorch, "load_encoder", load)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _index: 0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: events.append(given))
    for fraction in (0.35, 1):
        with pytest.raises(OutOfMemory):
            TorchBackend.load(EngineOptions(MINILM, memory_fraction=fraction, reserve_mb=100))
    assert events == [(0.35, 1), ("loads",), (1.0, 1), ("loads",)]
    assert type(events[2][0]) is float, "torch refuses an int"
    assert memory_of(T4).limits == MemoryLimits(1, 100 << 20)


class Reserved:
    """How much torch has of a card, by what was loaded there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 5 << 30  # of another model, and of a search
        monkeypatch.setattr(pytorch, "reserved_bytes", lambda profile: self.bytes if profile.kind == "cuda" else 0)


def test_a_model_takes_what_its_loading_reserved(monkeypatch: pytest.MonkeyPatch, on_card: TorchBackend) -> None:
    """With the pools of its CUDA graphs, which torch counts as reserved and not as allocated."""
    reserved = Reserved(monkeypatch)
    monkeypatch.setattr(on_card, "_before", reserved.bytes)
    reserved.bytes += 300 << 20
    assert on_card.used_bytes() == 300 << 20


@pytest.fixture
def overflowing(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TorchBackend, DeviceMemory, list[str]]]:
    """A model on a simulated card, whose fp32 weights take 3 GiB there; the card's memory; where they were loaded."""
    backend, _card = by_way_of_a_card(packed=True)
    backend.profile, backend._memory = T4, DeviceMemory(T4)
    backend._target = Target(T4, "fp16")
    reserved, loads = Reserved(monkeypatch), list[str]()
    usual: Any = backend._encoder

    def load(_folder: Any, target: Target, chosen: Any) -> Any:
        assert chosen is usual
        loads.append(target.profile.kind)

        class Exact:
            def __call__(self, batch: TokenBatch, pause: Pause | None = None) -> torch.Tensor:
                if target.profile.kind == "cuda" and len(batch) > room[0]:
                    raise torch.OutOfMemoryError("planted")
                found: torch.Tensor = usual(batch)
                return found

        if not room and target.profile.kind == "cuda":
            raise torch.OutOfMemoryError("planted")
        reserved.bytes += (3 << 30) * (target.profile.kind == "cuda")
        return Exact()

    room = [1000]
    monkeypatch.setattr(pytorch, "load_exact", load)
    backend.__dict__["room"] = room
    yield backend, backend._memory, loads
    backend.close()


def test_the_fp32_model_is_loaded_once_and_held(overflowing: tuple[TorchBackend, DeviceMemory, list[str]]) -> None:
    backend, memory, loads = overflowing
    engine = T4MemoryManager(limits=MemoryLimits(1.0, 0), used_bytes=1 << 30, device=memory)
    batch = backend.tokenize(TEXTS[:5])
    wanted = backend.forward(batch)
    for _ in range(2):
        np.testing.assert_array_equal(backend.forward(batch, exact=True), wanted)
    assert loads == ["cuda"]
    assert engine.usable_bytes == 12 << 30
    backend.close()
    gc.collect()
    assert engine.usable_bytes == 15 << 30


@pytest.mark.parametrize("rooms", [[], [0]], ids=["for the weights", "for a row"])
def test_without_room_on_the_card_the_cpu_computes_in_fp32(
    overflowing: tuple[TorchBackend, DeviceMemory, list[str]], rooms: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    backend, memory, loads = overflowing
    backend.__dict__["room"][:] = rooms
    batch = backend.tokenize(TEXTS[:5])
    wanted = backend.forward(batch)
    if rooms:
        with pytest.raises(OutOfMemory):  # a single row is tried first
            backend.forward(batch, exact=True)
    for rows in ([0], range(5)):
        np.testing.assert_allclose(backend.forward(batch.select(rows), exact=True), wanted[rows], atol=1e-5)
    assert loads == ["cuda", "cpu"]
    gc.collect()
    assert memory.held_bytes == 0
    assert "the CPU computes them from now on" in caplog.text


# ------------------------------------------------------------------------------------------------------ CUDA graphs


class FakeGraphs:
    """What cuda_recorder asks of torch.cuda, and whose stream is current. `fail`: ending a recording raises."""

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name
            self.waited: list[str] = []

        def wait_stream(self, other: FakeGraphs.Stream) -> None:
            self.waited.append(other.name)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fail: bool = False) -> None:
        self.current = self.computing = FakeGraphs.Stream("computing")
        self.fail = fail
        self.card = "cuda:0"
        self.told: list[str] = []
        self.ran_on: list[str] = []
        self.pools = 6
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.pool)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeGraphs.Stream("beside"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraphs.Graph(self))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.told.append(f"synchronize {device}"))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.told.append("empty cache"))
        for name, word in (("endAllocateToPool", "ended"), ("releasePool", "released")):
            monkeypatch.setattr(torch._C, f"_cuda_{name}", partial(self.tell, word), raising=False)

    @contextlib.contextmanager
    def stream(self, stream: FakeGraphs.Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.card = self.card, str(device)
        yield
        self.card = before

    def pool(self) -> tuple[int, int]:
        self.pools += 1
        return 0, self.pools

    class Graph:
        def __init__(self, cuda: FakeGraphs) -> None:
            assert cuda.card == "cuda:1", "its constructor asks for the current card's stream"
            self.cuda = cuda

        def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"
            self.cuda.told.append(f"begin {pool} on {self.cuda.current.name}")

        def capture_end(self) -> None:
            if self.cuda.fail:
                raise RuntimeError("operation failed due to a previous error during capture")

    def tell(self, word: str, device: int, pool: tuple[int, int]) -> None:
        self.told.append(f"{word} {device} {pool}")

    def work(self) -> torch.Tensor:
        self.ran_on.append(self.current.name)
        return torch.zeros(2)


def test_a_recording_is_warmed_up_and_made_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeGraphs(monkeypatch)
    recording, found = cuda_recorder(torch.device("cuda", 1))(cuda.work)
    assert isinstance(recording, FakeGraphs.Graph)
    assert found.shape == (2,)
    assert cuda.ran_on == ["beside"] * 4
    assert cuda.told == ["synchronize cuda:1", "empty cache", "begin (0, 7) on beside"]
    assert (cuda.current, cuda.card) == (cuda.computing, "cuda:0")


def test_recordings_share_a_pool_while_one_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is emptied once for each pool; torch refuses a pool whose recordings are gone."""
    cuda = FakeGraphs(monkeypatch)
    record = cuda_recorder(torch.device("cuda", 1))
    kept = [record(cuda.work) for _ in range(3)]
    assert [line for line in cuda.told if "begin" in line] == ["begin (0, 7) on beside"] * 3
    assert cuda.told.count("empty cache") == 1
    kept.clear()
    record(cuda.work)
    assert cuda.told[-2:] == ["empty cache", "begin (0, 8) on beside"]


def test_inputs_are_kept_until_a_trial_that_fails_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queued kernels still read the ids; garbage in their place would be outside the vocabulary."""
    cuda = FakeGraphs(monkeypatch)

    def work() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        cuda_recorder(torch.device("cuda", 1))(work)
    assert cuda.computing.waited == ["beside"]


def test_a_recording_that_fails_leaves_stream_and_allocator_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeGraphs(monkeypatch, fail=True)
    with pytest.raises(RuntimeError, match="during capture"):
        cuda_recorder(torch.device("cuda", 1))(cuda.work)
    assert cuda.current is cuda.computing
    assert cuda.told[-2:] == ["ended 1 (0, 7)", "released 1 (0, 7)"]


def test_a_torch_that_has_ended_it_itself_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeGraphs(monkeypatch, fail=True)

    def refuse(device: int, pool: tuple[int, int]) -> None:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuse, raising=False)
    with pytest.raises(RuntimeError, match="during capture"):
        cuda_recorder(torch.device("cuda", 1))(cuda.work)


# --------------------------------------------------------------------------------------------------------- the switches


def test_cuda_graphs_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, minilm: EmbeddingEngine) -> None:
    backend = minilm._backend
    assert isinstance(backend, TorchBackend)
    encoder: Any = backend._encoder_for(False)
    target = Target(DeviceProfile.of_card("Tesla T4"), "fp16", graphs=False)
    monkeypatch.setattr(PackedEncoder, "load", lambda *_given, **_named: encoder)
    monkeypatch.setattr(encoders, "PaddedEncoder", lambda *_: encoder)
    monkeypatch.setattr(encoders, "least_cosine", lambda *_: 1.0)
    monkeypatch.setattr(encoder, "attention", lambda *_: None)
    chosen, reason = load_encoder(backend._folder, target)
    assert chosen is encoder
    assert reason.endswith("CUDA graphs are switched off")


@pytest.mark.parametrize(("packed_ms", "padded_ms"), [(7, 5), (5, 7)])
def test_without_an_attention_for_borders_a_card_takes_the_faster_of_packed_and_padded(
    monkeypatch: pytest.MonkeyPatch, minilm: EmbeddingEngine, packed_ms: int, padded_ms: int
) -> None:
    """As where the card's kernels fail: a launch for each length and layer may take longer than padding."""
    now = [0.0]
    monkeypatch.setattr("app.src.core.backends.torch.process.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)

    class Timed:
        attention, attention_reason = staticmethod(runs_of_equal_length), "runs of equal length"
        kernels_reason = ""

        def __init__(self, milliseconds: float) -> None:
            self.seconds = milliseconds / 1000

        def __call__(self, batch: TokenBatch) -> None:
            now[0] += self.seconds * batch.tokens / texts

    folder = minilm._backend._folder  # type: ignore[attr-defined]
    texts = int(np.linspace(8, folder.max_length, 32, dtype=int).sum())
    packed: Any = Timed(packed_ms)
    padded: Any = Timed(padded_ms)
    monkeypatch.setattr(PackedEncoder, "load", lambda *_given, **_named: packed)
    monkeypatch.setattr(encoders, "PaddedEncoder", lambda *_: padded)
    monkeypatch.setattr(encoders, "least_cosine", lambda *_: 1.0)
    chosen, reason = load_encoder(folder, Target(DeviceProfile.of_card("Tesla T4"), "fp16"))
    assert chosen is (packed if packed_ms < padded_ms else padded)
    assert f"{texts} tokens take {packed_ms}.0 ms packed, {padded_ms}.0 ms padded" in reason


def test_the_long_ladder_is_for_compute_capability_9(monkeypatch: pytest.MonkeyPatch, minilm: EmbeddingEngine) -> None:
    given: list[int] = []

    def remember(graphed: Any, clock: Any, trial: Any, ladder: Any) -> Any:
        given.append(max(ladder))
        return graphed, "measured"

    encoder: Any = minilm._backend._encoder_for(False)  # type: ignore[attr-defined]
    monkeypatch.setattr("app.src.core.backends.torch.graphs.with_graphs", remember)
    monkeypatch.setattr("app.src.core.backends.torch.graphs.cuda_recorder", lambda device: None)
    monkeypatch.setattr("app.src.core.backends.torch.staging.uploads_for", lambda device: HostUploads())
    monkeypatch.setattr(PackedEncoder, "load", lambda *_given, **_named: encoder)
    monkeypatch.setattr(encoders, "PaddedEncoder", lambda *_: encoder)
    monkeypatch.setattr(encoders, "least_cosine", lambda *_: 1.0)
    monkeypatch.setattr(encoder, "attention", lambda *_: None)
    for card in ("Tesla T4", "NVIDIA L4", "NVIDIA H100", "NVIDIA B200"):
        load_encoder(minilm._backend._folder, Target(DeviceProfile.of_card(card), "fp16"))  # type: ignore[attr-defined]
    assert given == [4096, 4096, 16_384, 16_384]


def test_the_switches_reach_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from app.src.core import loading as engine_module

    given: list[EngineOptions] = []

    def load(options: EngineOptions) -> Any:
        given.append(options)
        raise OutOfMemory("far enough")

    monkeypatch.setattr(TorchBackend, "load", load)
    for graphs in (True, False):
        with pytest.raises(OutOfMemory):
            engine_module.load_engine(EngineOptions(graphs=graphs))
        assert given[-1].graphs is graphs


def test_graphs_are_tried_within_a_small_vocabulary() -> None:
    seen: list[int] = []

    class Model:
        path = "packed"
        longest = 40

        def __call__(self, batch: TokenBatch) -> torch.Tensor:
            seen.append(int(batch.ids.max()))
            return torch.ones(len(batch), 2)

        def staged(self, batch: TokenBatch) -> Any:
            seen.append(int(batch.ids.max()))
            raise RuntimeError("far enough")

    def record(work: Callable[[], torch.Tensor]) -> Any:
        return None, torch.zeros(1, 2)

    for words in (60, 500, 30_522):
        model: Any = Model()
        trial = partial(trial_batch, longest=model.longest, words=words)
        with_graphs(GraphedEncoder(model, record, HostUploads()), device_clock(detect("cpu")), trial)
        assert 0 < max(seen) < words
        seen.clear()


# ------------------------------------------------------------------------------------------------------------ on a card


@pytest.mark.gpu
@pytest.mark.parametrize(
    "switches",
    [{}, {"graphs": False}, {"packed": False}, {"precision": "fp32"}],
    ids=str,
)
def test_every_switch_gives_the_same_vectors_on_a_card(minilm: EmbeddingEngine, switches: dict[str, Any]) -> None:
    from app.src.core.loading import load_engine

    with load_engine(EngineOptions(MINILM, device="cuda", **switches)) as engine:
        engine.memory.shrink(4096)  # many batches
        assert engine._runner.ahead == 1  # type: ignore[attr-defined]
        for texts in (TEXTS * 8, TEXTS[:1], TEXTS[:40]):
            texts = [f"{text} {place}" for place, text in enumerate(texts)]
            found, wanted = engine.embed(texts), minilm.embed(texts)
            assert float((found * wanted).sum(axis=1).min()) > 0.999


@pytest.mark.gpu
def test_a_card_that_overlaps_is_launched_ahead() -> None:
    """`launch` comes back long before the batch is done."""
    import time

    from app.src.core.loading import load_engine

    with load_engine(EngineOptions(MINILM, device="cuda", precision="fp32")) as engine:
        begin = engine._runner.begin  # type: ignore[attr-defined]
        batch = engine._backend.tokenize([" ".join(["pump"] * 250)] * 100)  # type: ignore[attr-defined]
        for _ in range(SLOTS):
            begin(batch)()  # pins memory, which may wait for the card
        torch.cuda.synchronize()
        started = time.perf_counter()
        running = [begin(batch) for _ in range(2)]
        launched = time.perf_counter() - started
        for each in running:
            each()
        assert launched < (time.perf_counter() - started) * 0.9


@pytest.mark.gpu
def test_the_measured_cost_is_near_what_batches_take() -> None:
    from app.src.core.loading import load_engine

    with load_engine(EngineOptions(MINILM, device="cuda")) as engine:
        backend = engine._backend  # type: ignore[attr-defined]
        assert isinstance(backend, TorchBackend)
        cost = backend.token_cost()
        assert cost is not None
        found = backend._peak_bytes(32_768)  # more than any recording
        assert found == pytest.approx(cost[1] + 32_768 * cost[0] / HEADROOM, rel=0.15)
        assert cost[0] < 2 * engine._backend.info.shape.bytes_per_token(engine._backend.info.precision)  # type: ignore[attr-defined]


@pytest.mark.gpu
def test_a_card_gives_no_more_than_the_fraction() -> None:
    from app.src.core.loading import load_engine

    total = torch.cuda.get_device_properties(0).total_memory
    try:
        with load_engine(EngineOptions(MINILM, device="cuda", memory_fraction=0.3)):
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(int(total * 0.31), dtype=torch.uint8, device="cuda")
            torch.empty(int(total * 0.2), dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_rows_in_fp32_take_their_memory_from_the_budget() -> None:
    backend = TorchBackend.load(EngineOptions(MINILM, device="cuda", precision="fp16"))
    with EmbeddingEngine(backend) as engine:
        before = engine.memory.usable_bytes
        batch = backend.tokenize(TEXTS)
        usual, exact = backend.forward(batch), backend.forward(batch, exact=True)
        np.testing.assert_allclose(usual, exact, atol=0.05)
        assert 80 << 20 <= before - engine.memory.usable_bytes <= 200 << 20, "22.7 million numbers in fp32"


@pytest.mark.gpu
def test_a_card_that_is_nearly_full_is_survived() -> None:
    from app.src.core.loading import load_engine

    with load_engine(EngineOptions(MINILM, device="cuda")) as engine:
        wanted = engine.embed(TEXTS * 4)
        total = torch.cuda.get_device_properties(0).total_memory
        try:
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (48 << 20)) / total)
            texts = [f"{text} {place}" for place, text in enumerate(TEXTS * 40)]
            engine.embed(texts)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert engine.stats().out_of_memory > 0
        np.testing.assert_allclose(engine.embed(TEXTS * 4), wanted, atol=2e-3)


@pytest.mark.gpu
def test_after_a_recording_that_failed_memory_comes_back() -> None:
    """Also that of tensors which two streams used."""
    device = torch.device("cuda", 0)
    card, record = CudaCard(device), cuda_recorder(device)
    x = torch.ones(4, device=device)
    with pytest.raises(RuntimeError):
        record(lambda: x + float(x.sum()))  # waits for the device, which a recording must not
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    other = card.stream()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        tensor = torch.zeros(1 << 20, device=device)
        card.keep_for(tensor, other)
        del tensor
        torch.cuda.synchronize()
    torch.zeros(1, device=device)
    assert torch.cuda.memory_allocated() - before < 8 << 20


def test_graphs_pay_up_to_the_size_to_which_they_measure_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaying takes 1 ms and a token 1/1,000 ms more; computing 2 ms at least."""
    clock = [0.0]
    monkeypatch.setattr("app.src.core.backends.torch.process.time.perf_counter", lambda: clock[0])

    class Model:
        path, longest = "packed", 512

        def __call__(self, batch: TokenBatch) -> torch.Tensor:
            clock[0] += max(2e-3, 1e-3 + 1e-6 * sum(map(len, batch)))
            return torch.ones(len(batch), 3)

        def staged(self, batch: TokenBatch) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
            return [np.zeros(sum(map(len, batch)), dtype=np.int32)] * 2

        def compute(self, ids: torch.Tensor, positions: torch.Tensor, layout: Layout) -> torch.Tensor:
            return torch.ones(len(layout.cumulative) - 1, 3)

    class Recorded:
        def __init__(self, tokens: int) -> None:
            self._tokens = tokens

        def replay(self) -> None:
            clock[0] += 1e-3 + 1e-6 * self._tokens

    sizes: list[int] = []

    def record(work: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        return Recorded(sizes[-1]), work()

    class Graphed(GraphedEncoder):
        def record(self, tokens: int) -> None:
            sizes.append(tokens)
            super().record(tokens)

    model: Any = Model()
    trial = partial(trial_batch, longest=model.longest, words=1000)
    best, reason = with_graphs(Graphed(model, record, HostUploads()), device_clock(detect("cpu")), trial)
    assert "up to 512 tokens" in reason
    assert sizes[:4] == [32, 128, 512, 1024]
    assert sizes[4:] == [512, 384, 256, 192, 128, 96, 64, 48, 32, 16]
    assert list(best.rungs) == sizes[:3:-1]
    with torch.inference_mode():
        best(TokenBatch.of([[1] * 300]))
        best(TokenBatch.of([[1] * 400, [1] * 300]))
    assert len(sizes) == 14, "nothing is recorded under traffic"
