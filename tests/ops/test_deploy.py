"""deploy_t4_optimized.sh on hosts made of stubs: what it refuses, what it does, and what it never prints."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.ops.conftest import Host

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "deploy_t4_optimized.sh"


def old_compose(host: Host) -> None:
    host.variables["STUB_COMPOSE"] = "none"


def set_to(**variables: str) -> Callable[[Host], None]:
    return lambda host: host.variables.update(variables)


def remove(path: str) -> Callable[[Host], None]:
    return lambda host: (host.folder / path).unlink()


def write_env(text: str) -> Callable[[Host], None]:
    def write(host: Host) -> None:
        (host.folder / ".env").write_text(text)

    return write


REFUSALS: dict[str, tuple[Callable[[Host], object], str, str]] = {
    # situation: (how the host differs, what is wrong, what to do)
    "no docker": (lambda host: host.without("docker"), "docker was not found", "Install Docker Engine"),
    "no daemon": (set_to(STUB_DAEMON="down"), "daemon does not answer", "systemctl start docker"),
    "no compose": (old_compose, "Docker Compose was not found", "docker-compose-plugin"),
    "no nvidia runtime": (set_to(STUB_RUNTIME="runc"), "no NVIDIA runtime", "nvidia-container-toolkit"),
    "no driver": (lambda host: host.without("nvidia-smi"), "nvidia-smi was not found", "R580"),
    "no gpu": (set_to(STUB_GPU=""), "reports no GPU", "nvidia-smi"),
    "old driver": (set_to(STUB_DRIVER="470.82.01"), "driver 470.82.01 is too old", "Update the driver"),
    "old card": (set_to(STUB_CAPABILITY="6.1"), "compute capability 6.1", "T4 or newer"),
    "no .env": (remove(".env"), ".env is missing", "cp .env.example .env"),
    "key missing": (write_env("HANA_HOST=h\nHANA_USER=u\n"), "no value to HANA_PASSWORD", ".env.example"),
    "key empty": (write_env('HANA_HOST=h\nHANA_USER=u\nHANA_PASSWORD=""\n'), "HANA_PASSWORD", ".env.example"),
    "keys commented out": (write_env("#HANA_HOST=h\n# HANA_USER=u\n"), "HANA_HOST HANA_USER HANA_PASSWORD", "Add"),
    "no configuration": (remove("owl-sap.toml"), "owl-sap.toml is missing", "cp owl-sap.example.toml"),
    "build fails": (set_to(STUB_BUILD="fails"), "image could not be built", "left as it is"),
    "gpu not visible": (set_to(STUB_RUN="fails"), "cannot see the GPU", "--gpus all"),
    "start fails": (set_to(STUB_UP="fails"), "could not be started", "message above"),
    "exits at once": (set_to(STUB_HEALTH="exited "), "did not become ready (exited )", "docker logs"),
    "unhealthy": (set_to(STUB_HEALTH="running unhealthy"), "did not become ready", "docker logs"),
    "never ready": (set_to(STUB_HEALTH="running starting"), "did not become ready", "docker logs"),
}


@pytest.mark.parametrize("situation", REFUSALS)
def test_refusal_is_one_line_with_the_fix(host: Host, situation: str) -> None:
    spoil, wrong, fix = REFUSALS[situation]
    spoil(host)
    result = host.run(SCRIPT)
    assert result.returncode == 1, result.stdout + result.stderr
    refusals = [line for line in result.stderr.splitlines() if line.startswith("deploy: ")]
    assert len(refusals) == 1, result.stderr
    assert wrong in refusals[0]
    assert fix in refusals[0]


@pytest.mark.parametrize("given", ["HANA_PASSWORD='a$b#c'", "HANA_PASSWORD_FILE=/run/secrets/hana_password"])
def test_password_or_its_file_is_enough(host: Host, given: str) -> None:
    (host.folder / ".env").write_text(f"HANA_HOST=h\nHANA_USER=u\n{given}\n")
    result = host.run(SCRIPT, "--dry-run")
    assert result.returncode == 0, result.stderr


def test_folder_of_secrets_is_made_once_and_kept(host: Host) -> None:
    assert "+ mkdir secrets" in host.run(SCRIPT, "--dry-run").stdout
    assert not (host.folder / "secrets").exists()
    assert host.run(SCRIPT).returncode == 0
    (host.folder / "secrets" / "hana_ca.pem").write_text("pem")
    assert "mkdir" not in host.run(SCRIPT).stdout
    assert (host.folder / "secrets" / "hana_ca.pem").read_text() == "pem"


def test_host_and_user_may_stand_in_the_configuration(host: Host) -> None:
    (host.folder / ".env").write_text("HANA_PASSWORD=x\n")
    (host.folder / "owl-sap.toml").write_text('[hana]\nhost = "h"\nuser = "u"\n[store]\n')
    assert host.run(SCRIPT, "--dry-run").returncode == 0
    (host.folder / "owl-sap.toml").write_text('[store.hana]\nhost = "h"\nuser = "u"\n')
    assert "HANA_HOST HANA_USER" in host.run(SCRIPT, "--dry-run").stderr


def test_the_examples_as_copied_lack_only_what_is_secret(host: Host) -> None:
    shutil.copy(ROOT / ".env.example", host.folder / ".env")
    shutil.copy(ROOT / "owl-sap.example.toml", host.folder / "owl-sap.toml")
    result = host.run(SCRIPT, "--dry-run")
    assert "no value to HANA_PASSWORD." in result.stderr


def test_taken_port_is_refused_unless_it_is_ours(host: Host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        del host.variables["OWL_SAP_API__PORT"]
        with (host.folder / ".env").open("a") as env:
            env.write(f"OWL_SAP_API__PORT={port}\n")
        refused = host.run(SCRIPT)
        host.variables["STUB_RUNNING"] = "true"
        again = host.run(SCRIPT)
    assert refused.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in refused.stderr
    assert again.returncode == 0, again.stderr


def test_deploys_in_order_and_says_where_it_is(host: Host) -> None:
    result = host.run(SCRIPT)
    assert result.returncode == 0, result.stderr
    assert "ready: http://127.0.0.1:1/docs" in result.stdout
    done = [line for line in host.log.splitlines() if not line.startswith(("docker info", "docker inspect"))]
    file = "docker compose -f docker-compose.t4-optimized.yml"
    assert done == [
        "docker compose version",
        f"{file} build",
        "docker run --rm --gpus all --entrypoint nvidia-smi owl-sap-connector:t4 -L",
        f"{file} up -d --no-build",
    ]


@pytest.mark.parametrize(("driver", "torch"), [("580.95.05", "2.13"), ("550.54.14", "2.10"), ("525.60.13", "2.10")])
def test_torch_is_chosen_by_the_driver(host: Host, driver: str, torch: str) -> None:
    host.variables["STUB_DRIVER"] = driver
    assert f"torch for this driver: torch=={torch}.*" in host.run(SCRIPT, "--dry-run").stdout


def test_compose_v1_is_used_where_there_is_no_v2(host: Host) -> None:
    old_compose(host)
    docker = (host.bin / "docker").read_text()
    host.stub("docker-compose", docker.replace('"docker $*"', '"docker-compose $*"').replace("compose*", "*"))
    result = host.run(SCRIPT)
    assert result.returncode == 0, result.stderr
    assert "docker-compose -f docker-compose.t4-optimized.yml up -d --no-build" in host.log


def test_dry_run_changes_nothing(host: Host) -> None:
    result = host.run(SCRIPT, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "+ docker compose -f docker-compose.t4-optimized.yml up -d --no-build" in result.stdout
    assert not [line for line in host.log.splitlines() if " build" in line or " up " in line or "docker run" in line]


def test_status_shows_health_and_gpu(host: Host) -> None:
    result = host.run(SCRIPT, "--status")
    assert result.returncode == 0, result.stderr
    assert "owl-sap-connector-t4: running healthy" in result.stdout
    assert "Tesla T4" in result.stdout
    host.variables["STUB_HEALTH"] = ""
    gone = host.run(SCRIPT, "--status")
    assert gone.returncode == 1
    assert "there is no container owl-sap-connector-t4" in gone.stderr


def test_help_and_usage(host: Host) -> None:
    assert "usage:" in host.run(SCRIPT, "--help").stdout
    wrong = host.run(SCRIPT, "--dryrun")
    assert wrong.returncode == 2
    assert "usage:" in wrong.stderr


@pytest.mark.parametrize("arguments", [[], ["--dry-run"], ["--status"]])
def test_no_value_of_env_is_printed(host: Host, arguments: list[str]) -> None:
    result = host.run(SCRIPT, *arguments)
    for secret in ("s3cret-canary", "hana.example"):
        assert secret not in result.stdout + result.stderr + host.log


def test_readable_env_is_noted(host: Host, tmp_path: Path) -> None:
    (host.folder / ".env").chmod(0o644)
    assert "chmod 600 .env" in host.run(SCRIPT, "--dry-run").stdout
