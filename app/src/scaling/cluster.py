"""The Ray cluster that embeds: connect to it or start it, check it, and keep workers in it. Only this file imports ray.

Nothing secret is sent: a worker gets the model's options and texts; each node reads its own environment and files. No
`runtime_env` is used, because Ray logs it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import socket
import stat
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.src.core.backends import DeviceFailed, DeviceUnavailable, EngineClosed, EngineError, ModelUnsupported
from app.src.core.calibration import CpuCalibration
from app.src.core.loading import EngineOptions, load_tokenizer_engine, uses_calibration
from app.src.core.pool import EnginePool
from app.src.core.queue import WorkerDied
from app.src.scaling.engine import WorkerEngine
from app.src.scaling.worker import Worker, versions
from app.src.settings.model import ScaleSettings
from connector.errors import ConfigurationError, Unavailable
from connector.extras import install_command
from connector.processors import processors

if TYPE_CHECKING:
    from app.src.core.onnx_export.serving import GraphOptions

_log = logging.getLogger(__name__)

START_SECONDS = 300.0  # for a worker to start, on a loaded machine too; how long calls wait for it
PAUSE_SECONDS = 10.0  # before a further start after STARTS
CONNECT_SECONDS = 10.0
# Blocks of a large call for each worker. A block costs this process about 2 ms; windows at once even out workers.
BLOCKS = 2
STARTS = 3  # of processes of a worker that die before they answer
OBJECT_STORE = 256 << 20  # bytes of shared memory; blocks and their vectors are freed when read
LEAST_STORE = 75 << 20  # Ray's minimum
SHARED_MEMORY = Path("/dev/shm")  # nosec B108 # its size is read, nothing is written
FOLDERS = "owl-ray-"  # how the names of local clusters' folders begin
UNLOCKED_SECONDS = 60.0  # a younger folder may belong to a process that is about to lock it
SHORT_FOLDER = "/tmp"  # nosec B108 # for a folder that only its owner can open
ROOM_OF_SOCKETS = 87  # bytes of 107 that Ray and our folder add to the path of a socket
CAUSE = 300  # characters of an error of Ray in ours
DEFAULT_TOKEN = Path("~/.ray/auth_token")


# -------------------------------------------------------------------------------------------------------- placement


@dataclass(frozen=True, slots=True)
class Placement:
    """How many workers there are, and on a node: their average, rounded up. What each has: CPU threads, share of a GPU
    or 0."""

    workers: int
    on_node: int
    threads: int
    gpus: float

    def options(self, options: EngineOptions) -> EngineOptions:
        """Return the options of a worker's engine. Ray shows a worker only its own card; it does not bound memory."""
        share = self.gpus or 1.0
        return replace(
            options,
            device="cuda" if self.gpus else "cpu",
            threads=self.threads,
            memory_fraction=options.memory_fraction * share,
            reserve_mb=round(options.reserve_mb * share),
            engines=self.on_node,
        )


