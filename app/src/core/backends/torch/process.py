"""torch's state for the whole process: the compute thread of a CPU, the thread count, TF32. Imports torch late."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from ...device import DeviceProfile, Precision
from ...memory import DeviceMemory, MemoryLimits, memory_of
from .. import DeviceFailed, OutOfMemory

Result = TypeVar("Result")

# OpenMP keeps a team of workers for every thread that ever computed in parallel, and idle teams slow down the active
# one: on 2 cores, texts take 4 to 8 % longer from a second thread. So models are loaded and run on one thread.
_here = threading.local()


def _begin_to_compute() -> None:
    """Mark this thread, and let glibc keep freed tensors until `give_back`: else it returns them to the system after
    each operator, and the next one waits for new pages (up to 9 % of a batch's time)."""
    _here.computes = True
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_M_MMAP_THRESHOLD, 32 << 20)  # the largest that glibc accepts
        option(_M_TRIM_THRESHOLD, KEPT_BYTES)


@cache
def _thread(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="owl-sap-compute", initializer=_begin_to_compute)


_works = itertools.count(1)
# Calls after which free memory is returned to the system, which takes 6 ms about every two seconds of batches. Tensors
# of varying sizes fragment the heap, and glibc keeps the pieces.
TRIM_EVERY = 64
KEPT_BYTES = 256 << 20  # at the end of each thread's heap
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def on_compute_thread(work: Callable[[], Result], number: int = 0) -> Result:
    """Run `work` on the compute thread; return its result or raise its error. `work` may also call this function.
    `number`: another thread, for the device cpu:N."""
    if getattr(_here, "computes", False):
        return work()
    done = _thread(number).submit(work)
    if next(_works) % TRIM_EVERY == 0:
        _thread(number).submit(give_back)
    try:
        return done.result()
    finally:
        del done  # else an error would keep itself and its tensors alive through this frame


def give_back() -> None:
    """Return free heap memory to the system; needs glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on this thread only: on a busy machine, waiting for torch's other threads is slow."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def limited_memory(profile: DeviceProfile, limits: MemoryLimits) -> DeviceMemory:
    """Return a device's memory, and bound what torch allocates on a card by the fraction, for the whole process: more
    raises torch's out-of-memory error. The last call counts. CUDA's context is not included."""
    if profile.kind == "cuda":
        import torch

        torch.cuda.set_per_process_memory_fraction(float(limits.fraction), profile.index)
    memory = memory_of(profile)
    with memory.lock:
        memory.limits = limits
        memory.plan()
    return memory


def device_clock(profile: DeviceProfile) -> Callable[[], float]:
    """Return a clock, in seconds, that first waits for the device's queued work."""
    import torch

    def clock() -> float:
        if profile.kind == "cuda":
            torch.cuda.synchronize(profile.index)
        return time.perf_counter()

    return clock


def reserved_bytes(profile: DeviceProfile) -> int:
    """Return the bytes of a card that torch cannot give back: tensors, the pools of CUDA graphs, gaps between them; 0
    for a CPU. Compared before and after loading, they are the model's, unless another model computes at that time."""
    if profile.kind == "cpu":
        return 0
    import torch

    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(profile.index))


# Messages of the host's allocators, of CUDA outside torch's allocator (pinned memory, kernels, recordings), and of
# cuBLAS without memory for its handle.
_NO_MEMORY = ("allocate memory", "not enough memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")


# Beginnings of a card's other errors. torch raises RuntimeError; newer versions raise its subclass AcceleratorError for
# errors of the CUDA runtime (c10/cuda/CUDAException.cpp; the checks of its libraries: ATen/cuda/Exceptions.h).
_OF_CARD = ("CUDA error: ", "CUDA driver error: ", "cuDNN error: ", "cuDNN Frontend error: ", "Triton Error [CUDA]: ")


@contextmanager
def device_errors_mapped(device: Any = None) -> Iterator[None]:
    """Raise OutOfMemory for any out-of-memory error of torch, CUDA, cuBLAS or the host, and DeviceFailed if the card
    computes nothing more. `device`: as torch takes it; None: this thread's current card.

    Before OutOfMemory, frees the failed batch's tensors, which the traceback's frames keep alive, and then the GPU's
    cache.
    """
    import torch

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        own = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if own or any(words in str(error) for words in _NO_MEMORY):
            traceback.clear_frames(error.__traceback__)
            with device_errors_mapped(device):
                torch.cuda.empty_cache()  # does nothing if no card is in use
            raise OutOfMemory("memory does not hold this batch") from error
        if not str(error).startswith(_OF_CARD) or still_works(device):
            raise
        never_free(error)  # its traceback has the failed batch's tensors
        raise DeviceFailed.after(error) from error


def never_free(*things: object) -> None:
    """Keep these even when the process ends. On a card that failed, freeing tensors that two streams used, or pinned
    memory, calls CUDA again, whose error in a destructor aborts the process (pytorch #178154)."""
    for each in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def still_works(device: Any) -> bool:
    """Return whether a card works after an error. An error that breaks the context (illegal access, failed assertion,
    launch failure, hardware) is repeated by every later call; one of a single call, such as an invalid argument, is
    not. Waits for one stream and not for the card, because that fails while another thread records a graph."""
    import torch

    try:
        torch.cuda.current_stream(device).synchronize()
    except Exception:
        return False
    return True


class Tf32Switch:
    """TF32 for fp32 products: on while some engine has precision tf32 and none has fp32. Thread-safe.

    torch's switch is never read back: it has two names, and from 2.9 on mixing them raises RuntimeError.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: Counter[Precision] = Counter()
        self._on = False

    def hold(self, profile: DeviceProfile, precision: Precision, by: int = 1) -> bool:
        """Count a new engine; return whether TF32 is on now."""
        if not profile.tf32:
            return False
        import torch

        with self._lock:
            self._holders[precision] += by
            wanted = self._holders["tf32"] > 0 and self._holders["fp32"] <= 0
            if wanted is not self._on:
                torch.set_float32_matmul_precision("high" if wanted else "highest")
                self._on = wanted
            return self._on

    def release(self, profile: DeviceProfile, precision: Precision) -> bool:
        return self.hold(profile, precision, -1)


TF32 = Tf32Switch()
