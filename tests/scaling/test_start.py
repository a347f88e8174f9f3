"""With which workers a cluster begins, and how `scale check` shows it. Their processes give the answers named here."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from app.src.cli import app
from app.src.core.backends import DeviceFailed, ModelNotFound
from app.src.core.loading import EngineOptions
from app.src.scaling import cluster
from app.src.scaling.cluster import Cluster, RayWorker
from app.src.scaling.worker import Loaded, Worker
from app.src.settings.model import ScaleSettings
from connector.errors import ConfigurationError, Unavailable
from tests.adversity.scene import NAME, Scene
from tests.scaling.test_workers import Handle

OPTIONS = EngineOptions(model="hash:64")
REPORT, LOADED = Worker().report(), Worker().load(OPTIONS)
assert isinstance(LOADED, Loaded)


class Process(Handle):
    """Answers each call at once. An exception as `report` or `load`: what Ray raises for the call."""

    def __init__(self, report: Any = REPORT, load: Any = LOADED) -> None:
        super().__init__()
        self.answers = {"report": report, "load": load}

    def __getattr__(self, method: str) -> Any:
        call, answer = super().__getattr__(method), self.answers[method]

        def remote(*content: object) -> Any:
            reference = call.remote(*content)
            if type(answer).__module__ == "ray.exceptions":
                self.calls[-1].set_exception(answer)
            else:
                self.calls[-1].set_result(answer)
            return reference

        return SimpleNamespace(remote=remote)


Begin = Callable[..., Cluster]


@pytest.fixture
def begin(ray: Any, callbacks: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """`begin([process, ...], ...)`: a cluster of these workers, each with the processes that it starts, in order."""
    monkeypatch.setattr(cluster, "_connected", lambda *_: nullcontext())
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"CPU": 8.0}}])

    def start(*workers: list[Process]) -> Cluster:
        def started(*_: object) -> list[RayWorker]:
            return [RayWorker(iter(processes).__next__, callbacks, lambda: True) for processes in workers]

        monkeypatch.setattr(Cluster, "start", started)
        return held.enter_context(closing(Cluster(ScaleSettings(actors=2))))

    with ExitStack() as held:
        yield start


@pytest.fixture
def dead(ray: Any) -> Process:
    return Process(report=ray.exceptions.ActorDiedError())


@pytest.mark.proves(32)
def test_a_worker_that_does_not_start_is_left_out_with_a_warning(
    begin: Begin, dead: Process, caplog: pytest.LogCaptureFixture
) -> None:
    begun = begin([dead, dead, dead], [Process()])
    with begun.engine(OPTIONS) as pool:
        assert len(pool.members) == len(begun.reports()) == 1
    assert len(begun.missing) == 1
    assert "3 workers of the Ray cluster died before they answered" in begun.missing[0]
    assert f"going on without one of 2 workers of the Ray cluster: {begun.missing[0]}" in caplog.text


def test_a_worker_that_dies_before_it_starts_is_not_left_out(begin: Begin, dead: Process) -> None:
    begun = begin([dead, dead, Process()], [Process()])
    with begun.engine(OPTIONS) as pool:
        assert (len(pool.members), begun.missing) == (2, [])


def test_without_any_worker_the_command_ends(begin: Begin, dead: Process) -> None:
    with pytest.raises(Unavailable, match=r"died before they answered.*see the logs of its nodes"):
        begin([dead, dead, dead], [dead, dead, dead]).engine(OPTIONS)


def test_a_worker_that_dies_of_the_model_is_left_out(ray: Any, begin: Begin) -> None:
    begun = begin([Process()], 4 * [Process(load=ray.exceptions.OutOfMemoryError("the node has 3 MB left"))])
    with begun.engine(OPTIONS) as pool:
        assert len(pool.members) == 1
    assert "the node has 3 MB left" in begun.missing[0]


def test_a_worker_whose_device_fails_is_left_out_but_other_errors_are_raised(begin: Begin) -> None:
    begun = begin([Process(load=DeviceFailed("node-2: the card fell off the bus"))], [Process()])
    with begun.engine(OPTIONS) as pool:
        assert (len(pool.members), begun.missing) == (1, ["node-2: the card fell off the bus"])
    with pytest.raises(DeviceFailed, match="node-2"):  # of the only one
        begin([Process(load=DeviceFailed("node-2"))]).engine(OPTIONS)
    with pytest.raises(ModelNotFound, match="node-2"):
        begin([Process()], [Process(load=ModelNotFound("node-2: no such model"))]).engine(OPTIONS)


def test_a_worker_that_is_left_out_ends_unless_an_earlier_model_uses_it(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[Process] = []
    monkeypatch.setattr(cluster, "_kill", killed.append)
    failing, first, second = Process(load=DeviceFailed("node-2: the card fell off the bus")), Process(), Process()
    begun = begin([failing], [first], [second])
    with begun.engine(OPTIONS) as earlier:
        assert killed == [failing]
        second.answers["load"] = failing.answers["load"]
        with begun.engine(OPTIONS) as pool:
            assert (len(earlier.members), len(pool.members), killed) == (2, 1, [failing])


@pytest.mark.parametrize("known", [{}, REPORT["versions"] | {"numpy": "1.0"}])
@pytest.mark.proves(36)
def test_other_versions_are_refused_for_each_model(begin: Begin, known: dict[str, str]) -> None:
    """A command syncs several collections with one cluster."""
    begun = begin([Process(report=REPORT | {"host": "node-2", "versions": known})])
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="node node-2 of the Ray cluster has other versions"):
            begun.engine(OPTIONS)


# ---------------------------------------------------------------------------------------------------- the command line


Check = Callable[..., Result]


@pytest.fixture
def check(environment: pytest.MonkeyPatch, tmp_path: Path) -> Check:
    """`check("--json", NAME="value")` runs `owl-sap scale check` in this process."""
    environment.chdir(tmp_path)
    (tmp_path / "owl-sap.toml").write_text('embedding = { model = "hash:64" }')

    def run(*arguments: str, **variables: str) -> Result:
        done = CliRunner().invoke(app, ["scale", "check", *arguments], env=variables, prog_name="owl-sap")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        return done

    return run


def test_check_shows_workers_and_which_are_missing(begin: Begin, dead: Process, check: Check) -> None:
    begin([Process()], [Process()])
    done = check("--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, len(found["workers"]), found["missing"]) == (0, 2, [])
    assert found["workers"][0]["pid"] == os.getpid()
    begin([Process()], [dead, dead, dead])
    done = check()
    assert done.exit_code == 1
    assert "a worker is missing: 3 workers of the Ray cluster died before they answered" in done.stderr
    found = json.loads(check("--json").stdout)
    assert (len(found["workers"]), len(found["missing"])) == (1, 1)


@pytest.mark.proves(36)
def test_check_refuses_other_versions_and_fingerprints(begin: Begin, check: Check) -> None:
    begin([Process(report=REPORT | {"host": "node-2", "versions": REPORT["versions"] | {"numpy": "1.0"}})])
    done = check()
    assert (done.exit_code, "node node-2 of the Ray cluster has other versions: numpy 1.0" in done.stderr) == (2, True)
    assert isinstance(LOADED, Loaded)
    begin([Process()], [Process(load=replace(LOADED, fingerprint="hash:64@another"))])
    done = check()
    assert (done.exit_code, f"hash:64@another, not {LOADED.fingerprint}" in done.stderr) == (2, True)


@pytest.mark.proves(36)
def test_check_refuses_a_token_that_is_missing_or_can_be_read_by_others(
    check: Check, listening: str, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    given = {"OWL_SAP_SCALE__ADDRESS": listening, "OWL_SAP_SCALE__TOKEN_PATH": str(token)}
    done = check(**given)
    assert (done.exit_code, f"needs its token: {token} cannot be read" in done.stderr) == (2, True)
    token.write_text("t" * 64)
    token.chmod(0o640)
    done = check(**given)
    assert (done.exit_code, f"chmod 600 {token}" in done.stderr) == (2, True)


@pytest.mark.proves(36)
def test_check_refuses_more_workers_than_the_nodes_hold(begin: Begin, check: Check) -> None:
    begin([])
    done = check("--actors", "9")
    assert (done.exit_code, "room for 8 of 9 workers" in done.stderr) == (2, True)


def test_a_build_of_a_generation_uses_the_cluster_of_the_settings(
    environment: pytest.MonkeyPatch, scene: Scene
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    scene.sync()
    ray = {"OWL_SAP_SCALE__ENGINE": "ray", "OWL_SAP_SCALE__ADDRESS": address}
    code, _, errors = scene.verb("generations", NAME, "--build", env=ray)
    assert (code, f"no Ray cluster answers at {address}" in errors) == (3, True), errors
    assert scene.verb("verify", NAME, env=ray)[0] == 0, "it embeds here"
