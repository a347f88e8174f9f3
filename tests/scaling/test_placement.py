"""Where workers are placed, and what is refused before Ray starts."""

from __future__ import annotations

import os
import shutil
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from app.src.core.loading import EngineOptions
from app.src.scaling import cluster
from app.src.scaling.cluster import Cluster, Placement, different, placement
from app.src.settings.model import ScaleSettings
from connector.errors import ConfigurationError, Unavailable

CPUS = {"CPU": 8.0}
CARDS = {"CPU": 16.0, "GPU": 4.0}


@pytest.mark.parametrize(
    ("scale", "device", "nodes", "expected"),
    [
        ({}, "auto", [CPUS], Placement(1, 1, 8, 0)),
        ({}, "auto", [CPUS, CPUS], Placement(2, 1, 8, 0)),
        ({"actors": 3}, "auto", [CPUS, CPUS], Placement(3, 2, 4, 0)),
        ({"actors": 2, "threads": 3}, "cpu", [CARDS], Placement(2, 2, 3, 0)),
        ({}, "auto", [CARDS], Placement(4, 4, 4, 1.0)),
        ({"gpus_per_actor": 0.5}, "auto", [CARDS], Placement(8, 8, 2, 0.5)),
        ({"gpus_per_actor": 0.3}, "auto", [{"CPU": 8.0, "GPU": 1.0}], Placement(3, 3, 2, 0.3)),
        ({"actors": 1}, "cuda:1", [CPUS, CARDS], Placement(1, 1, 16, 1.0)),
        ({}, "auto", [{"memory": 1.0}, CPUS], Placement(1, 1, 8, 0)),  # a head without CPUs
    ],
)
def test_workers_get_a_share_of_their_nodes(
    scale: dict[str, float], device: str, nodes: list[dict[str, float]], expected: Placement
) -> None:
    assert placement(ScaleSettings.model_validate(scale), device, nodes) == expected


@pytest.mark.parametrize(
    ("scale", "device", "nodes", "message"),
    [
        ({}, "cuda", [CPUS], "no node of the Ray cluster has a GPU"),
        ({"actors": 5}, "all", [CARDS], "room for 4 of 5 workers"),
        ({"actors": 9}, "auto", [CPUS], "room for 8 of 9 workers"),
        ({"actors": 3, "threads": 8}, "auto", [CPUS, CPUS], "room for 2 of 3 workers"),
        ({}, "auto", [{"memory": 1.0}], "no node of the Ray cluster has a CPU"),
    ],
)
@pytest.mark.proves(36)
def test_what_the_nodes_cannot_hold_is_refused(
    scale: dict[str, float], device: str, nodes: list[dict[str, float]], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        placement(ScaleSettings.model_validate(scale), device, nodes)


def test_the_memory_of_a_shared_card_is_bounded_by_the_share() -> None:
    options = Placement(8, 4, 2, 0.25).options(EngineOptions(memory_fraction=0.8, reserve_mb=512, device="all"))
    assert (options.device, options.threads, options.engines) == ("cuda", 2, 4)
    assert (options.memory_fraction, options.reserve_mb) == (0.2, 128)
    options = Placement(2, 1, 4, 0).options(EngineOptions(memory_fraction=0.8))
    assert (options.device, options.memory_fraction, options.threads) == ("cpu", 0.8, 4)


@pytest.mark.proves(36)
def test_versions_that_differ_are_named() -> None:
    ours = {"Python": "3.11.9", "torch": "2.13.0"}
    assert different(ours, ours | {"more": "1"}) == ""
    assert different(ours, {"Python": "3.11.8"}) == "Python 3.11.8, not 3.11.9, torch missing, not 2.13.0"


@pytest.mark.proves(36)
def test_little_shared_memory_is_refused_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 << 20, 0, 64 << 20))
    with pytest.raises(ConfigurationError, match=r"75 MiB of shared memory.*64 free.*--shm-size"):
        Cluster(ScaleSettings())


def test_folders_of_killed_processes_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_folder", lambda: str(tmp_path))
    killed, just_made, other = (tmp_path / name for name in ("owl-ray-killed", "owl-ray-young", "other"))
    for folder in (killed, just_made, other):
        (folder / "r").mkdir(parents=True)
    with cluster._closed_folder() as running:
        for folder in (killed, Path(running), other):
            os.utime(folder, (0, 0))
        with cluster._closed_folder() as second:
            assert set(tmp_path.iterdir()) == {just_made, other, Path(running), Path(second)}
            assert Path(second).stat().st_mode & 0o077 == 0
    assert set(tmp_path.iterdir()) == {just_made, other}


def test_an_address_without_a_cluster_is_refused(listening: str, environment: pytest.MonkeyPatch) -> None:
    closed = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{closed.getsockname()[1]}"
    closed.close()
    with pytest.raises(Unavailable, match=f"no Ray cluster answers at {address}"):
        Cluster(ScaleSettings(address=address))


@pytest.mark.proves(36)
def test_an_address_needs_a_token(listening: str, environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"needs its token: .*auth_token cannot be read"):
        Cluster(ScaleSettings(address=listening))


@pytest.mark.parametrize("given", ["setting", "variable", "default"])
@pytest.mark.proves(36)
def test_a_token_that_others_can_read_is_refused(
    given: str, listening: str, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("t" * 64)
    file.chmod(0o644)
    if given == "variable":
        environment.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    scale = ScaleSettings(address=listening, token_path=file if given == "setting" else None)
    with pytest.raises(ConfigurationError, match=r"can be read by other users: chmod 600"):
        Cluster(scale)
    file.chmod(0o600)
    cluster._authenticate(scale)
    assert os.environ["RAY_AUTH_TOKEN_PATH"] == str(file)
    assert "RAY_AUTH_TOKEN" not in os.environ
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == os.environ["RAY_ENABLE_AUTO_CONNECT"] == "0"


@pytest.mark.proves(36)
def test_ray_authenticates_if_a_library_imported_it_before(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray._raylet.Config.initialize('{"AUTH_MODE": "disabled"}')  # as it is after an import without the variables

    def started(**_: object) -> None:
        assert ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.TOKEN
        raise RuntimeError("that will do")

    monkeypatch.setattr(ray, "init", started)
    with pytest.raises(Unavailable, match="that will do"):
        Cluster(ScaleSettings())


@pytest.mark.parametrize("address", ["HEAD", "ray://head:10001", "auto", "head:", "local:1/"])
def test_addresses_are_local_or_a_host_with_a_port(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        ScaleSettings(address=address)
    assert ScaleSettings(address="[::1]:6379").address == "[::1]:6379"