def placement(scale: ScaleSettings, device: str, nodes: Sequence[Mapping[str, float]]) -> Placement:
    """Place workers on nodes, each with its resources CPU and GPU. `device`: as in [embedding]. Raises
    ConfigurationError if the nodes have no room for them."""
    cards = [node for node in nodes if node.get("GPU", 0) >= scale.gpus_per_actor]
    on_cards = bool(cards) and not device.startswith("cpu")
    if (device.startswith("cuda") or device == "all") and not on_cards:
        raise ConfigurationError(f'[embedding] device = "{device}", but no node of the Ray cluster has a GPU')
    used = cards if on_cards else [node for node in nodes if node.get("CPU", 0) >= 1]
    if not used:
        raise ConfigurationError("no node of the Ray cluster has a CPU for workers")
    share = scale.gpus_per_actor if on_cards else 0.0
    held = [int(node["GPU"] / share + 1e-9) for node in used] if share else [1] * len(used)
    workers = scale.actors or sum(held)
    least = int(min(node.get("CPU", 1) for node in used))
    on_node = -(-workers // len(used))
    threads = scale.threads or max(1, least // on_node)
    room = [int(node.get("CPU", 1)) // threads for node in used]
    if share:
        room = list(map(min, room, held))
    if sum(room) < workers:
        what = f"{threads} CPU threads" + (f" and {share} of a GPU" if share else "")
        raise ConfigurationError(
            f"the Ray cluster has room for {sum(room)} of {workers} workers with {what} each: lower --actors or "
            "[scale] threads, or add nodes"
        )
    return Placement(workers, on_node, threads, share)


# ----------------------------------------------------------------------------------------------------------- workers


class RayWorker:
    """A worker of the cluster, whose process is replaced when it dies. A process gets calls once it has answered
    `report`; until then they wait for it, so none is lost with a process that cannot start.

    A worker that never answered fails after STARTS processes or START_SECONDS. One that did starts processes again and
    again, and fails only if none answers for START_SECONDS and no other worker is ready then.
    """

    def __init__(
        self, start: Callable[[], Any], callbacks: ThreadPoolExecutor, others_work: Callable[[], bool]
    ) -> None:
        """`start` starts a process and returns Ray's handle. `callbacks` runs what follows an answer: Ray's own thread
        must not call Ray. `others_work`: whether another worker is ready."""
        self._start, self._callbacks, self._others_work = start, callbacks, others_work
        self._lock = threading.RLock()
        self._closed = self._worked = False
        self.ready = False  # whether the present process has answered a call
        self.failed = ""  # why it computes nothing more
        self.deaths = 0  # since a process answered a call
        self._waiting: list[tuple[Future[Any], str, tuple[object, ...]]] = []
        self._process: Any = None
        self._wait()
        self._begin()

    def call(self, method: str, *content: object) -> Future[Any]:
        """Call a method of Worker, once its process is ready. The future raises WorkerDied if the process dies, or does
        not start in time although others work, EngineError if the call cannot be made; it returns the errors of the
        method."""
        answer = Future[Any]()
        with self._lock:
            process, ended, ready = self._process, self._ended(), self.ready
            if ended is None and not ready:
                self._waiting.append((answer, method, content))
        if ended is not None:
            answer.set_exception(ended)
        elif ready:
            self._send(process, answer, method, content)
        return answer

    def close(self) -> None:
        """End the process; none takes its place."""
        with self._lock:
            self._closed = True
            self._end()

    def _ended(self) -> EngineError | None:
        """Return why calls are refused."""
        if self._closed:
            return EngineClosed("the Ray cluster is closed")
        return DeviceFailed(self.failed) if self.failed else None

    def _begin(self) -> None:
        """Start a process."""
        with self._lock:
            if self._ended():
                return
            try:
                self._process = self._start()
            except Exception as error:  # Ray raises many kinds
                self._fail(f"a worker of the Ray cluster cannot be started: {_cause(error)}")
            else:
                self._send(self._process, Future[Any](), "report", ())

    def _send(self, process: Any, answer: Future[Any], method: str, content: tuple[object, ...]) -> None:
        from ray.exceptions import RayError

        try:
            called = getattr(process, method).remote(*content).future()
        except RayError as error:  # the process could not be started, or the content not be stored
            called = Future[Any]()
            called.set_exception(error)
        called.add_done_callback(lambda found: self._callbacks.submit(self._answered, process, answer, found))

    def _answered(self, process: Any, answer: Future[Any], found: Future[Any]) -> None:
        try:
            error = self._error(process, found)
        except Exception as unexpected:
            error = EngineError(f"a worker of the Ray cluster: {_cause(unexpected)}")
        if answer.set_running_or_notify_cancel():
            if error is None:
                answer.set_result(found.result())
            else:
                answer.set_exception(error)

    def _error(self, process: Any, found: Future[Any]) -> BaseException | None:
        """Return the error of a call; note that the process is ready, or replace it."""
        from ray.exceptions import RayError, RayTaskError

        error = found.exception()
        with self._lock:
            starting = process is self._process and not (self.ready or self._ended())
        if error is None:
            if starting:
                self._started(found.result())
            return None
        if not isinstance(error, RayError):
            return error
        if not (starting or _died(error)):  # such as an answer that could not be pickled, here or in the worker
            cause = error.cause if isinstance(error, RayTaskError) else error
            return EngineError(f"a worker of the Ray cluster: {_cause(cause)}")
        self._replace(process, _cause(error))
        return self._ended() or WorkerDied(f"a worker of the Ray cluster has died ({_cause(error)})")

    def _started(self, report: Mapping[str, Any]) -> None:
        """Send what waits for the process, which has answered `report`."""
        with self._lock:
            if self._worked and (differing := other_versions(report)):  # Cluster compares those of the first process
                self._fail(differing)
                return
            self.ready, self._worked, self.deaths = True, True, 0
            self._limit.cancel()
            waiting, self._waiting = self._waiting, []
            process = self._process
        for call in waiting:
            self._send(process, *call)

    def _replace(self, process: Any, cause: str) -> None:
        """Start another process in place of this one, which died."""
        with self._lock:
            if process is not self._process or self._ended():
                return
            self.deaths += 1
            if self.ready:
                self.ready = False
                self._wait()
            elif self.deaths >= STARTS and not self._worked:
                self._fail(
                    f"{STARTS} workers of the Ray cluster died before they answered, the last one of {cause}; see the "
                    "logs of its nodes"
                )
                return
            _log.warning("a worker of the Ray cluster has died (%s); another one takes its place", cause)
            self._process = None
            if self.deaths < STARTS:
                self._begin()
            else:
                _timer(PAUSE_SECONDS, self._begin)

    def _wait(self) -> None:
        """Limit how long calls wait for a process."""
        self._limit = _timer(START_SECONDS, self._reach_limit)

    def _reach_limit(self) -> None:
        with self._lock:
            if self.ready or self._ended():
                return
            late = f"a worker of the Ray cluster did not start within {START_SECONDS:.0f} s; see the logs of its nodes"
            if self._worked and self._others_work():  # they do what waits here; its node may come back
                self._wait()
                self._refuse(WorkerDied(late))
            else:
                self._fail(late)

    def _fail(self, reason: str) -> None:
        self.failed = reason
        if self._worked:
            _log.warning("going on without a worker of the Ray cluster: %s", reason)
        self._end()

    def _end(self) -> None:
        """End the process, and the calls that wait for it."""
        self._limit.cancel()
        if self._process is not None:
            _kill(self._process)
        if error := self._ended():
            self._refuse(error)

    def _refuse(self, error: EngineError) -> None:
        waiting, self._waiting = self._waiting, []
        for answer, _, _ in waiting:
            self._callbacks.submit(_set_error, answer, error)


def _timer(seconds: float, work: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, work)
    timer.daemon = True
    timer.start()
    return timer


def _set_error(answer: Future[Any], error: Exception) -> None:
    if answer.set_running_or_notify_cancel():
        answer.set_exception(error)


def _died(error: Exception) -> bool:
    """Return whether an error of Ray means that a process, or its node with the answer, is gone."""
    from ray import exceptions as of_ray

    return isinstance(
        error,
        of_ray.RayActorError
        | of_ray.WorkerCrashedError
        | of_ray.LocalRayletDiedError
        | of_ray.NodeDiedError
        | of_ray.OutOfMemoryError  # Ray killed it
        | of_ray.ObjectLostError
        | of_ray.ActorUnschedulableError,
    )


def _kill(process: Any) -> None:
    import ray

    with suppress(ray.exceptions.RayError):  # it could not be started
        ray.kill(process)


def _cause(error: BaseException) -> str:
    """Return the name of an error and the last line of its message, where Ray puts the reason."""
    last = str(error).strip().rpartition("\n")[2]
    return textwrap.shorten(f"{type(error).__name__}: {last}" if last else type(error).__name__, CAUSE)


# ----------------------------------------------------------------------------------------------------------- cluster


class Cluster:
    """Workers on a Ray cluster, made for the first model. `close` ends them, and a local cluster."""

    def __init__(self, scale: ScaleSettings, *, gpus: int | None = None, worker: Callable[[], Worker] = Worker) -> None:
        """For tests: `gpus`, how many a local cluster claims to have (None: those of this machine); `worker`, another
        class."""
        self._scale, self._class = scale, worker
        self._workers: list[RayWorker] = []
        self._used = set[RayWorker]()  # by a model
        self.missing: list[str] = []  # why workers were left out
        with ExitStack() as held:
            self._callbacks = held.enter_context(ThreadPoolExecutor(1, "owl-sap-scaling"))
            held.enter_context(_connected(scale, gpus))
            self._held = held.pop_all()

    def engine(self, options: EngineOptions, onnx: GraphOptions | None = None) -> EnginePool:
        """Load a model on all workers, as one engine. Raises EngineError, ConfigurationError."""
        import ray

        if options.precision.startswith("int8") or (onnx is not None and onnx.enabled):
            raise DeviceUnavailable(
                "a Ray cluster computes in a float precision: choose another [embedding] precision, switch [tensorrt] "
                "enabled off, or use --scale off"
            )
        if onnx is not None and _calibrated(options, onnx):
            raise DeviceUnavailable(
                f"{options.model} has a calibration for int8, which a Ray cluster does not compute: use --scale off, "
                'or set [embedding] precision = "fp32", with which the collection is embedded again'
            )
        device = "cpu" if options.model.startswith("hash:") else str(options.device)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        placed = placement(self._scale, device, nodes)
        if not self._workers:
            self._start(placed)
        own = placed.options(options)
        members = [WorkerEngine(worker, own, loaded) for worker, loaded in self._answers("load", own).items()]
        self._used.update(self._workers)
        return EnginePool(load_tokenizer_engine(options, members[0].dimension), members, BLOCKS, self._scale.in_flight)

    def reports(self) -> list[dict[str, Any]]:
        """Return what each worker reports of its process."""
        return list(self._answers("report").values())

    def _start(self, placed: Placement) -> None:
        """Start the workers and compare their versions. Raises ConfigurationError, Unavailable."""
        self._workers = started = self.start(placed)
        try:
            self._compare()
        except BaseException:
            self._workers = []
            for worker in started:
                worker.close()
            raise
        for worker in started:
            self._held.callback(worker.close)

    def _compare(self) -> None:
        try:
            reports = self.reports()
        except EngineError as error:
            hint = ""
            if self._scale.address != "local":  # GCS ends workers when it cannot reach this process without a token
                hint = (
                    f"; if the Ray cluster at {self._scale.address} runs without authentication, start it with "
                    "RAY_AUTH_MODE=token (docs/scale.md)"
                )
            raise Unavailable(f"{error}{hint}") from error
        for differing in filter(None, map(other_versions, reports)):
            raise ConfigurationError(differing)

    def _answers(self, method: str, *content: object) -> dict[RayWorker, Any]:
        """Call a method of all workers. Leave out workers that have died too often or whose device fails, with a
        warning. Raises the error of the last one if no worker is left, and any other error that a worker answers."""
        calls = [(worker, worker.call(method, *content)) for worker in self._workers]
        answers: dict[RayWorker, Any] = {}
        for worker, call in calls:
            try:
                answers[worker] = _answer(worker, call, method, *content)
            except (DeviceFailed, WorkerDied) as error:
                if not answers and worker is calls[-1][0]:
                    raise
                if worker not in self._used:
                    worker.close()  # its CPUs and its share of a GPU are free
                self.missing.append(str(error))
                _log.warning("going on without one of %d workers of the Ray cluster: %s", len(calls), error)
        self._workers = list(answers)
        return answers

    def start(self, placed: Placement) -> list[RayWorker]:
        """Start workers without waiting for them."""
        import ray

        # A process that died is replaced here, not by Ray, whose restarted actor would refuse calls until it is up.
        remote = ray.remote(self._class).options(
            num_cpus=placed.threads,
            num_gpus=placed.gpus,
            scheduling_strategy="SPREAD",
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=self._scale.in_flight + 1,  # one for short calls beside the blocks, or beside a key range
        )
        return [RayWorker(remote.remote, self._callbacks, self._any_ready) for _ in range(placed.workers)]

    def _any_ready(self) -> bool:
        return any(worker.ready for worker in self._workers)

    def close(self) -> None:
        self._held.close()


def _calibrated(options: EngineOptions, onnx: GraphOptions) -> bool:
    """Return whether this process would compute the model in int8 by an accepted calibration."""
    if not (onnx.cache.is_dir() and uses_calibration(options, onnx)):
        return False
    try:
        return CpuCalibration(options, onnx.cache).current() is not None
    except (DeviceUnavailable, ModelUnsupported):
        return False


def _answer(worker: RayWorker, call: Future[Any], method: str, *content: object) -> Any:
    """Return what a call answers. Repeat it if the process dies, up to STARTS calls. Raises an answered error."""
    for _ in range(STARTS - 1):
        try:
            answer = call.result()
            break
        except WorkerDied:
            call = worker.call(method, *content)
    else:
        answer = call.result()
    if isinstance(answer, EngineError):
        raise answer
    return answer


def different(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return which of our packages have another version in a worker; "" if none."""
    return ", ".join(
        f"{name} {theirs.get(name, 'missing')}, not {version}"
        for name, version in ours.items()
        if theirs.get(name) != version
    )


def other_versions(report: Mapping[str, Any]) -> str:
    """Return what to do about versions of a worker that differ from ours; "" if none does."""
    if differing := different(versions(), report["versions"]):
        node = report["host"]
        return f"the node {node} of the Ray cluster has other versions: {differing}; install the same on all nodes"
    return ""


@contextmanager
def _connected(scale: ScaleSettings, gpus: int | None) -> Iterator[None]:
    """Connect to the cluster, or start a local one and end it afterwards."""
    local = scale.address == "local"
    with ExitStack() as held:
        given: dict[str, Any] = {}
        if local:
            folder = held.enter_context(_closed_folder())
            given = {"_temp_dir": f"{folder}/r", "num_cpus": max(scale.actors, processors()), "num_gpus": gpus}
            given |= {"object_store_memory": _object_store(), "include_dashboard": False}
        else:
            _check_reachable(scale.address)
        _authenticate(scale)
        try:
            import ray
        except ImportError as error:
            raise ConfigurationError(
                f"--scale ray needs Ray, which is not installed: {install_command('ray')}"
            ) from error

        # Ray reads RAY_AUTH_MODE when it is imported, which a library may have done before.
        ray._raylet.Config.initialize('{"AUTH_MODE": "token"}')
        # Ray would print deaths of workers to stdout, which is for data; RayWorker logs them. A test finds a new name.
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
        # In the main thread Ray would replace the handler of SIGTERM. The thread that starts a local cluster must live
        # as long: Linux ends the cluster's processes when it ends.
        thread = held.enter_context(ThreadPoolExecutor(1, "owl-sap-ray"))
        # Without waiting, Ray drops processes that it killed and that have not ended yet.
        held.callback(lambda: thread.submit(ray.shutdown, wait_for_processes=True).result())
        start = partial(ray.init, address=scale.address, log_to_driver=False, logging_level=logging.ERROR, **given)
        try:  # never without an address: Ray would look for the address of a cluster that may be gone
            thread.submit(start).result()
        except Exception as error:  # Ray raises many kinds
            raise Unavailable(f"the Ray cluster at {scale.address} cannot be used: {_cause(error)}") from error
        yield


@contextmanager
def _closed_folder() -> Iterator[str]:
    """Create a folder that only its owner can open, because Ray opens its own to all users. Delete those of processes
    that were killed: a running process holds a lock on its folder."""
    for earlier in Path(_folder()).glob(f"{FOLDERS}*"):
        with suppress(OSError), _opened(earlier) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(descriptor).st_mtime > UNLOCKED_SECONDS:
                shutil.rmtree(earlier, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=FOLDERS, dir=_folder(), ignore_cleanup_errors=True) as folder,
        _opened(Path(folder)) as descriptor,
    ):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield folder


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _folder() -> str:
    """Return where to put a local cluster's folder, so that the paths of its sockets have at most 107 bytes."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) + ROOM_OF_SOCKETS <= 107 else SHORT_FOLDER


def _object_store() -> int:
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else OBJECT_STORE
    if free < LEAST_STORE:
        raise ConfigurationError(
            f"Ray needs {LEAST_STORE >> 20} MiB of shared memory, but {SHARED_MEMORY} has {free >> 20} free: start the "
            "container with --shm-size 512m"
        )
    return min(OBJECT_STORE, free)


def _check_reachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        # nosemgrep: owl-line-out - to the cluster that the operator names
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise Unavailable(
            f"no Ray cluster answers at {address} ({error.strerror or type(error).__name__}): start it, or correct "
            "[scale] address"
        ) from None


def _authenticate(scale: ScaleSettings) -> None:
    """Set the variables by which Ray authenticates, for this process and those that it starts. Raises
    ConfigurationError for a missing token, or one that other users can read."""
    environment = os.environ  # noqa: TID251 # nosemgrep: owl-environment - Ray takes these from nowhere else
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    environment["RAY_ENABLE_AUTO_CONNECT"] = "0"  # else a call after the end would start another cluster
    environment["RAY_AUTH_MODE"] = "token"
    if scale.address == "local":
        environment.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        return
    if scale.token_path is None and environment.get("RAY_AUTH_TOKEN"):
        return
    file = (scale.token_path or Path(environment.get("RAY_AUTH_TOKEN_PATH") or DEFAULT_TOKEN)).expanduser()
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise ConfigurationError(
            f"a Ray cluster at an address needs its token: {file} cannot be read ({error.strerror}); copy it there "
            "from the head node, or set [scale] token_path"
        ) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(f"the token in {file} can be read by other users: chmod 600 {file}")
    environment.pop("RAY_AUTH_TOKEN", None)
    environment["RAY_AUTH_TOKEN_PATH"] = str(file)
